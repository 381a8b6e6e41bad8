//! Our own file: a copy of the primary with our entry.

use super::*;

#[test]
fn our_file_is_a_copy_of_the_primary_with_our_entry() {
    let mut node = given(&[], &[("10-podnet.conflist", PTP)]);
    let plan = node.settle();
    assert_eq!(problems(&plan), "");
    assert_eq!(plan.effective.as_deref(), Some("02-sluice.conflist"));
    assert_eq!(plan.primary.as_deref(), Some("10-podnet.conflist"));
    assert_eq!(node.text("02-sluice.conflist"), ptp_and_ours());
    assert_eq!(node.text("10-podnet.conflist"), PTP);
    assert_eq!(node.net.files["02-sluice.conflist"].mode, 0o600);
}

#[test]
fn any_change_of_the_primary_is_followed() {
    let mut node = given(&[], &[("10-podnet.conflist", PTP)]);
    node.settle();
    for changed in [
        r#"{"cniVersion":"1.0.0","name":"podnet","plugins":[{"type":"ptp","mtu":1400}]}"#,
        r#"{"cniVersion":"1.0.0","name":"podnet","plugins":[{"type":"ptp","mtu":1400},{"type":"portmap"}]}"#,
        r#"{"cniVersion":"0.4.0","name":"other","plugins":[{"type":"ptp"}]}"#,
    ] {
        node.net
            .files
            .append(&mut net(&[("10-podnet.conflist", changed)]).files);
        node.settle();
        assert!(
            node.text("02-sluice.conflist")
                .starts_with(&changed[..changed.len() - 2]),
            "{changed}"
        );
    }
}

#[test]
fn a_single_plugin_is_copied_as_a_list_and_not_renamed() {
    let text = r#"{"cniVersion":"1.0.0","name":"edge","type":"macvlan"}"#;
    let mut node = given(&[], &[("05-edge.conf", text)]);
    assert_eq!(problems(&node.settle()), "");
    assert_eq!(node.names(), ["02-sluice.conflist", "05-edge.conf"]);
    assert_eq!(node.text("05-edge.conf"), text);
    assert!(node.text("02-sluice.conflist").contains("\"name\": \"edge\""));
}

#[test]
fn group_may_read_our_file_on_request() {
    let mut node = given(
        &["--group-read"],
        &[
            ("10-podnet.conflist", PTP),
            ("02-sluice.conflist", &ptp_and_ours()),
        ],
    );
    node.settle();
    assert_eq!(node.net.files["02-sluice.conflist"].mode, 0o640);
}

#[test]
fn a_copy_outlives_its_primary_for_a_grace_only() {
    let mut node = given(&[], &[("02-sluice.conflist", &ptp_and_ours())]);
    let plan = node.plan();
    assert!(plan.steps.is_empty() && plan.primary_gone);
    node.primary_gone = Duration::from_secs(10);
    node.settle();
    assert_eq!(node.names(), Vec::<&str>::new());

    // Somebody is writing the primary's file.
    let mut node = given(
        &[],
        &[
            ("02-sluice.conflist", &ptp_and_ours()),
            ("10-podnet.conflist", "{\"na"),
        ],
    );
    node.primary_gone = Duration::from_secs(10);
    let plan = node.plan();
    assert!(plan.steps.is_empty() && !plan.primary_gone);
}

#[test]
fn files_of_ours_from_other_settings_go_after_the_new_one_is_there() {
    let ours = ptp_and_ours();
    for mode in ["owned", "chained"] {
        let mut node = given(
            &["--mode", mode, "--owned-name", "03-sluice.conflist"],
            &[("02-sluice.conflist", &ours), ("10-podnet.conflist", PTP)],
        );
        let plan = node.plan();
        assert!(
            matches!(plan.steps.as_slice(), [Step::Write { .. }, Step::Delete { name, .. }] if name == "02-sluice.conflist"),
            "{plan:?}"
        );
        let plan = node.settle();
        assert_eq!(problems(&plan), "");
        assert!(plan.effective.is_some());
    }
}

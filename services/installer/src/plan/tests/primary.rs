//! Which file is the primary network's.

use super::*;

#[test]
fn neighbours_that_are_no_configurations_are_passed_over_and_named() {
    let mut node = given(
        &[],
        &[
            ("00-a.conf", "not json"),
            ("01-b.conflist", r#"{"plugins":[{"type":"x"}]}"#),
            ("03-c.conflist", r#"{"name":"c","plugin":[]}"#),
            ("04-d.conf", r#"{"name":"d"}"#),
            ("05-e.CONF", PTP),
            ("10-podnet.conflist", PTP),
        ],
    );
    let plan = node.settle();
    assert_eq!(problems(&plan), "");
    assert_eq!(plan.primary.as_deref(), Some("10-podnet.conflist"));
    let notes = plan.notes.join("\n");
    assert!(
        notes.contains("00-a.conf") && notes.contains("01-b.conflist") && !notes.contains("03-c"),
        "{notes}"
    );
}

#[test]
fn without_a_primary_it_is_waited_for() {
    let plan = given(&[], &[("10-a.conflist", "{}")]).plan();
    assert_eq!(plan.steps, []);
    let text = problems(&plan);
    assert!(
        text.starts_with("no-primary: /etc/cni/net.d") && text.contains("10-a.conflist"),
        "{text}"
    );
}

#[test]
fn a_directory_that_is_not_there_is_one_without_a_primary() {
    let directory = tempfile::tempdir().unwrap();
    let mut node = given(&[], &[]);
    node.net = crate::observe::net_dir(&directory.path().join("cni/net.d"));
    let plan = node.plan();
    assert_eq!(plan.steps, []);
    assert_eq!(
        problems(&plan),
        "no-primary: /etc/cni/net.d has no valid network configuration yet"
    );
    // Nor does a removal find anything to do.
    assert_eq!(plan_removal(&node.net, &[], &Kubeconfig::Missing).steps, []);
}

#[test]
fn a_network_with_a_broken_plugin_in_a_file_is_passed_over_and_named() {
    let directory = tempfile::tempdir().unwrap();
    let net = directory.path();
    std::fs::create_dir(net.join("dropped")).unwrap();
    for (name, text) in [
        (
            "05-dropped.conflist",
            r#"{"cniVersion":"1.1.0","name":"dropped"}"#,
        ),
        ("dropped/10-ptp.conf", r#"{"type":"ptp"}"#),
        ("dropped/20-broken.conf", r#"{"type":"#),
        ("10-podnet.conflist", PTP),
    ] {
        std::fs::write(net.join(name), text).unwrap();
    }
    let mut node = given(&["--mode", "chained"], &[]);
    let primary = |node: &mut Given| {
        node.net = crate::observe::net_dir(net);
        node.plan().primary
    };
    assert_eq!(primary(&mut node).as_deref(), Some("10-podnet.conflist"));
    let notes = node.plan().notes.join("\n");
    assert!(
        notes.contains("05-dropped.conflist") && notes.contains("20-broken.conf is not valid"),
        "{notes}"
    );
    // With nothing else there is no primary, and the reason is told.
    std::fs::remove_file(net.join("10-podnet.conflist")).unwrap();
    assert_eq!(primary(&mut node), None);
    let text = problems(&node.plan());
    assert!(
        text.starts_with("no-primary: ") && text.contains("20-broken.conf is not valid"),
        "{text}"
    );
    std::fs::write(net.join("dropped/20-broken.conf"), r#"{"type":"portmap"}"#).unwrap();
    assert_eq!(primary(&mut node).as_deref(), Some("05-dropped.conflist"));
}

#[test]
fn another_primary_is_followed_when_the_first_one_goes() {
    let other = r#"{"cniVersion":"1.0.0","name":"other","plugins":[{"type":"other"}]}"#;
    let mut node = given(&[], &[("10-podnet.conflist", PTP), ("20-other.conflist", other)]);
    node.settle();
    node.net.files.remove("10-podnet.conflist");
    assert_eq!(node.settle().primary.as_deref(), Some("20-other.conflist"));
    assert!(node.text("02-sluice.conflist").contains("\"other\""));
}

#[test]
fn a_named_primary_may_have_the_other_extension_or_any() {
    for (named, is) in [
        ("10-podnet.conf", "10-podnet.conflist"),
        ("10-podnet.conflist", "10-podnet.conf"),
        ("x.file", "x.file"),
    ] {
        let text = if is == "10-podnet.conf" {
            r#"{"cniVersion":"1.0.0","type":"ptp"}"#
        } else {
            PTP
        };
        let mut node = given(&["--primary", named], &[("05-first.conflist", PTP)]);
        node.net.files.append(&mut net(&[(is, text)]).files);
        let plan = node.settle();
        assert_eq!(
            (plan.primary.as_deref(), problems(&plan).as_str()),
            (Some(is), "")
        );
    }
    let plan = given(&["--primary", "absent.conflist"], &[("05-first.conflist", PTP)]).plan();
    assert!(plan.steps.is_empty() && problems(&plan).contains("absent.conflist cannot be used"));
}

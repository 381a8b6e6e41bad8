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

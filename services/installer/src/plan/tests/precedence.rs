//! Files that the runtime prefers to ours, and other meshes.

use super::*;

#[test]
fn a_file_that_the_runtime_prefers_is_told_and_not_fought() {
    for newcomer in ["000-other.conflist", "000-other.json"] {
        let text = if newcomer.ends_with("json") {
            r#"{"type":"other"}"#
        } else {
            PTP
        };
        let mut node = given(&[], &[("10-podnet.conflist", PTP)]);
        node.settle();
        node.net.files.append(&mut net(&[(newcomer, text)]).files);
        let plan = node.plan();
        assert_eq!(plan.steps, [], "{newcomer}");
        assert!(
            problems(&plan).starts_with(&format!("not-first-in-cni-dir: {newcomer}")),
            "{}",
            problems(&plan)
        );
        assert_eq!(plan.effective, None);
        assert_eq!(plan.primary.as_deref(), Some("10-podnet.conflist"));
    }
}

#[test]
fn a_preferred_file_takes_our_entry_on_request() {
    let mut node = given(
        &["--when-preempted", "chain"],
        &[("10-podnet.conflist", PTP), ("000-other.conflist", PTP)],
    );
    let plan = node.settle();
    assert_eq!(
        (problems(&plan).as_str(), plan.effective.as_deref()),
        ("", Some("000-other.conflist"))
    );
    let mut node = given(
        &["--mode", "chained"],
        &[
            ("10-podnet.conflist", &ptp_and_ours()),
            ("000-other.conflist", PTP),
        ],
    );
    let plan = node.settle();
    assert_eq!(
        (problems(&plan).as_str(), plan.effective.as_deref()),
        ("", Some("000-other.conflist"))
    );
}

#[test]
fn a_file_that_hands_over_to_ours_may_come_first() {
    let nested = format!(
        r#"{{"type":"multus","name":"m","delegates":[{{"name":"podnet","plugins":[{{"type":"ptp"}},{OURS}]}}]}}"#
    );
    let named = r#"{"type":"multus","name":"m","clusterNetwork":"/host/etc/cni/net.d/02-sluice.conflist"}"#;
    for text in [nested.as_str(), named] {
        let mut node = given(&[], &[("10-podnet.conflist", PTP), ("00-multus.conf", text)]);
        let plan = node.settle();
        assert_eq!(problems(&plan), "");
        assert_eq!(plan.primary.as_deref(), Some("10-podnet.conflist"));
        assert!(plan.notes[0].contains("00-multus.conf"), "{:?}", plan.notes);
    }
}

#[test]
fn never_are_two_meshes_in_a_chain() {
    for mode in ["owned", "chained"] {
        let node = given(&["--mode", mode], &[("10-podnet.conflist", WITH_ISTIO)]);
        let plan = node.plan();
        assert_eq!(plan.steps, []);
        assert!(problems(&plan).starts_with("another-mesh: 10-podnet.conflist"));

        let mut node = given(
            &["--mode", mode, "--take-over"],
            &[("10-podnet.conflist", WITH_ISTIO)],
        );
        let plan = node.settle();
        assert_eq!(problems(&plan), "");
        let effective = plan.effective.unwrap();
        assert_eq!(node.net.load(&effective).unwrap().kinds(), ["ptp", "sluice-cni"]);
        // The way back from owned mode: the primary has kept the entry.
        assert_eq!(
            node.text("10-podnet.conflist").contains("istio-cni"),
            mode == "owned"
        );
    }
}

#[test]
fn the_other_agents_own_file_does_not_come_first() {
    let mut node = given(
        &["--take-over"],
        &[("10-podnet.conflist", PTP), ("02-istio-cni.conflist", WITH_ISTIO)],
    );
    let plan = node.settle();
    assert_eq!(
        (problems(&plan).as_str(), plan.effective.as_deref()),
        ("", Some("01-sluice.conflist"))
    );
    node.net.files.remove("02-istio-cni.conflist");
    assert_eq!(node.settle().primary.as_deref(), Some("10-podnet.conflist"));
}

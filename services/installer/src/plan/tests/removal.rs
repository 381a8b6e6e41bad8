//! What a removal takes away, and what it leaves.

use super::*;

#[test]
fn a_file_of_ours_that_was_set_aside_does_not_come_back_one_day() {
    let ours = ptp_and_ours();
    let files = [
        ("02-sluice.conflist.cilium_bak", ours.as_str()),
        ("10-podnet.conflist", PTP),
    ];
    let mut node = given(&[], &files);
    assert_eq!(problems(&node.settle()), "");
    assert_eq!(node.names(), ["02-sluice.conflist", "10-podnet.conflist"]);
    assert_eq!(removal(&files).0.names(), ["10-podnet.conflist"]);
}

fn removal(files: &[(&str, &str)]) -> (Given, Plan) {
    let mut node = given(&[], files);
    let plan = plan_removal(&node.net, &node.bins, &Kubeconfig::Present(Vec::new(), 0o600));
    for step in plan.steps.iter().filter(|step| step.is_config()) {
        node.perform(step.clone());
    }
    (node, plan)
}

#[test]
fn a_removal_cleans_every_file_then_the_credentials_then_the_plugin() {
    let ours = ptp_and_ours();
    let alone = format!(r#"{{"name":"n","plugins":[{OURS}]}}"#);
    let files = [
        ("02-sluice.conflist", ours.as_str()),
        ("05-edited.conflist", ours.as_str()),
        ("06-alone.conflist", alone.as_str()),
        ("10-podnet.conflist", PTP),
        ("podnet/10-ptp.conf", r#"{"type":"ptp"}"#),
        ("podnet/zz-sluice-cni.conf", OURS),
        ("99-list.conf", ours.as_str()),
    ];
    let (node, plan) = removal(&files);
    assert_eq!(problems(&plan), "");
    assert_eq!(
        node.names(),
        ["05-edited.conflist", "10-podnet.conflist", "99-list.conf"]
    );
    assert_eq!(node.text("05-edited.conflist"), PTP);
    assert_eq!(node.text("99-list.conf"), PTP);
    assert_eq!(node.net.drop_ins["podnet"].len(), 1);
    let last: Vec<&Step> = plan.steps.iter().skip_while(|step| step.is_config()).collect();
    assert_eq!(last, [&Step::DeleteKubeconfig, &Step::RetireBinary(0)]);
}

#[test]
fn the_plugin_stays_while_a_file_names_it_that_cannot_be_cleaned() {
    let (_, plan) = removal(&[(
        "10-podnet.conflist",
        r#"{"name":"n","plugins":[{"type":"sluice-cni"}"#,
    )]);
    assert!(problems(&plan).contains("10-podnet.conflist names our plugin"));
    assert_eq!(plan.steps, [Step::DeleteKubeconfig]);
}

#[test]
fn a_group_that_cannot_be_kept_does_not_keep_our_entry_in() {
    let mut node = given(&[], &[("10-podnet.conflist", &ptp_and_ours())]);
    node.net.files.get_mut("10-podnet.conflist").unwrap().gid = 4_000_000;
    let plan = plan_removal(&node.net, &node.bins, &Kubeconfig::Missing);
    assert!(
        matches!(
            plan.steps.as_slice(),
            [
                Step::Write {
                    mode: FileMode::KeptButGroup,
                    expect: Some(_),
                    ..
                },
                Step::RetireBinary(0)
            ]
        ),
        "{plan:?}"
    );
}

#[test]
fn a_removal_of_nothing_does_nothing_to_the_configurations() {
    let (node, plan) = removal(&[
        ("10-podnet.conflist", PTP),
        ("x.conf", r#"{"type":"ptp","note":"sluice-cni"}"#),
    ]);
    assert_eq!(plan.steps, [Step::DeleteKubeconfig, Step::RetireBinary(0)]);
    assert_eq!(node.text("10-podnet.conflist"), PTP);
}

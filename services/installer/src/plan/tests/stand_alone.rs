//! A network of our own beside those of others.

use super::*;
use crate::config::STAND_ALONE_FILE;

/// As the directory of a Multus may be found: its own file, a single plugin, a list, and something that is no configuration.
const OTHERS: [(&str, &str); 4] = [
    (
        "00-multus.conf",
        r#"{"cniVersion":"0.3.1","name":"multus-cni-network","type":"multus"}"#,
    ),
    (
        "05-edge.conf",
        r#"{"cniVersion":"1.0.0","name":"edge","type":"macvlan"}"#,
    ),
    ("10-podnet.conflist", PTP),
    ("zzz-broken.conf", "{"),
];

fn stand_alone(files: &[(&str, &str)]) -> Given {
    given(&["--mode", "stand-alone"], files)
}

#[test]
fn it_is_one_file_more_and_no_other_is_touched() {
    let mut node = stand_alone(&OTHERS);
    let plan = node.plan();
    assert!(
        matches!(plan.steps.as_slice(), [Step::Write { name, mode: FileMode::Exactly(0o600), expect: None, .. }]
            if name == STAND_ALONE_FILE),
        "{plan:?}"
    );
    let plan = node.settle();
    assert_eq!(problems(&plan), "");
    assert!(plan.notes.is_empty(), "{:?}", plan.notes);
    assert_eq!(
        (plan.effective.as_deref(), plan.primary),
        (Some(STAND_ALONE_FILE), None)
    );
    for (name, text) in OTHERS {
        assert_eq!(node.text(name), text, "{name}");
    }
    let conf: serde_json::Value = serde_json::from_str(node.text(STAND_ALONE_FILE)).unwrap();
    assert_eq!(
        (&conf["type"], &conf["name"]),
        (&conf["name"], &"sluice-cni".into())
    );
    assert_eq!(
        (&conf["standAlone"], &conf["cniVersion"]),
        (&true.into(), &"0.4.0".into())
    );
}

#[test]
fn it_needs_no_primary_and_waits_for_the_agent_as_the_other_modes_do() {
    let mut node = stand_alone(&[]);
    node.not_serving = Some("the executor is not connected");
    let plan = node.plan();
    assert!(
        plan.steps.is_empty() && problems(&plan).contains("the executor is not connected"),
        "{plan:?}"
    );
    node.not_serving = None;
    assert_eq!(problems(&node.settle()), "");
    assert_eq!(node.names(), [STAND_ALONE_FILE]);
    // Once installed, it is kept right whatever the agent says.
    node.not_serving = Some("it restarts");
    node.net.files.get_mut(STAND_ALONE_FILE).unwrap().mode = 0o644;
    node.settle();
    assert_eq!(node.net.files[STAND_ALONE_FILE].mode, 0o600);
}

#[test]
fn another_mesh_in_the_directory_keeps_it_out() {
    let istio = r#"{"cniVersion":"0.3.1","name":"istio-cni","type":"istio-cni"}"#;
    let node = stand_alone(&[("istio-cni.conf", istio)]);
    let plan = node.plan();
    assert!(
        plan.steps.is_empty() && problems(&plan).contains("another-mesh: istio-cni.conf"),
        "{plan:?}"
    );
    let mut node = given(
        &["--mode", "stand-alone", "--take-over"],
        &[("istio-cni.conf", istio)],
    );
    assert_eq!(problems(&node.settle()), "");
    assert_eq!(node.text("istio-cni.conf"), istio);
}

#[test]
fn it_never_goes_where_the_runtime_looks_for_the_primary() {
    let mut node = stand_alone(&[("10-podnet.conflist", PTP)]);
    let runtime = |dir: &str| {
        vec![Ok(RuntimeDirs {
            file: "/etc/crio/crio.conf".into(),
            configurations: Some(dir.into()),
            ..RuntimeDirs::default()
        })]
    };
    node.runtimes = runtime("/etc/cni/net.d");
    let plan = node.plan();
    assert!(
        plan.steps.is_empty()
            && problems(&plan).contains("net-dir-of-the-runtime: our network would be in /etc/cni/net.d"),
        "{plan:?}"
    );
    node.runtimes = runtime("/etc/kubernetes/cni/net.d");
    assert_eq!(problems(&node.settle()), "");
}

#[test]
fn files_of_the_other_modes_go_and_so_does_ours_in_those() {
    let mut node = stand_alone(&[
        ("02-sluice.conflist", &ptp_and_ours()),
        ("10-podnet.conflist", PTP),
    ]);
    node.settle();
    assert_eq!(node.names(), ["10-podnet.conflist", STAND_ALONE_FILE]);
    let conf = node.text(STAND_ALONE_FILE).to_owned();
    let files = [("10-podnet.conflist", PTP), (STAND_ALONE_FILE, conf.as_str())];
    let mut owned = given(&[], &files);
    owned.settle();
    assert_eq!(owned.names(), ["02-sluice.conflist", "10-podnet.conflist"]);
    let removal = plan_removal(&node.net, &[], &Kubeconfig::Missing);
    assert!(
        matches!(removal.steps.as_slice(), [Step::Delete { name, .. }] if name == STAND_ALONE_FILE),
        "{removal:?}"
    );
}

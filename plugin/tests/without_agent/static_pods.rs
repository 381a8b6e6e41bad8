//! Static pods, of which the control plane itself may be made: the runtime knows them by a hash of 32 digits.

use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::api_server::{Answer, namespace, pod, write_kubeconfig};
use crate::run::{Run, config};
use crate::{ambient, each, node, outside, passed, refused};

const HASH: &str = "0123456789abcdef0123456789abcdef";

fn add(run_dir: &Path, setting: Option<&str>) -> Run {
    let mut config = config("1.0.0", run_dir);
    if let Some(setting) = setting {
        config["staticPods"] = json!(setting);
    }
    let args = format!("K8S_POD_NAMESPACE=team-a;K8S_POD_NAME=web-0;K8S_POD_UID={HASH}");
    Run::new("ADD", &config).env("CNI_ARGS", &args)
}

fn records(run_dir: &Path) -> Vec<String> {
    let directory = std::fs::read_dir(run_dir.join("plugin/unprotected"));
    directory.map_or_else(
        |_| Vec::new(),
        |files| {
            files
                .map(|file| file.unwrap().file_name().into_string().unwrap())
                .collect()
        },
    )
}

/// Nodes on which nobody can say anything about the pod.
fn undecided() -> Vec<(TempDir, &'static str)> {
    let status = |status| node(Answer::Status { of: "pod", status }).0;
    let malformed = tempfile::tempdir().unwrap();
    write_kubeconfig(malformed.path(), "x");
    let without_kubeconfig = tempfile::tempdir().unwrap();
    std::fs::create_dir(without_kubeconfig.path().join("plugin")).unwrap();
    let unreachable = node(Answer::Half).0;
    vec![
        (status(401), "PLG-AUTH"),
        (status(403), "PLG-AUTH"),
        (status(500), "PLG-UNDECIDED"),
        (unreachable, "PLG-UNDECIDED"),
        (malformed, "PLG-KUBECONFIG"),
        (without_kubeconfig, "PLG-CONN"),
    ]
}

#[test]
fn one_that_nobody_can_place_starts_unprotected_and_is_recorded() {
    for setting in [None, Some("pass")] {
        each(undecided(), |(run_dir, code)| {
            let done = add(run_dir.path(), setting).go();
            passed(&done);
            assert!(
                done.stderr.contains("static pod passed unprotected"),
                "{code}: {done:?}"
            );
            assert_eq!(records(run_dir.path()), [format!("{HASH}.json")], "{code}");
            let text = std::fs::read(run_dir.path().join(format!("plugin/unprotected/{HASH}.json"))).unwrap();
            let record: Value = serde_json::from_slice(&text).unwrap();
            assert_eq!(
                (&record["pod"], &record["container_id"]),
                (&json!("team-a/web-0"), &json!("c0ffee"))
            );
            // The kubelet makes another sandbox; the pod is the same.
            add(run_dir.path(), setting).go();
            assert_eq!(records(run_dir.path()).len(), 1);
        });
    }
}

#[test]
fn after_a_reboot_there_is_nowhere_to_record_and_it_starts_all_the_same() {
    let run_dir = tempfile::tempdir().unwrap();
    passed(&add(run_dir.path(), None).go());
    assert_eq!(std::fs::read_dir(run_dir.path()).unwrap().count(), 0);
}

#[test]
fn one_that_nobody_can_place_waits_if_the_operator_says_so() {
    each(undecided(), |(run_dir, code)| {
        refused(&add(run_dir.path(), Some("refuse")).go(), code);
        assert!(records(run_dir.path()).is_empty());
    });
}

#[test]
fn any_other_pod_waits_whatever_the_setting() {
    let (run_dir, _api) = node(Answer::Status {
        of: "pod",
        status: 500,
    });
    for uid in [
        "0123456789ABCDEF0123456789ABCDEF",
        "0123456789abcdef0123456789abcde",
        "u-1",
    ] {
        let args = format!("K8S_POD_NAMESPACE=team-a;K8S_POD_NAME=web-0;K8S_POD_UID={uid}");
        refused(
            &add(run_dir.path(), Some("pass")).env("CNI_ARGS", &args).go(),
            "PLG-UNDECIDED",
        );
    }
}

fn mirror(namespace_labels: &Value) -> Answer {
    Answer::Objects {
        pod: pod(&json!({}), &json!({ "kubernetes.io/config.mirror": HASH })),
        namespace: namespace(namespace_labels),
    }
}

#[test]
fn one_whose_mirror_is_there_is_decided_as_any_other() {
    let (run_dir, _api) = node(mirror(&json!({})));
    passed(&add(run_dir.path(), Some("refuse")).go());
    let (run_dir, _api) = node(mirror(&ambient()));
    refused(&add(run_dir.path(), Some("pass")).go(), "PLG-CONN");
    assert!(records(run_dir.path()).is_empty());
}

#[test]
fn one_that_the_api_server_does_not_have_or_has_otherwise_waits() {
    for answer in [
        Answer::Status {
            of: "pod",
            status: 404,
        },
        outside(),
    ] {
        let (run_dir, _api) = node(answer);
        refused(&add(run_dir.path(), Some("pass")).go(), "PLG-POD");
    }
}

#[test]
fn a_misspelt_setting_is_named() {
    let run_dir = tempfile::tempdir().unwrap();
    let error = add(run_dir.path(), Some("allow")).go().error();
    assert_eq!(error["code"], 7);
    let msg = error["msg"].as_str().unwrap();
    assert!(
        msg.contains("staticPods: unknown variant `allow`, expected `pass` or `refuse`"),
        "{msg}"
    );
}

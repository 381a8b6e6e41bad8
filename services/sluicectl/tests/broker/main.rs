//! The command against a stand-in for the broker: what people see, and the exit status.
#![cfg(test)]

#[path = "../support/answers.rs"]
mod answers;
#[path = "../support/fake.rs"]
mod fake;

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use answers::{broken, enrolled, healthy, pod, sick};
use fake::{Node, run, run_as};
use insta::assert_snapshot;
use sluice_proto::pb::workload::pod_event::Event;
use sluice_proto::pb::workload::{DescribeResponse, Pod, PodState};

#[test]
fn the_status_of_a_healthy_node() {
    let done = Node::new(healthy()).run(&["status"]);
    assert_eq!(done.status, 0, "{done:?}");
    assert_snapshot!(done.stdout);
}

#[test]
fn the_status_of_a_node_that_is_not_ready() {
    let done = Node::new(sick()).run(&["status"]);
    assert_eq!(done.status, 3, "{done:?}");
    assert_snapshot!(done.stdout);
}

#[test]
fn a_pod_that_is_enrolled_in_full() {
    let done = Node::new(healthy()).run(&["status", "--pod", "team-a/web-0"]);
    assert_eq!(done.status, 0, "{done:?}");
    assert_snapshot!(done.stdout);
}

#[test]
fn a_pod_that_is_broken_in_full() {
    let done = Node::new(sick()).run(&["status", "--pod", "team-a/web-1"]);
    assert_eq!(done.status, 3, "{done:?}");
    assert_snapshot!(done.stdout);
}

#[test]
fn why_a_pod_is_in_the_mesh() {
    let done = Node::new(healthy()).run(&["explain", "web-0", "-n", "team-a"]);
    assert_eq!(done.status, 0, "{done:?}");
    assert_snapshot!(done.stdout);
}

#[test]
fn why_a_pod_is_not_in_the_mesh_and_how_it_would_get_in() {
    let done = Node::new(healthy()).run(&["explain", "team-a/job-x"]);
    assert_eq!(done.status, 0, "{done:?}");
    assert_snapshot!(done.stdout);
}

#[test]
fn a_pod_that_waits_is_not_called_well() {
    let mut answers = healthy();
    answers.pods.push(DescribeResponse {
        pod: Some(Pod {
            netns: None,
            reason: "no-sandbox".into(),
            ..pod(
                "web-2",
                PodState::Pending,
                "pod label istio.io/dataplane-mode=ambient (selector 1)",
            )
        }),
        ..DescribeResponse::default()
    });
    let node = Node::new(answers);
    let explained = node.run(&["explain", "team-a/web-2"]);
    assert!(
        explained
            .stdout
            .contains("the runtime has not added the pod on this node"),
        "{explained:?}"
    );
    let status = node.run(&["status", "--pod", "team-a/web-2"]);
    assert!(
        status.stdout.contains("not read back: the netns is not known"),
        "{status:?}"
    );
}

#[test]
fn a_host_out_of_reach_is_a_broken_node() {
    let mut answers = healthy();
    answers.node.executor.as_mut().unwrap().host_reachable = false;
    let done = Node::new(answers).run(&["status"]);
    assert!(
        done.status == 3 && done.stdout.contains("NOT REACHABLE"),
        "{done:?}"
    );
}

#[test]
fn what_to_do_about_a_broken_pod() {
    let done = Node::new(sick()).run(&["explain", "team-a/web-1"]);
    assert_eq!(done.status, 3, "{done:?}");
    assert_snapshot!(done.stdout);
}

#[test]
fn preflight_names_what_is_missing() {
    let done = Node::new(sick()).run(&["preflight"]);
    assert_eq!(done.status, 3, "{done:?}");
    assert_snapshot!(done.stdout);
    assert_eq!(Node::new(healthy()).run(&["preflight"]).status, 0);
}

#[test]
fn a_watch_shows_every_change_and_ends_with_the_broker() {
    let mut answers = healthy();
    let gone = enrolled().pod.unwrap().pod.unwrap();
    answers.changes = vec![Event::Changed(broken().pod.unwrap()), Event::Gone(gone)];
    let node = Node::new(answers);
    let done = node.run(&["watch"]);
    assert_eq!(done.status, 1, "{done:?}");
    assert!(
        done.stderr.contains("the broker closed the connection"),
        "{done:?}"
    );
    assert_snapshot!(done.stdout);
    let lines: Vec<serde_json::Value> = node
        .run(&["watch", "-o", "json"])
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), 4);
    assert_eq!(
        (&lines[2]["event"], &lines[2]["details"]["state"]),
        (&"changed".into(), &"broken".into())
    );
}

#[test]
fn json_carries_the_same_facts() {
    let node = Node::new(sick());
    let status = node.run(&["-o", "json", "status"]);
    assert_eq!(status.status, 3);
    let json = status.json();
    assert_eq!(json["node"]["source_problems"][0]["line"], 7);
    assert_eq!(json["pods"][2]["state"], "broken");
    assert_eq!(json["pods"][1]["handoff"]["connection"], 3);
    let pod = node
        .run(&["status", "--pod", "team-a/web-1", "-o", "json"])
        .json();
    assert_eq!(
        pod["differences"][0],
        "missing: nat output: tcp -> redirect 15001"
    );
    let explained = node.run(&["explain", "team-a/job-x", "-o", "json"]).json();
    assert_eq!(explained["selection"][2]["decides"], true);
}

#[test]
fn an_unknown_pod_is_an_error_that_names_similar_ones() {
    let done = Node::new(healthy()).run(&["explain", "team-a/web"]);
    assert_eq!(done.status, 1);
    assert_eq!(
        done.stderr,
        "sluicectl: no pod team-a/web on this node; there is team-a/web-0\n"
    );
}

#[test]
fn a_missing_socket_is_an_error_that_says_what_to_check() {
    let empty = tempfile::tempdir().unwrap();
    let done = run(empty.path(), &["status"]);
    assert_eq!((done.status, &*done.stdout), (1, ""));
    assert!(
        done.stderr.contains("broker/workload.sock: No such file"),
        "{done:?}"
    );
    assert!(done.stderr.contains("ambient-broker container runs"), "{done:?}");
}

#[test]
fn a_socket_nobody_listens_on_is_told_apart() {
    let node = Node::new(healthy());
    let Node { run_dir, runtime } = node;
    runtime.shutdown_timeout(Duration::from_secs(5));
    let done = run(run_dir.path(), &["status"]);
    assert_eq!(done.status, 1);
    assert!(done.stderr.contains("nobody listens"), "{done:?}");
}

#[test]
fn mistakes_on_the_command_line_have_a_status_of_their_own() {
    let empty = tempfile::tempdir().unwrap();
    for arguments in [
        &["stauts"][..],
        &["explain", "A b"],
        &["status", "-o", "yaml"],
        &[],
    ] {
        let done = run(empty.path(), arguments);
        assert_eq!((done.status, &*done.stdout), (2, ""), "{done:?}");
    }
}

#[test]
fn as_a_kubectl_plugin_it_calls_itself_so() {
    let directory = tempfile::tempdir().unwrap();
    let plugin: PathBuf = directory.path().join("kubectl-sluice");
    symlink(env!("CARGO_BIN_EXE_sluicectl"), &plugin).unwrap();
    let done = run_as(&plugin, directory.path(), &["--help"]);
    assert!(done.stdout.contains("Usage: kubectl sluice"), "{done:?}");
    assert!(done.stdout.contains("Exit status: 0"), "{done:?}");
}

#[test]
fn completion_is_printed_for_common_shells() {
    let nowhere = Path::new("/nonexistent");
    for shell in ["bash", "zsh", "fish"] {
        let done = run(nowhere, &["completion", shell]);
        assert!(
            done.status == 0 && done.stdout.contains("preflight"),
            "{shell}: {done:?}"
        );
    }
}

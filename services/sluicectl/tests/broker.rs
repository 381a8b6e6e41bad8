//! The command against a stand-in for the broker: what people see, and the exit status.
#![cfg(test)]

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use insta::assert_snapshot;
use sluice_proto::paths::RunDir;
use sluice_proto::pb::executor::{Counter, Feature, NodeStatusResponse, ProbeAddress, SnapshotDone};
use sluice_proto::pb::types::{NetnsIdentity, PodRef};
use sluice_proto::pb::workload::pod_event::Event;
use sluice_proto::pb::workload::pod_netns_server::{PodNetns, PodNetnsServer};
use sluice_proto::pb::workload::{
    DescribeRequest, DescribeResponse, ManifestProblem, NodeRequest, NodeResponse, Pod, PodEvent, PodState,
    SelectionStep, StageTiming, SubscribeRequest, ZdsConnection,
};
use sluice_proto::transport::preamble::PreambleStream;
use sluice_proto::transport::uds::bind_stream;
use tempfile::TempDir;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};

/// What the stand-in answers.
#[derive(Debug, Clone, Default)]
struct Answers {
    node: NodeResponse,
    pods: Vec<DescribeResponse>,
    changes: Vec<Event>,
}

#[tonic::async_trait]
impl PodNetns for Answers {
    type SubscribeStream = Pin<Box<dyn Stream<Item = Result<PodEvent, Status>> + Send>>;

    async fn subscribe(
        &self,
        _: Request<SubscribeRequest>,
    ) -> Result<Response<Self::SubscribeStream>, Status> {
        let present = self
            .pods
            .iter()
            .filter_map(|answer| answer.pod.clone())
            .map(Event::Present);
        let events: Vec<Event> = present
            .chain([Event::SnapshotDone(SnapshotDone {})])
            .chain(self.changes.clone())
            .collect();
        let events = tokio_stream::iter(events).map(|event| Ok(PodEvent { event: Some(event) }));
        Ok(Response::new(Box::pin(events)))
    }

    async fn describe(
        &self,
        request: Request<DescribeRequest>,
    ) -> Result<Response<DescribeResponse>, Status> {
        let asked = request.into_inner();
        let found = self.pods.iter().find(|answer| {
            let pod = answer.pod.as_ref().and_then(|pod| pod.pod.as_ref());
            pod.is_some_and(|pod| pod.namespace == asked.namespace && pod.name == asked.name)
        });
        Ok(Response::new(found.cloned().unwrap_or_default()))
    }

    async fn node(&self, _: Request<NodeRequest>) -> Result<Response<NodeResponse>, Status> {
        Ok(Response::new(self.node.clone()))
    }
}

/// A node whose broker answers.
struct Node {
    run_dir: TempDir,
    runtime: tokio::runtime::Runtime,
}

impl Node {
    fn new(answers: Answers) -> Self {
        let run_dir = tempfile::tempdir().unwrap();
        let socket = RunDir::new(run_dir.path()).workload_socket();
        std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let context = runtime.enter();
        let listener = bind_stream(&socket, 0o600, None).unwrap();
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let stream = PreambleStream::accept(stream).await.unwrap();
                let server = tonic::transport::Server::builder()
                    .add_service(PodNetnsServer::new(answers.clone()))
                    .serve_with_incoming(tokio_stream::once(Ok::<_, std::io::Error>(stream)));
                tokio::spawn(server);
            }
        });
        drop(context);
        Self { run_dir, runtime }
    }

    fn run(&self, arguments: &[&str]) -> Done {
        run(self.run_dir.path(), arguments)
    }
}

#[derive(Debug)]
struct Done {
    status: i32,
    stdout: String,
    stderr: String,
}

impl Done {
    fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap()
    }
}

fn run(run_dir: &Path, arguments: &[&str]) -> Done {
    run_as(Path::new(env!("CARGO_BIN_EXE_sluicectl")), run_dir, arguments)
}

#[expect(clippy::disallowed_methods, reason = "the test runs the command")]
fn run_as(program: &Path, run_dir: &Path, arguments: &[&str]) -> Done {
    let output = Command::new(program)
        .arg("--run-dir")
        .arg(run_dir)
        .args(arguments)
        .output()
        .unwrap();
    Done {
        status: output.status.code().unwrap(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Unix time in milliseconds, so many minutes ago; in the middle of what is shown, so that the clock may go on.
fn minutes_ago(minutes: u64) -> u64 {
    let ago = Duration::from_secs(minutes * 60 + 30);
    let then = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .checked_sub(ago)
        .unwrap();
    u64::try_from(then.as_millis()).unwrap()
}

fn step(check: &str, observed: &str, decides: bool) -> SelectionStep {
    SelectionStep {
        check: check.into(),
        observed: observed.into(),
        decides,
    }
}

fn pod(name: &str, state: PodState, verdict: &str) -> Pod {
    Pod {
        pod: Some(PodRef {
            namespace: "team-a".into(),
            name: name.into(),
            uid: format!("uid-of-{name}"),
        }),
        state: state.into(),
        verdict: verdict.into(),
        addresses: vec!["10.244.0.10".into(), "fd00:10:244::10".into()],
        netns: Some(NetnsIdentity {
            cookie: 17,
            device: 4,
            inode: 4_026_532_700,
            boot_id: "b".into(),
        }),
        ..Pod::default()
    }
}

fn enrolled() -> DescribeResponse {
    DescribeResponse {
        pod: Some(Pod {
            timings: [("netns", 180), ("rules", 1240), ("ack", 310)]
                .map(|(stage, microseconds)| StageTiming {
                    stage: stage.into(),
                    microseconds,
                })
                .to_vec(),
            zds_connection: 3,
            acked_unix_ms: minutes_ago(5),
            rules_version: "5f1c".into(),
            ..pod(
                "web-0",
                PodState::Enrolled,
                "pod label istio.io/dataplane-mode=ambient (selector 1)",
            )
        }),
        selection: vec![
            step("excluded namespaces", "team-a not in [kube-system]", false),
            step("spec.hostNetwork", "false", false),
            step("annotation sidecar.istio.io/status", "absent", false),
            step(
                "selector 1",
                "matches: pod label istio.io/dataplane-mode=ambient",
                true,
            ),
        ],
        rules: vec![
            "nat output: tcp -> redirect 15001".into(),
            "nat prerouting: tcp -> redirect 15006".into(),
        ],
        probe_addresses: vec!["10.244.0.10".into(), "fd00:10:244::10".into()],
        ..DescribeResponse::default()
    }
}

fn broken() -> DescribeResponse {
    DescribeResponse {
        pod: Some(Pod {
            reason: "proxy-nack".into(),
            last_error: "ztunnel: add workload: bind 15001: EADDRINUSE (ZT-NACK)".into(),
            retries: 4,
            ..pod(
                "web-1",
                PodState::Broken,
                "namespace label istio.io/dataplane-mode=ambient (selector 2)",
            )
        }),
        differences: vec!["missing: nat output: tcp -> redirect 15001".into()],
        ..DescribeResponse::default()
    }
}

fn out() -> DescribeResponse {
    DescribeResponse {
        pod: Some(Pod {
            netns: None,
            ..pod("job-x", PodState::Out, "no enablement selector matches")
        }),
        selection: vec![
            step("excluded namespaces", "team-a not in [kube-system]", false),
            step(
                "selector 1",
                "requires pod label istio.io/dataplane-mode=ambient, found no label",
                false,
            ),
            step(
                "selector 2",
                "requires namespace label istio.io/dataplane-mode=ambient, found no label",
                true,
            ),
        ],
        ..DescribeResponse::default()
    }
}

fn feature(name: &str, required: bool, available: bool) -> Feature {
    Feature {
        name: name.into(),
        family: "inet".into(),
        required,
        available,
        error: if available {
            String::new()
        } else {
            "EOPNOTSUPP".into()
        },
    }
}

fn healthy() -> Answers {
    Answers {
        node: NodeResponse {
            version: "0.1.0".into(),
            ready: true,
            zds: vec![ZdsConnection {
                id: 3,
                state: "ready".into(),
                acked: 1,
                pending: 0,
                peer_uid: 1337,
                peer_pid: 4711,
                connected_unix_ms: minutes_ago(180),
            }],
            pods: 2,
            pods_expected: 1,
            pods_enrolled: 1,
            executor: Some(NodeStatusResponse {
                version: "0.1.0".into(),
                sandboxes: 2,
                open_descriptors: 15,
                descriptor_limit: 1_048_576,
                opener_connected: true,
                host_reachable: true,
                probe_set: vec![ProbeAddress {
                    address: "10.244.0.10".into(),
                    owner_uid: "u".into(),
                }],
                broker_connected: true,
                ..NodeStatusResponse::default()
            }),
            preflight: vec![feature("nat output", true, true), feature("ct mark", true, true)],
            ..NodeResponse::default()
        },
        pods: vec![enrolled(), out()],
        changes: Vec::new(),
    }
}

fn sick() -> Answers {
    let mut answers = healthy();
    let node = &mut answers.node;
    node.ready = false;
    node.not_ready_because = vec!["no ready proxy connection".into(), "opener not connected".into()];
    node.zds.clear();
    node.zds_socket =
        "listening at /run/sluice/ztunnel/ztunnel.sock (mode 0600), nobody ever connected for 42 s".into();
    (node.pods, node.pods_expected, node.pods_broken) = (3, 2, 1);
    node.source_problems = vec![ManifestProblem {
        file: "pods/bad.yaml".into(),
        line: 7,
        field: "metadata.name".into(),
        problem: "\"A b\" is not valid".into(),
    }];
    let executor = node.executor.as_mut().unwrap();
    executor.opener_connected = false;
    executor.host_differences = vec!["missing: chain postrouting".into(), "missing: set probes".into()];
    executor.refused_descriptors = vec![Counter {
        label: "host netns".into(),
        value: 2,
    }];
    node.preflight.push(feature("fib lookup", true, false));
    answers.pods.push(broken());
    answers
}

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

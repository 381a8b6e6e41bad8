//! The whole broker on a stand-in API server: what a pod's life looks like from there.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sluice_ambient_broker::cluster::{Access, Kubernetes, Settings as ClusterSettings, Timing};
use sluice_proto::pb::executor::complete_request::Verdict;
use sluice_proto::pb::types::Mode;
use sluice_proto::pb::workload::PodState;
use sluice_proto::pb::zds::workload_request::Payload;
use sluice_selection::OwnPods;

use crate::api::{Api, Fault};
use crate::harness::{Node, SOON, admitted, eventually, reference};

const KEY: &str = "ambient.istio.io/redirection";
const PODS: &str = "/api/v1/pods";

fn path(n: u32) -> String {
    format!("/api/v1/namespaces/default/pods/pod-{n}")
}

fn pod(n: u32, mode: &str) -> Value {
    json!({"metadata": {"name": format!("pod-{n}"), "namespace": "default", "uid": format!("uid-{n}"),
            "labels": {"istio.io/dataplane-mode": mode}},
        "spec": {"nodeName": "node-1", "serviceAccountName": "sa"}, "status": {"phase": "Pending"}})
}

fn annotation(api: &Api, n: u32) -> Option<String> {
    api.object(&path(n))?["metadata"]["annotations"][KEY]
        .as_str()
        .map(str::to_owned)
}

/// A node with an executor and the broker on an API server that has namespace `default`.
async fn start() -> (Node, Api) {
    let api = Api::start().await;
    api.put(
        "/api/v1/namespaces/default",
        json!({"metadata": {"name": "default"}}),
    );
    let set = "/apis/apps/v1/namespaces/sluice-system/daemonsets/sluice-node";
    api.put(set, json!({"metadata": {"name": "sluice-node", "namespace": "sluice-system", "uid": "d", "generation": 1}}));
    let node = join(&api).await;
    (node, api)
}

async fn join(api: &Api) -> Node {
    let mut node = Node::new();
    node.executor.serve(&node.run);
    broker(&mut node, api).await;
    node
}

async fn broker(node: &mut Node, api: &Api) {
    let kubernetes = Kubernetes::new(ClusterSettings {
        access: Access::Kubeconfig(api.kubeconfig()),
        node: "node-1".into(),
        pod: "sluice-node-abcde".parse().unwrap(),
        own: OwnPods {
            namespace: "sluice-system".into(),
            daemon_set: "sluice-node".into(),
        },
        plugin_service_account: "sluice-plugin".into(),
        timing: Timing {
            retry: (Duration::from_millis(20), Duration::from_millis(200)),
            ..Timing::default()
        },
    })
    .await
    .unwrap();
    node.start_broker_on(Arc::new(kubernetes.clone()), Arc::new(kubernetes));
}

async fn verdicts(node: &Node, count: usize) -> Vec<Verdict> {
    eventually(|| Some(node.executor.verdicts()).filter(|verdicts| verdicts.len() >= count)).await
}

#[tokio::test]
async fn an_add_costs_one_patch_and_nothing_else() {
    let (node, api) = start().await;
    let mut ztunnel = node.ztunnel().await;
    assert!(matches!(ztunnel.recv().await.unwrap(), Payload::SnapshotSent(_)));
    for n in 1..=20 {
        api.put(&path(n), pod(n, "ambient"));
        node.until(n, "known", |_| true).await;
    }
    let before = api.seen("GET", "").len();
    for n in 1..=20 {
        node.executor.add(&reference(n), &format!("c{n}"), u64::from(n));
    }
    assert!(
        verdicts(&node, 20)
            .await
            .iter()
            .all(|verdict| *verdict == admitted(Mode::Ambient))
    );
    for n in 1..=20 {
        eventually(|| annotation(&api, n)).await;
    }
    // As the kubelet does: addresses and phase come later.
    for n in 1..=20 {
        let mut object = api.object(&path(n)).unwrap();
        object["status"] = json!({"phase": "Running", "podIP": format!("10.0.0.{n}")});
        api.put(&path(n), object);
    }
    node.until(20, "enrolled", |pod| pod.state() == PodState::Enrolled)
        .await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(api.seen("PATCH", "/status").len(), 20);
    assert_eq!(
        (api.seen("GET", "").len(), api.seen("POST", "/events").len()),
        (before, 0)
    );

    // A Job's pod that completes leaves.
    let mut done = api.object(&path(1)).unwrap();
    done["status"]["phase"] = json!("Succeeded");
    api.put(&path(1), done);
    loop {
        if let Payload::Del(gone) = ztunnel.recv().await.unwrap() {
            assert_eq!(gone.uid, "uid-1");
            break;
        }
    }
    eventually(|| annotation(&api, 1).is_none().then_some(())).await;
}

/// The value of one line of the metrics.
async fn metric(node: &Node, series: &str) -> Option<f64> {
    let (_, text) = node.get("/metrics").await;
    let line = text.lines().find_map(|line| line.strip_prefix(series))?;
    line.trim().parse().ok()
}

#[tokio::test]
async fn the_time_until_the_status_is_written_is_a_stage_of_the_add() {
    let (node, api) = start().await;
    let mut ztunnel = node.ztunnel().await;
    assert!(matches!(ztunnel.recv().await.unwrap(), Payload::SnapshotSent(_)));
    for (n, mode) in [(1, "ambient"), (2, "ambient"), (3, "none")] {
        api.put(&path(n), pod(n, mode));
        node.until(n, "known", |_| true).await;
    }
    node.executor.add(&reference(1), "c1", 1);
    eventually(|| annotation(&api, 1)).await;
    // The second waits for as long as the API server asks for.
    api.fault("PATCH", "/status", Fault::Later(1), 1);
    node.executor.add(&reference(2), "c2", 2);
    node.executor.add(&reference(3), "c3", 3);
    eventually(|| annotation(&api, 2)).await;
    let (count, sum) = (
        "add_seconds_count{stage=\"status\"}",
        "add_seconds_sum{stage=\"status\"}",
    );
    let until = Instant::now() + SOON;
    while metric(&node, count).await != Some(2.0) {
        assert!(Instant::now() < until, "{:?}", metric(&node, count).await);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let seconds = metric(&node, sum).await.unwrap();
    assert!((0.99..SOON.as_secs_f64()).contains(&seconds), "{seconds}");
    // What is taken back is no step of an ADD.
    api.put(&path(1), pod(1, "none"));
    eventually(|| annotation(&api, 1).is_none().then_some(())).await;
    assert_eq!(metric(&node, count).await, Some(2.0));
}

#[tokio::test]
async fn while_the_api_is_down_what_is_known_goes_on_and_what_is_not_is_refused_in_time() {
    let (node, api) = start().await;
    let mut ztunnel = node.ztunnel().await;
    assert!(matches!(ztunnel.recv().await.unwrap(), Payload::SnapshotSent(_)));
    api.put(&path(1), pod(1, "ambient"));
    api.put(&path(2), pod(2, "none"));
    node.until(2, "known", |_| true).await;
    api.down().await;
    node.executor.add(&reference(1), "c1", 1);
    node.executor.add(&reference(2), "c2", 2);
    let decided = verdicts(&node, 2).await;
    assert!(
        decided.contains(&admitted(Mode::Ambient)) && decided.contains(&admitted(Mode::None)),
        "{decided:?}"
    );
    let began = Instant::now();
    node.executor.add(&reference(3), "c3", 3);
    let Verdict::Refuse(failure) = verdicts(&node, 3).await[2].clone() else {
        panic!("not refused");
    };
    assert_eq!(failure.code, "BRK-POD");
    assert!(
        failure.cause.contains("cannot get pod") || failure.cause.contains("cannot get namespace"),
        "{failure:?}"
    );
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    api.up().await;
    // What could not be written is written once it can be.
    eventually(|| annotation(&api, 1)).await;
}

#[tokio::test]
async fn a_pod_the_watch_has_not_told_of_is_asked_for() {
    let (node, api) = start().await;
    let mut ztunnel = node.ztunnel().await;
    assert!(matches!(ztunnel.recv().await.unwrap(), Payload::SnapshotSent(_)));
    api.watch_fault(PODS, Fault::Freeze, 1);
    // Cut the watch that is there; the next one tells nothing.
    api.down().await;
    api.up().await;
    eventually(|| (api.watches(PODS) >= 2).then_some(())).await;
    api.put(&path(1), pod(1, "ambient"));
    node.executor.add(&reference(1), "c1", 1);
    assert_eq!(verdicts(&node, 1).await, [admitted(Mode::Ambient)]);
    eventually(|| annotation(&api, 1)).await;
    node.executor.add(&reference(2), "c2", 2);
    let Verdict::Refuse(failure) = verdicts(&node, 2).await[1].clone() else {
        panic!("not refused");
    };
    assert!(
        failure.cause.contains("knows no pod default/pod-2"),
        "{failure:?}"
    );
}

#[tokio::test]
async fn a_static_pod_is_one_workload_under_the_uid_its_runtime_knows() {
    const HASH: &str = "0123456789abcdef0123456789abcdef";
    let (node, api) = start().await;
    let mut ztunnel = node.ztunnel().await;
    assert!(matches!(ztunnel.recv().await.unwrap(), Payload::SnapshotSent(_)));
    let mut mirror = pod(1, "ambient");
    mirror["metadata"]["annotations"] =
        json!({"kubernetes.io/config.mirror": HASH, "kubernetes.io/config.hash": HASH});
    api.put(&path(1), mirror);
    let mut runtime = reference(1);
    runtime.uid = HASH.into();
    node.executor.add(&runtime, "c1", 1);
    assert_eq!(verdicts(&node, 1).await, [admitted(Mode::Ambient)]);
    let Payload::Add(add) = ztunnel.recv().await.unwrap() else {
        panic!("not added");
    };
    assert_eq!(add.uid, HASH);
    eventually(|| annotation(&api, 1)).await;
    assert_eq!(api.seen("PATCH", "/status")[0].body["metadata"]["uid"], "uid-1");
    let mut running = api.object(&path(1)).unwrap();
    running["status"] = json!({"phase": "Running", "podIP": "10.0.0.1"});
    api.put(&path(1), running);
    api.delete(&path(1));
    let Payload::Del(gone) = ztunnel.recv().await.unwrap() else {
        panic!("a second workload");
    };
    assert_eq!(gone.uid, HASH);
}

#[tokio::test]
async fn a_restarted_broker_takes_back_what_nobody_withdrew_meanwhile() {
    let api = Api::start().await;
    api.put(
        "/api/v1/namespaces/default",
        json!({"metadata": {"name": "default"}}),
    );
    for (n, mode) in [(1, "none"), (2, "ambient")] {
        let mut object = pod(n, mode);
        object["metadata"]["annotations"] = json!({KEY: "enabled"});
        api.put(&path(n), object);
    }
    let mut elsewhere = pod(3, "none");
    elsewhere["metadata"]["annotations"] = json!({KEY: "enabled"});
    elsewhere["spec"]["nodeName"] = json!("node-2");
    api.put(&path(3), elsewhere);
    let _node = join(&api).await;
    eventually(|| annotation(&api, 1).is_none().then_some(())).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let patched: Vec<_> = api
        .seen("PATCH", "/status")
        .into_iter()
        .map(|seen| seen.path)
        .collect();
    assert!(!patched.contains(&format!("{}/status", path(3))), "{patched:?}");
}

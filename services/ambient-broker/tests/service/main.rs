//! The whole broker in process, between a directory of manifests, a stand-in executor and a scripted ztunnel: every
//! socket is a real one.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a step that fails fails the test"
)]

#[path = "../cluster/api.rs"]
#[allow(dead_code, reason = "shared with the tests of the source")]
mod api;
mod executor;
mod kubernetes;
mod node;

use std::sync::Arc;
use std::time::{Duration, Instant};

use executor::FakeExecutor;
use prost::Message;
use sluice_ambient_broker::lifecycle::NodeFacts;
use sluice_ambient_broker::reconcile::Settings;
use sluice_ambient_broker::service::{Config, run};
use sluice_ambient_broker::source::{ManifestDirectory, PodSource, WatchMode};
use sluice_ambient_broker::status::{NoStatus, StatusWriter};
use sluice_ambient_broker::zds;
use sluice_proto::paths::RunDir;
use sluice_proto::pb::executor::complete_request::Verdict;
use sluice_proto::pb::types::{Mode, PodRef};
use sluice_proto::pb::workload::pod_netns_client::PodNetnsClient;
use sluice_proto::pb::workload::{DescribeRequest, NodeRequest, Pod, PodState, SubscribeRequest, pod_event};
use sluice_proto::pb::zds::workload_request::Payload;
use sluice_proto::pb::zds::{Ack, WorkloadRequest, WorkloadResponse, ZdsHello, workload_response};
use sluice_proto::transport::grpc::{UdsChannel, origin};
use sluice_proto::transport::seqpacket::SeqpacketConnection;
use sluice_proto::transport::uds::PeerPolicy;
use sluice_selection::SelectionConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;

const SOON: Duration = Duration::from_secs(10);

struct Node {
    run: RunDir,
    directory: tempfile::TempDir,
    executor: FakeExecutor,
    stop: CancellationToken,
    broker: Option<tokio::task::JoinHandle<()>>,
    /// For the installer, if it is to be served.
    facts: Option<Arc<dyn NodeFacts>>,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Node {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let run = RunDir::new(directory.path().join("run"));
        for socket in [
            run.executor_socket(),
            run.workload_socket(),
            run.zds_socket(),
            run.compatibility_socket(),
            run.node_socket(),
            directory.path().join("manifests/x"),
        ] {
            std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
        }
        Self {
            run,
            directory,
            executor: FakeExecutor::default(),
            stop: CancellationToken::new(),
            broker: None,
            facts: None,
        }
    }

    fn start_broker(&mut self) {
        let manifests = self.directory.path().join("manifests");
        self.start_broker_on(
            Arc::new(ManifestDirectory::new(manifests, WatchMode::Auto)),
            Arc::new(NoStatus),
        );
    }

    fn start_broker_on(&mut self, source: Arc<dyn PodSource>, status: Arc<dyn StatusWriter>) {
        let own = nix::unistd::geteuid().as_raw();
        let config = Config {
            run: self.run.clone(),
            selection: SelectionConfig::default(),
            settings: Settings::default(),
            zds: zds::Options::new(self.run.zds_socket(), vec![own]),
            listen: None,
            istio_cni: Some(0o600),
            workload_peers: PeerPolicy::uids([own]),
            require_ztunnel: false,
            node: self.facts.clone(),
        };
        let stop = self.stop.clone();
        self.broker = Some(tokio::spawn(async move {
            run(config, source, status, stop).await.unwrap();
        }));
    }

    fn manifest(&self, n: u32, mode: &str) {
        let text = format!(
            "apiVersion: v1\nkind: Pod\nmetadata:\n  name: pod-{n}\n  namespace: default\n  uid: uid-{n}\n  \
             labels:\n    istio.io/dataplane-mode: {mode}\nspec:\n  serviceAccountName: sa\n  containers: []\n"
        );
        let directory = self.directory.path().join("manifests");
        let temporary = directory.join(format!(".pod-{n}.tmp"));
        std::fs::write(&temporary, text).unwrap();
        std::fs::rename(temporary, directory.join(format!("pod-{n}.yaml"))).unwrap();
    }

    async fn workloads(&self) -> PodNetnsClient<UdsChannel> {
        let stream =
            eventually(|| std::os::unix::net::UnixStream::connect(self.run.workload_socket()).ok()).await;
        stream.set_nonblocking(true).unwrap();
        let channel = UdsChannel::handshake(UnixStream::from_std(stream).unwrap())
            .await
            .unwrap();
        PodNetnsClient::with_origin(channel, origin())
    }

    /// Waits until the pod's report is as asked for.
    async fn until(&self, n: u32, what: &str, accept: impl Fn(&Pod) -> bool) -> Pod {
        let mut client = self.workloads().await;
        let mut events = client.subscribe(SubscribeRequest {}).await.unwrap().into_inner();
        let wait = async {
            loop {
                let event = events.message().await.unwrap().unwrap().event.unwrap();
                if let pod_event::Event::Present(pod) | pod_event::Event::Changed(pod) = event
                    && pod.pod.as_ref().unwrap().uid == format!("uid-{n}")
                    && accept(&pod)
                {
                    return pod;
                }
            }
        };
        tokio::time::timeout(SOON, wait)
            .await
            .unwrap_or_else(|_| panic!("pod {n} never {what}"))
    }

    async fn http(&self, socket: std::path::PathBuf, request: &str) -> (u16, String) {
        let mut stream = UnixStream::connect(socket).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        let status = text.split(' ').nth(1).unwrap().parse().unwrap();
        let body = text
            .split_once("\r\n\r\n")
            .map(|(_, body)| body.to_owned())
            .unwrap_or_default();
        (status, body)
    }

    async fn get(&self, path: &str) -> (u16, String) {
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        self.http(self.run.http_socket(), &request).await
    }

    async fn cmdadd(&self, body: &str) -> (u16, String) {
        let request = format!(
            "POST /cmdadd HTTP/1.1\r\nHost: unix\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        self.http(self.run.compatibility_socket(), &request).await
    }

    /// A ztunnel that acknowledges everything until it is dropped; tells what it is sent.
    async fn ztunnel(&self) -> tokio::sync::mpsc::UnboundedReceiver<Payload> {
        let path = self.run.zds_socket();
        let socket = eventually(|| SeqpacketConnection::connect(&path).ok()).await;
        let hello = ZdsHello { version: 1 }.encode_to_vec();
        socket.send(&hello, &[]).await.unwrap();
        let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Ok(received) = socket.receive(1).await {
                let payload = WorkloadRequest::decode(received.bytes.as_slice())
                    .unwrap()
                    .payload
                    .unwrap();
                let ack = WorkloadResponse {
                    payload: Some(workload_response::Payload::Ack(Ack::default())),
                };
                if sender.send(payload).is_err() || socket.send(&ack.encode_to_vec(), &[]).await.is_err() {
                    return;
                }
            }
        });
        receiver
    }
}

async fn eventually<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + SOON;
    loop {
        if let Some(value) = attempt() {
            return value;
        }
        assert!(Instant::now() < until, "never happened");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn reference(n: u32) -> PodRef {
    PodRef {
        namespace: "default".into(),
        name: format!("pod-{n}"),
        uid: format!("uid-{n}"),
    }
}

fn admitted(mode: Mode) -> Verdict {
    Verdict::Admit(mode.into())
}

#[tokio::test]
async fn a_pods_life_from_add_to_del() {
    let mut node = Node::new();
    node.manifest(1, "ambient");
    node.executor.serve(&node.run);
    node.start_broker();
    let mut ztunnel = node.ztunnel().await;
    assert!(matches!(ztunnel.recv().await.unwrap(), Payload::SnapshotSent(_)));

    node.executor.add(&reference(1), "c1", 1);
    match ztunnel.recv().await.unwrap() {
        Payload::Add(add) => {
            assert_eq!(add.uid, "uid-1");
            assert_eq!(add.workload_info.unwrap().service_account, "sa");
        }
        other => panic!("{other:?}"),
    }
    let verdicts =
        eventually(|| Some(node.executor.verdicts()).filter(|verdicts| !verdicts.is_empty())).await;
    assert_eq!(verdicts, [admitted(Mode::Ambient)]);
    let pod = node
        .until(1, "enrolled", |pod| pod.state() == PodState::Enrolled)
        .await;
    assert!(pod.zds_connection > 0 && pod.acked_unix_ms > 0);
    assert!(pod.timings.iter().any(|timing| timing.stage == "total"));

    let mut client = node.workloads().await;
    let request = DescribeRequest {
        namespace: "default".into(),
        name: "pod-1".into(),
    };
    let description = client.describe(request).await.unwrap().into_inner();
    assert_eq!(description.rules, ["a rule"]);
    assert!(description.selection.iter().any(|step| step.decides));
    let status = client.node(NodeRequest {}).await.unwrap().into_inner();
    assert!(status.ready, "{:?}", status.not_ready_because);
    assert_eq!((status.pods_expected, status.pods_enrolled), (1, 1));
    assert_eq!(status.zds.len(), 1);
    assert!(status.zds_socket.contains("mode 0660"), "{}", status.zds_socket);

    node.executor.del("c1");
    assert!(matches!(ztunnel.recv().await.unwrap(), Payload::Del(_)));
}

#[tokio::test]
async fn a_label_enrols_a_running_pod_and_its_removal_drains_it() {
    let mut node = Node::new();
    node.manifest(1, "none");
    node.executor.serve(&node.run);
    node.start_broker();
    node.until(1, "known", |_| true).await;
    node.executor.add(&reference(1), "c1", 1);
    let verdicts =
        eventually(|| Some(node.executor.verdicts()).filter(|verdicts| !verdicts.is_empty())).await;
    assert_eq!(verdicts, [admitted(Mode::None)]);

    node.manifest(1, "ambient");
    let pod = node
        .until(1, "pending", |pod| pod.state() == PodState::Pending)
        .await;
    assert_eq!(pod.reason, "no-proxy");
    let touched = |call: &String| call.starts_with("program");
    assert!(
        !node.executor.calls().iter().any(touched),
        "a running pod is not touched without a proxy"
    );

    let mut ztunnel = node.ztunnel().await;
    assert!(matches!(ztunnel.recv().await.unwrap(), Payload::Add(_)));
    assert!(matches!(ztunnel.recv().await.unwrap(), Payload::SnapshotSent(_)));
    node.until(1, "enrolled", |pod| pod.state() == PodState::Enrolled)
        .await;
    assert_eq!(node.executor.mode("c1"), Mode::Ambient);

    node.executor.0.lock().unwrap().redirected = [2, 0].into();
    node.manifest(1, "none");
    node.until(1, "draining", |pod| pod.state() == PodState::Draining)
        .await;
    assert!(matches!(ztunnel.recv().await.unwrap(), Payload::Del(_)));
    node.until(1, "out", |pod| pod.state() == PodState::Out).await;
    let programs: Vec<_> = node.executor.calls().into_iter().filter(touched).collect();
    let expected = [
        "program c1 MODE_DRAINING",
        "program c1 MODE_AMBIENT",
        "program c1 MODE_DRAINING",
        "program c1 MODE_NONE",
    ];
    assert_eq!(programs, expected);
}

#[tokio::test]
async fn a_restarted_broker_hands_everything_over_again_and_programs_nothing() {
    let mut node = Node::new();
    node.manifest(1, "ambient");
    node.manifest(2, "ambient");
    node.executor.serve(&node.run);
    node.start_broker();
    let mut ztunnel = node.ztunnel().await;
    node.executor.add(&reference(1), "c1", 1);
    node.executor.add(&reference(2), "c2", 2);
    for n in 1..=2 {
        node.until(n, "enrolled", |pod| pod.state() == PodState::Enrolled)
            .await;
    }
    node.stop.cancel();
    node.broker.take().unwrap().await.unwrap();
    while ztunnel.recv().await.is_some() {}
    assert_eq!(
        node.executor.mode("c1"),
        Mode::Ambient,
        "rules stay when the broker ends"
    );
    node.executor.0.lock().unwrap().calls.clear();

    node.stop = CancellationToken::new();
    node.start_broker();
    let mut ztunnel = node.ztunnel().await;
    let mut adds = 0;
    loop {
        match ztunnel.recv().await.unwrap() {
            Payload::Add(_) => adds += 1,
            Payload::SnapshotSent(_) => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(adds, 2, "the snapshot is complete");
    for n in 1..=2 {
        node.until(n, "enrolled", |pod| pod.state() == PodState::Enrolled)
            .await;
    }
    let calls = node.executor.calls();
    assert!(!calls.iter().any(|call| call.starts_with("program")), "{calls:?}");
}

#[tokio::test]
async fn a_restarted_executor_gets_descriptors_back_and_ztunnel_notices_nothing() {
    let mut node = Node::new();
    node.manifest(1, "ambient");
    let stop = node.executor.serve(&node.run);
    node.start_broker();
    let mut ztunnel = node.ztunnel().await;
    node.executor.add(&reference(1), "c1", 1);
    node.until(1, "enrolled", |pod| pod.state() == PodState::Enrolled)
        .await;
    stop.cancel();
    {
        let mut shared = node.executor.0.lock().unwrap();
        let sandbox = shared.sandboxes.get_mut("c1").unwrap();
        sandbox.reachable = false;
        let old = std::mem::take(&mut *shared);
        shared.sandboxes = old.sandboxes;
    }
    node.executor.serve(&node.run);
    eventually(|| {
        node.executor
            .calls()
            .contains(&"offer c1".to_owned())
            .then_some(())
    })
    .await;
    node.until(1, "enrolled", |pod| pod.state() == PodState::Enrolled)
        .await;
    let calls = node.executor.calls();
    assert!(!calls.iter().any(|call| call.starts_with("program")), "{calls:?}");
    let mut seen = Vec::new();
    while let Ok(payload) = ztunnel.try_recv() {
        seen.push(payload);
    }
    assert_eq!(seen.len(), 2, "one end of a snapshot, one add: {seen:?}");
}

#[tokio::test]
async fn an_add_under_way_gets_its_verdict_before_the_broker_ends() {
    let mut node = Node::new();
    node.manifest(1, "ambient");
    node.executor.serve(&node.run);
    node.start_broker();
    node.until(1, "known", |_| true).await;
    node.executor.add(&reference(1), "c1", 1);
    node.until(1, "waiting for a proxy", |pod| pod.reason == "no-proxy")
        .await;
    // Connected before the end, it answers only after it.
    let socket = SeqpacketConnection::connect(&node.run.zds_socket()).unwrap();
    socket
        .send(&ZdsHello { version: 1 }.encode_to_vec(), &[])
        .await
        .unwrap();
    let _add = socket.receive(1).await.unwrap();
    let asked = Instant::now();
    node.stop.cancel();
    tokio::time::sleep(Duration::from_millis(100)).await;
    let ack = WorkloadResponse {
        payload: Some(workload_response::Payload::Ack(Ack::default())),
    };
    for _ in 0..2 {
        socket.send(&ack.encode_to_vec(), &[]).await.unwrap();
        let _ = socket.receive(1).await;
    }
    node.broker.take().unwrap().await.unwrap();
    assert_eq!(node.executor.verdicts(), [admitted(Mode::Ambient)]);
    assert!(
        asked.elapsed() < Duration::from_millis(2_300),
        "{:?}",
        asked.elapsed()
    );
}

#[tokio::test]
async fn health_and_metrics_are_served_on_a_unix_socket() {
    let mut node = Node::new();
    node.manifest(1, "ambient");
    node.start_broker();
    eventually(|| node.run.http_socket().exists().then_some(())).await;
    let (status, body) = node.get("/readyz").await;
    assert_eq!(status, 503);
    assert!(body.contains("the executor is not connected"), "{body}");
    assert_eq!(node.get("/healthz").await.0, 200);
    node.executor.serve(&node.run);
    let until = Instant::now() + SOON;
    while node.get("/readyz").await.0 != 200 {
        assert!(
            Instant::now() < until,
            "never ready: {}",
            node.get("/readyz").await.1
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let _ztunnel = node.ztunnel().await;
    node.executor.add(&reference(1), "c1", 1);
    node.until(1, "enrolled", |pod| pod.state() == PodState::Enrolled)
        .await;
    let (status, metrics) = node.get("/metrics").await;
    assert_eq!(status, 200);
    for line in [
        "pods_expected 1",
        "pods_enrolled 1",
        "ztunnel_connected 1",
        "zds_connections{state=\"ready\"} 1",
        "nodeagent_reconcile_events_total{type=\"add\"} 1",
        "add_seconds_count{stage=\"total\"} 1",
    ] {
        assert!(metrics.contains(line), "{line} is missing in:\n{metrics}");
    }
    assert_eq!(node.get("/else").await.0, 404);
}

#[tokio::test]
async fn an_installed_istio_cni_plugin_is_served() {
    let mut node = Node::new();
    node.manifest(1, "ambient");
    node.manifest(2, "none");
    node.executor.serve(&node.run);
    node.start_broker();
    let mut ztunnel = node.ztunnel().await;
    assert!(matches!(ztunnel.recv().await.unwrap(), Payload::SnapshotSent(_)));
    let event = |n: u32| {
        format!(
            r#"{{"Netns":"/var/run/netns/x","PodName":"pod-{n}","PodNamespace":"default",
                "IPs":[{{"Interface":2,"Address":{{"IP":"10.0.0.9","Mask":"////AA=="}},"Gateway":""}}]}}"#
        )
    };
    node.until(1, "known", |_| true).await;
    let (status, body) = node.cmdadd(&event(1)).await;
    assert_eq!(status, 501, "{body}");
    node.executor.0.lock().unwrap().opener = true;
    let (status, body) = node.cmdadd(&event(1)).await;
    assert_eq!((status, body.as_str()), (200, ""));
    assert!(matches!(ztunnel.recv().await.unwrap(), Payload::Add(_)));
    assert!(
        node.executor
            .calls()
            .contains(&"adopt /var/run/netns/x".to_owned())
    );
    let (status, body) = node.cmdadd(&event(2)).await;
    assert_eq!(status, 500);
    assert!(body.contains("unexpectedly not eligible"), "{body}");
    let at = Instant::now();
    let (status, body) = node.cmdadd(&event(3)).await;
    assert_eq!(status, 500);
    assert!(
        body.contains("knows no pod") && at.elapsed() < Duration::from_secs(3),
        "{body}"
    );
    assert_eq!(node.cmdadd("notjson").await.0, 400);
    assert_eq!(node.cmdadd("").await.0, 400);
    let (_, metrics) = node.get("/metrics").await;
    for line in [
        "response_code=\"200\"} 1",
        "response_code=\"400\"} 2",
        "response_code=\"501\"} 1",
    ] {
        assert!(metrics.contains(line), "{line} is missing in:\n{metrics}");
    }
}

#[tokio::test]
async fn twenty_adds_before_any_ztunnel_are_each_handed_over_once() {
    let mut node = Node::new();
    for n in 1..=20 {
        node.manifest(n, "ambient");
    }
    node.executor.serve(&node.run);
    node.start_broker();
    node.until(20, "known", |_| true).await;
    for n in 1..=20 {
        node.executor.add(&reference(n), &format!("c{n}"), u64::from(n));
    }
    node.until(20, "waiting for a proxy", |pod| pod.reason == "no-proxy")
        .await;
    let mut ztunnel = node.ztunnel().await;
    let verdicts =
        eventually(|| Some(node.executor.verdicts()).filter(|verdicts| verdicts.len() == 20)).await;
    assert!(verdicts.iter().all(|verdict| *verdict == admitted(Mode::Ambient)));
    let mut uids = Vec::new();
    while let Ok(payload) = ztunnel.try_recv() {
        if let Payload::Add(add) = payload {
            uids.push(add.uid);
        }
    }
    uids.sort();
    let sent = uids.len();
    uids.dedup();
    assert_eq!((uids.len(), sent), (20, 20));
}

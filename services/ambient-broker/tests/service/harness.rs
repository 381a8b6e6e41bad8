//! A node in process: the broker between a directory of manifests, a stand-in executor and a scripted ztunnel.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

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
use sluice_proto::pb::workload::{Pod, SubscribeRequest, pod_event};
use sluice_proto::pb::zds::workload_request::Payload;
use sluice_proto::pb::zds::{Ack, WorkloadRequest, WorkloadResponse, ZdsHello, workload_response};
use sluice_proto::transport::grpc::{UdsChannel, origin};
use sluice_proto::transport::seqpacket::SeqpacketConnection;
use sluice_proto::transport::uds::PeerPolicy;
use sluice_selection::SelectionConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;

use crate::executor::FakeExecutor;

pub(crate) const SOON: Duration = Duration::from_secs(10);

pub(crate) struct Node {
    pub(crate) run: RunDir,
    pub(crate) directory: tempfile::TempDir,
    pub(crate) executor: FakeExecutor,
    pub(crate) stop: CancellationToken,
    pub(crate) broker: Option<tokio::task::JoinHandle<()>>,
    pub(crate) require_ztunnel: bool,
    /// For the installer, if it is to be served.
    pub(crate) facts: Option<Arc<dyn NodeFacts>>,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Node {
    pub(crate) fn new() -> Self {
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
            require_ztunnel: false,
            facts: None,
        }
    }

    pub(crate) fn start_broker(&mut self) {
        let manifests = self.directory.path().join("manifests");
        self.start_broker_on(
            Arc::new(ManifestDirectory::new(manifests, WatchMode::Auto)),
            Arc::new(NoStatus),
        );
    }

    pub(crate) fn start_broker_on(&mut self, source: Arc<dyn PodSource>, status: Arc<dyn StatusWriter>) {
        let own = nix::unistd::geteuid().as_raw();
        let config = Config {
            run: self.run.clone(),
            selection: SelectionConfig::default(),
            settings: Settings::default(),
            zds: zds::Options::new(self.run.zds_socket(), vec![own]),
            listen: None,
            istio_cni: Some(0o600),
            workload_peers: PeerPolicy::uids([own]),
            require_ztunnel: self.require_ztunnel,
            agent: String::new(),
            node: self.facts.clone(),
        };
        let stop = self.stop.clone();
        self.broker = Some(tokio::spawn(async move {
            run(config, source, status, stop).await.unwrap();
        }));
    }

    pub(crate) fn manifest(&self, n: u32, mode: &str) {
        let text = format!(
            "apiVersion: v1\nkind: Pod\nmetadata:\n  name: pod-{n}\n  namespace: default\n  uid: uid-{n}\n  \
             labels:\n    istio.io/dataplane-mode: {mode}\nspec:\n  serviceAccountName: sa\n  containers: []\n"
        );
        let directory = self.directory.path().join("manifests");
        let temporary = directory.join(format!(".pod-{n}.tmp"));
        std::fs::write(&temporary, text).unwrap();
        std::fs::rename(temporary, directory.join(format!("pod-{n}.yaml"))).unwrap();
    }

    pub(crate) async fn workloads(&self) -> PodNetnsClient<UdsChannel> {
        let channel = dial(&self.run.workload_socket()).await;
        PodNetnsClient::with_origin(channel, origin())
    }

    /// Waits until the pod's report is as asked for.
    pub(crate) async fn until(&self, n: u32, what: &str, accept: impl Fn(&Pod) -> bool) -> Pod {
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

    pub(crate) async fn http(&self, socket: PathBuf, request: &str) -> (u16, String) {
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

    pub(crate) async fn get(&self, path: &str) -> (u16, String) {
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        self.http(self.run.http_socket(), &request).await
    }

    pub(crate) async fn cmdadd(&self, body: &str) -> (u16, String) {
        let request = format!(
            "POST /cmdadd HTTP/1.1\r\nHost: unix\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        self.http(self.run.compatibility_socket(), &request).await
    }

    /// A ztunnel that acknowledges everything until it is dropped; tells what it is sent.
    pub(crate) async fn ztunnel(&self) -> tokio::sync::mpsc::UnboundedReceiver<Payload> {
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

pub(crate) async fn eventually<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + SOON;
    loop {
        if let Some(value) = attempt() {
            return value;
        }
        assert!(Instant::now() < until, "never happened");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// A connection to a socket of the broker, once it is there.
pub(crate) async fn dial(path: &Path) -> UdsChannel {
    let stream = eventually(|| std::os::unix::net::UnixStream::connect(path).ok()).await;
    stream.set_nonblocking(true).unwrap();
    UdsChannel::handshake(UnixStream::from_std(stream).unwrap())
        .await
        .unwrap()
}

pub(crate) fn reference(n: u32) -> PodRef {
    PodRef {
        namespace: "default".into(),
        name: format!("pod-{n}"),
        uid: format!("uid-{n}"),
    }
}

pub(crate) fn admitted(mode: Mode) -> Verdict {
    Verdict::Admit(mode.into())
}

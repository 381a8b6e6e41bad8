//! An executor served in this process, and clients that speak to it over its real sockets.
#![allow(dead_code, reason = "each test binary uses its part")]

#[path = "broker.rs"]
mod broker;

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use prost::Message as _;
use sluice_netns_executor::kernel::Kernel;
use sluice_netns_executor::node::{Node, Settings};
use sluice_netns_executor::rules::HostOptions;
use sluice_netns_executor::sandbox::restore;
use sluice_netns_executor::server::{Peers, Sockets, serve};
use sluice_proto::ambient::{AmbientOptions, Desired};
use sluice_proto::paths::{Deadlines, RunDir};
use sluice_proto::pb::cni::cni_service_client::CniServiceClient;
use sluice_proto::pb::cni::{AddRequest, add_response};
use sluice_proto::pb::executor::netns_executor_client::NetnsExecutorClient;
use sluice_proto::pb::executor::{
    DescriptorOf, DescriptorReply, DescriptorRequest, Sandbox, WatchRequest, descriptor_request,
};
use sluice_proto::pb::types;
use sluice_proto::transport::grpc::{UdsChannel, origin};
use sluice_proto::transport::preamble;
use sluice_proto::transport::seqpacket::SeqpacketConnection;
use sluice_proto::transport::uds::PeerPolicy;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub(crate) use broker::Broker;

/// How clients reach an executor.
#[derive(Clone)]
pub(crate) struct Dial {
    pub(crate) run: RunDir,
}

impl std::ops::Deref for Executor {
    type Target = Dial;
    fn deref(&self) -> &Dial {
        &self.dial
    }
}

pub(crate) struct Executor {
    dial: Dial,
    pub(crate) settings: Settings,
    kernel: Arc<dyn Kernel>,
    stop: CancellationToken,
    serving: Option<JoinHandle<()>>,
    pub(crate) node: Arc<Node>,
    directory: tempfile::TempDir,
}

pub(crate) fn settings(run: &RunDir) -> Settings {
    Settings {
        state: run.root().join("state"),
        tombstones: run.tombstones(),
        agent: String::new(),
        deadlines: Deadlines {
            executor: Duration::from_secs(3),
            no_broker: Duration::from_millis(300),
            ..sluice_proto::paths::DEADLINES
        },
        drift: Duration::from_millis(100),
        full_drift: Duration::from_secs(1),
        recovery: Duration::from_millis(100),
        give_up: Duration::from_secs(1),
        unused: Duration::from_secs(1),
        pod_gone: Duration::from_secs(1),
        self_test: Duration::from_mins(1),
        stuck: Duration::from_secs(10),
        host: HostOptions::default(),
    }
}

impl Executor {
    pub(crate) async fn start(kernel: Arc<dyn Kernel>) -> Self {
        Self::start_with(kernel, |_| {}).await
    }

    /// With other settings than the usual ones of tests.
    pub(crate) async fn start_with(kernel: Arc<dyn Kernel>, change: impl FnOnce(&mut Settings)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let run = RunDir::new(directory.path());
        for socket in [
            run.cni_socket(),
            run.executor_socket(),
            run.opener_socket(),
            run.tombstones(),
        ] {
            std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
        }
        std::fs::create_dir_all(run.tombstones()).unwrap();
        let mut settings = settings(&run);
        change(&mut settings);
        Self::start_in(kernel, directory, run, settings).await
    }

    async fn start_in(
        kernel: Arc<dyn Kernel>,
        directory: tempfile::TempDir,
        run: RunDir,
        settings: Settings,
    ) -> Self {
        let uid = nix::unistd::getuid().as_raw();
        let peers = Peers {
            plugin: PeerPolicy::uids([uid]),
            broker: PeerPolicy::uids([uid]),
            opener: PeerPolicy::uids([uid]),
            broker_gid: nix::unistd::getgid().as_raw(),
        };
        let node = Node::new(settings.clone(), Arc::clone(&kernel)).unwrap();
        restore::restore(&node).await.unwrap();
        let sockets = Sockets::bind(&run, peers).unwrap();
        let stop = CancellationToken::new();
        let serving = tokio::spawn(serve(Arc::clone(&node), sockets, stop.clone()));
        Self {
            dial: Dial { run },
            settings,
            kernel,
            stop,
            serving: Some(serving),
            node,
            directory,
        }
    }

    /// Ends the servers as a SIGTERM would, and starts again on the same directories.
    pub(crate) async fn restart(mut self) -> Self {
        self.stop.cancel();
        self.serving.take().unwrap().await.unwrap();
        Self::start_in(self.kernel, self.directory, self.dial.run, self.settings).await
    }
}

impl Executor {
    pub(crate) fn sandbox_files(&self) -> usize {
        std::fs::read_dir(self.settings.state.join("sandboxes"))
            .unwrap()
            .count()
    }
}

/// Under which the broker of a test foresees.
pub(crate) const SESSION: u64 = 1;

impl Dial {
    pub(crate) async fn broker(&self) -> Broker {
        let channel = UdsChannel::dial("executor", &self.run.executor_socket())
            .await
            .unwrap();
        let mut client = NetnsExecutorClient::with_origin(channel, origin());
        let request = WatchRequest {
            watcher: "ambient-broker of a test".into(),
            session: SESSION,
            config_hash: String::new(),
            agent: String::new(),
        };
        let events = client.watch(request).await.unwrap().into_inner();
        Broker { client, events }
    }

    pub(crate) async fn plugin(&self, descriptors: Vec<OwnedFd>) -> CniServiceClient<UdsChannel> {
        let path = self.run.cni_socket();
        let stream = tokio::task::spawn_blocking(move || {
            let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
            preamble::connect(&path, &borrowed, Duration::from_secs(1)).unwrap()
        })
        .await
        .unwrap();
        stream.set_nonblocking(true).unwrap();
        let stream = tokio::net::UnixStream::from_std(stream).unwrap();
        CniServiceClient::with_origin(UdsChannel::handshake(stream).await.unwrap(), origin())
    }

    /// Takes the ADD of `pod` through, with a broker that enrols it.
    pub(crate) async fn enrol(&self, broker: &mut Broker, pod: &Pod) -> Sandbox {
        let add = self.add(pod);
        let sandbox = broker.enrol().await;
        add.await.unwrap();
        sandbox
    }

    /// An admitted mesh pod.
    pub(crate) async fn enrolled(&self, broker: &mut Broker, container: &str, uid: &str) -> Pod {
        let pod = Pod::new(self, container, uid);
        self.enrol(broker, &pod).await;
        pod
    }

    /// Runs an ADD in a task of its own.
    pub(crate) fn add(&self, pod: &Pod) -> JoinHandle<add_response::Outcome> {
        let (executor, request, descriptors) = (self.clone(), pod.request(), pod.descriptors());
        tokio::spawn(async move {
            let mut plugin = executor.plugin(descriptors).await;
            plugin.add(request).await.unwrap().into_inner().outcome.unwrap()
        })
    }

    pub(crate) async fn del(&self, pod: &Pod) {
        let attachment = Some(pod.attachment());
        let request = sluice_proto::pb::cni::DelRequest { attachment };
        self.plugin(Vec::new()).await.del(request).await.unwrap();
    }

    pub(crate) async fn fetch(&self, sandbox: &Sandbox) -> (DescriptorReply, Vec<OwnedFd>) {
        let connection = SeqpacketConnection::connect(&self.run.descriptor_socket()).unwrap();
        let of = DescriptorOf {
            attachment: sandbox.attachment.clone(),
            generation: sandbox.generation,
        };
        let request = DescriptorRequest {
            request: Some(descriptor_request::Request::Fetch(of)),
        };
        connection.send(&request.encode_to_vec(), &[]).await.unwrap();
        let received = connection.receive(2).await.unwrap();
        (
            DescriptorReply::decode(received.bytes.as_slice()).unwrap(),
            received.descriptors,
        )
    }
}

/// What the plugin hands over for the namespace of the calling thread.
pub(crate) fn hand_over() -> Vec<OwnedFd> {
    let netlink = |protocol| {
        let flags = SockFlag::SOCK_CLOEXEC;
        socket(AddressFamily::Netlink, SockType::Raw, flags, protocol).unwrap()
    };
    vec![
        File::open("/proc/thread-self/ns/net").unwrap().into(),
        netlink(SockProtocol::NetlinkNetFilter),
        netlink(SockProtocol::NetlinkRoute),
        netlink(SockProtocol::NetlinkRoute),
    ]
}

/// What a test says about a pod. Its namespace is an ordinary file unless `descriptors` are given.
#[derive(Clone)]
pub(crate) struct Pod {
    pub(crate) container: String,
    pub(crate) ifname: String,
    pub(crate) uid: String,
    pub(crate) address: String,
    pub(crate) path: PathBuf,
    pub(crate) handed_over: Option<Arc<Vec<OwnedFd>>>,
}

impl Pod {
    pub(crate) fn new(executor: &Dial, container: &str, uid: &str) -> Self {
        let path = executor.run.root().join(format!("netns-{container}"));
        std::fs::write(&path, "").unwrap();
        Self {
            container: container.into(),
            ifname: "eth0".into(),
            uid: uid.into(),
            address: "10.0.0.5".into(),
            path,
            handed_over: None,
        }
    }

    pub(crate) fn inode(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(&self.path).unwrap().ino()
    }

    pub(crate) fn descriptors(&self) -> Vec<OwnedFd> {
        match &self.handed_over {
            Some(descriptors) => descriptors.iter().map(|d| d.try_clone().unwrap()).collect(),
            None => vec![File::open(&self.path).unwrap().into()],
        }
    }

    pub(crate) fn attachment(&self) -> types::Attachment {
        types::Attachment {
            network_name: "net".into(),
            container_id: self.container.clone(),
            ifname: self.ifname.clone(),
        }
    }

    pub(crate) fn request(&self) -> AddRequest {
        AddRequest {
            attachment: Some(self.attachment()),
            pod: Some(types::PodRef {
                namespace: "team-a".into(),
                name: "web".into(),
                uid: self.uid.clone(),
            }),
            netns_path: self.path.to_str().unwrap().into(),
            addresses: vec![self.address.clone()],
            config_hash: String::new(),
        }
    }
}

pub(crate) fn ambient() -> types::Desired {
    (&Desired::Ambient(AmbientOptions::default())).into()
}

/// Waits until `condition` holds.
pub(crate) async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(5);
    while !condition() {
        assert!(tokio::time::Instant::now() < deadline, "not within 5 s: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

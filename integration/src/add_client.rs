//! The plugin's calls without the plugin: descriptors, preamble and gRPC from this process, as often and as
//! concurrently as a test likes.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use anyhow::Context;
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use sluice_proto::paths::RunDir;
use sluice_proto::pb::cni::cni_service_client::CniServiceClient;
use sluice_proto::pb::cni::{AddRequest, AddResponse, DelRequest, GcRequest, GcResponse};
use sluice_proto::pb::types::{Attachment, PodRef};
use sluice_proto::transport::grpc::{UdsChannel, origin};
use sluice_proto::transport::preamble;
use sluice_testkit::netns::Netns;
use sluice_testkit::pod::Pod;
use tokio::runtime::Runtime;

use crate::mesh::NETWORK;

/// As long as the plugin waits.
const DEADLINE: Duration = Duration::from_secs(10);

/// A client of the executor's CNI socket.
#[derive(Debug)]
pub struct AddClient {
    run: RunDir,
    runtime: Runtime,
}

/// Key of a pod's only attachment.
pub fn attachment(pod: &Pod) -> Attachment {
    Attachment {
        network_name: NETWORK.to_owned(),
        container_id: pod.container_id().to_owned(),
        ifname: "eth0".to_owned(),
    }
}

impl AddClient {
    /// For the node with this run directory.
    pub fn new(run: &RunDir) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        Ok(Self {
            run: run.clone(),
            runtime,
        })
    }

    /// ADD of a pod, with the descriptors that the plugin would send.
    pub fn add(&self, pod: &Pod) -> anyhow::Result<AddResponse> {
        self.add_as(pod, attachment(pod))
    }

    /// The same under another key: a further sandbox of the pod in the same netns.
    pub fn add_as(&self, pod: &Pod, attachment: Attachment) -> anyhow::Result<AddResponse> {
        self.add_with(pod, attachment, descriptors(pod.netns())?)
    }

    /// The same with any descriptors; without any, nothing precedes HTTP/2.
    pub fn add_with(
        &self,
        pod: &Pod,
        attachment: Attachment,
        descriptors: Vec<OwnedFd>,
    ) -> anyhow::Result<AddResponse> {
        let request = AddRequest {
            attachment: Some(attachment),
            pod: Some(PodRef {
                namespace: pod.namespace().to_owned(),
                name: pod.name().to_owned(),
                uid: pod.uid().to_owned(),
            }),
            netns_path: pod.netns_path().display().to_string(),
            addresses: pod.addresses().iter().map(ToString::to_string).collect(),
            config_hash: String::new(),
        };
        self.call(descriptors, async |mut client| {
            Ok(client.add(request).await?.into_inner())
        })
    }

    /// DEL of an attachment.
    pub fn del(&self, attachment: Attachment) -> anyhow::Result<()> {
        let request = DelRequest {
            attachment: Some(attachment),
        };
        self.call(Vec::new(), async |mut client| {
            Ok(client.del(request).await.map(drop)?)
        })
    }

    /// GC: only `valid` still exist.
    pub fn gc(&self, valid: Vec<Attachment>) -> anyhow::Result<GcResponse> {
        let request = GcRequest {
            network_name: NETWORK.to_owned(),
            valid,
        };
        self.call(Vec::new(), async |mut client| {
            Ok(client.gc(request).await?.into_inner())
        })
    }

    fn call<T>(
        &self,
        descriptors: Vec<OwnedFd>,
        ask: impl AsyncFnOnce(CniServiceClient<UdsChannel>) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let stream = preamble::connect(&self.run.cni_socket(), &borrowed, Duration::from_secs(5))?;
        drop(descriptors);
        stream.set_nonblocking(true)?;
        self.runtime.block_on(async {
            let work = async {
                let channel = UdsChannel::handshake(tokio::net::UnixStream::from_std(stream)?).await?;
                ask(CniServiceClient::with_origin(channel, origin())).await
            };
            tokio::time::timeout(DEADLINE, work)
                .await
                .context("the executor does not answer")?
        })
    }
}

/// The netns itself, NETLINK_NETFILTER, and NETLINK_ROUTE twice, made inside.
pub fn descriptors(netns: &Netns) -> anyhow::Result<Vec<OwnedFd>> {
    let mut all = vec![netns.as_fd().try_clone_to_owned()?];
    let sockets = netns.run(|| {
        [
            SockProtocol::NetlinkNetFilter,
            SockProtocol::NetlinkRoute,
            SockProtocol::NetlinkRoute,
        ]
        .map(|protocol| {
            socket(
                AddressFamily::Netlink,
                SockType::Raw,
                SockFlag::SOCK_CLOEXEC,
                protocol,
            )
        })
    });
    for socket in sockets {
        all.push(socket?);
    }
    Ok(all)
}

//! The agent's side of ZDS for tests of the stand-in.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr};
use prost::Message;
use sluice_proto::pb::zds::workload_request::Payload;
use sluice_proto::pb::zds::{
    AddWorkload, DelWorkload, SnapshotSent, WorkloadInfo, WorkloadRequest, WorkloadResponse,
    workload_response,
};
use sluice_proto::transport::descriptors;
use sluice_testkit::node::Node;
use sluice_testkit::pod::Pod;

/// The agent's side of ZDS, as plain as can be: one message, one answer.
pub(crate) struct Agent {
    listener: OwnedFd,
    pub(crate) connection: Option<OwnedFd>,
}

impl Agent {
    pub(crate) fn listen(node: &Node) -> Self {
        let listener = nix::sys::socket::socket(
            AddressFamily::Unix,
            SockType::SeqPacket,
            SockFlag::SOCK_CLOEXEC,
            None,
        )
        .unwrap();
        let address = UnixAddr::new(&node.dir().join("zds.sock")).unwrap();
        nix::sys::socket::bind(listener.as_raw_fd(), &address).unwrap();
        nix::sys::socket::listen(&listener, Backlog::new(16).unwrap()).unwrap();
        Self {
            listener,
            connection: None,
        }
    }

    pub(crate) fn accept(&mut self) {
        let connection = nix::sys::socket::accept(&self.listener).unwrap();
        let hello = descriptors::receive(&connection, 1024, 0).unwrap();
        assert_eq!(hello.bytes, [0x08, 0x01], "hello V1");
        self.connection = Some(connection);
    }

    pub(crate) fn send(&self, payload: Payload, netns: Option<&Pod>) {
        let bytes = WorkloadRequest {
            payload: Some(payload),
        }
        .encode_to_vec();
        let fds: Vec<_> = netns.iter().map(|pod| pod.netns().as_fd()).collect();
        descriptors::send(self.connection.as_ref().unwrap(), &bytes, &fds).unwrap();
    }

    pub(crate) fn answer(&self) -> Vec<u8> {
        descriptors::receive(self.connection.as_ref().unwrap(), 1024, 0)
            .unwrap()
            .bytes
    }

    pub(crate) fn ask(&self, payload: Payload, netns: Option<&Pod>) -> String {
        self.send(payload, netns);
        match WorkloadResponse::decode(&self.answer()[..])
            .unwrap()
            .payload
            .unwrap()
        {
            workload_response::Payload::Ack(ack) => ack.error,
        }
    }

    pub(crate) fn add(&self, pod: &Pod) -> String {
        self.ask(add(pod), Some(pod))
    }

    pub(crate) fn del(&self, pod: &Pod) -> String {
        self.ask(
            Payload::Del(DelWorkload {
                uid: pod.uid().into(),
            }),
            None,
        )
    }

    pub(crate) fn snapshot_sent(&self) -> String {
        self.ask(Payload::SnapshotSent(SnapshotSent {}), None)
    }
}

pub(crate) fn add(pod: &Pod) -> Payload {
    let info = WorkloadInfo {
        name: pod.name().into(),
        namespace: pod.namespace().into(),
        service_account: "default".into(),
    };
    Payload::Add(AddWorkload {
        uid: pod.uid().into(),
        workload_info: Some(info),
    })
}

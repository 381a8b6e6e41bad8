//! Netns descriptors from and to the executor: requests and replies in order on a `SOCK_SEQPACKET` socket.
//!
//! One task owns the socket; several requests may be under way, so that a restart with many pods is not paced by
//! round trips.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::stat::fstat;
use nix::sys::statfs::{FsType, fstatfs};
use prost::Message;
use sluice_proto::code::ErrorCode;
use sluice_proto::pb::executor::{
    DescriptorOf, DescriptorReply, DescriptorRequest, descriptor_reply, descriptor_request,
};
use sluice_proto::sandbox::{Failure, NetnsIdentity};
use sluice_proto::transport::descriptors::{Received, TransportError};
use sluice_proto::transport::seqpacket::SeqpacketConnection;
use tokio::sync::{mpsc, oneshot};

use crate::reconcile::COMPONENT;
use crate::reconcile::event::SandboxId;

/// One request.
const LIMIT: Duration = Duration::from_secs(2);
/// Requests under way.
const WINDOW: usize = 16;
/// linux/magic.h: NSFS_MAGIC.
const NSFS_MAGIC: FsType = FsType(0x6e73_6673);

#[derive(Debug)]
struct Request {
    bytes: Vec<u8>,
    netns: Option<Arc<OwnedFd>>,
    reply: oneshot::Sender<Result<Received, String>>,
}

/// The socket's task, from outside.
#[derive(Debug, Clone)]
pub(super) struct Descriptors {
    requests: mpsc::UnboundedSender<Request>,
}

impl Descriptors {
    pub(super) fn connect(path: &Path) -> Result<Self, TransportError> {
        let socket = SeqpacketConnection::connect(path)?;
        let (requests, inbox) = mpsc::unbounded_channel();
        tokio::spawn(serve(socket, inbox));
        Ok(Self { requests })
    }

    pub(super) async fn fetch(&self, id: &SandboxId, expected: &NetnsIdentity) -> Result<OwnedFd, Failure> {
        let stage = "fetch descriptor";
        let request = descriptor_request::Request::Fetch(of(id));
        let (told, received) = self.ask(stage, request, None).await?;
        let mut descriptors = received.descriptors;
        let refuse = |cause: String| Failure::new(ErrorCode::DescriptorRefused, COMPONENT, stage, cause);
        let Some(netns) = descriptors.pop().filter(|_| descriptors.is_empty()) else {
            return Err(refuse("the reply does not carry exactly one descriptor".into()));
        };
        check(&netns, &told, expected).map_err(refuse)?;
        Ok(netns)
    }

    pub(super) async fn offer(&self, id: &SandboxId, netns: Arc<OwnedFd>) -> Result<(), Failure> {
        let request = descriptor_request::Request::Offer(of(id));
        self.ask("offer descriptor", request, Some(netns)).await?;
        Ok(())
    }

    async fn ask(
        &self,
        stage: &str,
        request: descriptor_request::Request,
        netns: Option<Arc<OwnedFd>>,
    ) -> Result<(NetnsIdentity, Received), Failure> {
        let lost = |cause: String| Failure::new(ErrorCode::BrokerState, COMPONENT, stage, cause);
        let (reply, answer) = oneshot::channel();
        let bytes = DescriptorRequest {
            request: Some(request),
        }
        .encode_to_vec();
        let closed = || lost("the descriptor socket is closed".into());
        self.requests
            .send(Request { bytes, netns, reply })
            .map_err(|_| closed())?;
        let received = tokio::time::timeout(LIMIT, answer)
            .await
            .map_err(|_| lost(format!("no answer from the executor within {LIMIT:?}")))?
            .map_err(|_| closed())?
            .map_err(lost)?;
        let reply =
            DescriptorReply::decode(received.bytes.as_slice()).map_err(|error| lost(error.to_string()))?;
        match reply.outcome {
            Some(descriptor_reply::Outcome::Ok(identity)) => Ok((identity.into(), received)),
            Some(descriptor_reply::Outcome::Failed(failure)) => Err(failure.into()),
            None => Err(lost("the executor's reply is empty".into())),
        }
    }
}

fn of(id: &SandboxId) -> DescriptorOf {
    DescriptorOf {
        attachment: Some((&id.attachment).into()),
        generation: id.generation,
    }
}

/// Device and inode compare reliably, because the descriptor is open; that the cookie is right only the executor,
/// which has a socket in there, can tell.
fn check(netns: &OwnedFd, told: &NetnsIdentity, expected: &NetnsIdentity) -> Result<(), String> {
    let kind = fstatfs(netns).map_err(|errno| format!("fstatfs: {errno}"))?;
    if kind.filesystem_type() != NSFS_MAGIC {
        return Err("the descriptor is not a namespace".into());
    }
    let found = fstat(netns).map_err(|errno| format!("fstat: {errno}"))?;
    if !told.is_same_netns(expected) {
        return Err(format!(
            "cookie {} came, {} was expected",
            told.cookie, expected.cookie
        ));
    }
    if (found.st_dev, found.st_ino) != (told.device, told.inode) {
        return Err(format!(
            "netns {}:{} came, {}:{} was told",
            found.st_dev, found.st_ino, told.device, told.inode
        ));
    }
    Ok(())
}

async fn serve(socket: SeqpacketConnection, mut inbox: mpsc::UnboundedReceiver<Request>) {
    let mut under_way: VecDeque<oneshot::Sender<Result<Received, String>>> = VecDeque::new();
    let error = loop {
        tokio::select! {
            received = socket.receive(1) => match (received, under_way.pop_front()) {
                (Ok(received), Some(reply)) => {
                    // Whoever asked may have given up: the descriptor is then closed here.
                    let _ = reply.send(Ok(received));
                }
                (Ok(_), None) => break "the executor answered what was not asked".to_owned(),
                (Err(error), reply) => {
                    under_way.extend(reply);
                    break error.to_string();
                }
            },
            request = inbox.recv(), if under_way.len() < WINDOW => {
                let Some(request) = request else { return };
                let descriptors: Vec<_> = request.netns.iter().map(|netns| netns.as_fd()).collect();
                under_way.push_back(request.reply);
                if let Err(error) = socket.send(&request.bytes, &descriptors).await {
                    break error.to_string();
                }
            }
        }
    };
    inbox.close();
    for reply in under_way {
        let _ = reply.send(Err(error.clone()));
    }
}

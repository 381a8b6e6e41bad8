//! Netns descriptors from and to the executor: requests and replies in order on a `SOCK_SEQPACKET` socket.
//!
//! One task owns a socket; several fetches may be under way, so that a restart with many pods is not paced by round
//! trips. Offers, which wait for the opener, have a connection of their own and go one at a time, so that no fetch
//! waits behind them. A connection that failed is made anew by the next request.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
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

/// A connection that is made when it is needed.
#[derive(Debug)]
struct Line {
    path: PathBuf,
    /// To the task that owns the socket; closed when that has ended.
    requests: Mutex<Option<mpsc::UnboundedSender<Request>>>,
}

impl Line {
    fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            requests: Mutex::default(),
        }
    }

    fn requests(&self) -> Result<mpsc::UnboundedSender<Request>, TransportError> {
        let mut known = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(requests) = known.as_ref().filter(|requests| !requests.is_closed()) {
            return Ok(requests.clone());
        }
        let socket = SeqpacketConnection::connect(&self.path)?;
        let (requests, inbox) = mpsc::unbounded_channel();
        tokio::spawn(serve(socket, inbox));
        *known = Some(requests.clone());
        Ok(requests)
    }
}

/// The executor's descriptor socket. Clones share the connections.
#[derive(Debug, Clone)]
pub(super) struct Descriptors {
    fetches: Arc<Line>,
    offers: Arc<tokio::sync::Mutex<Line>>,
}

impl Descriptors {
    /// Fails if the socket cannot be reached now.
    pub(super) fn connect(path: &Path) -> Result<Self, TransportError> {
        let fetches = Line::new(path);
        fetches.requests()?;
        Ok(Self {
            fetches: Arc::new(fetches),
            offers: Arc::new(tokio::sync::Mutex::new(Line::new(path))),
        })
    }

    pub(super) async fn fetch(&self, id: &SandboxId, expected: &NetnsIdentity) -> Result<OwnedFd, Failure> {
        let stage = "fetch descriptor";
        let request = descriptor_request::Request::Fetch(of(id));
        let (told, received) = ask(&self.fetches, stage, request, None).await?;
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
        // Held until it is answered.
        let line = self.offers.lock().await;
        ask(&line, "offer descriptor", request, Some(netns)).await?;
        Ok(())
    }
}

async fn ask(
    line: &Line,
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
    line.requests()
        .map_err(|error| lost(sluice_runtime::telemetry::chain(&error)))?
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use sluice_proto::id::{Attachment, ContainerId, InterfaceName, NetworkName};
    use sluice_proto::transport::seqpacket::SeqpacketListener;

    use super::*;

    fn id() -> SandboxId {
        SandboxId {
            attachment: Attachment {
                network_name: NetworkName::parse("net").unwrap(),
                container_id: ContainerId::parse("c1").unwrap(),
                ifname: InterfaceName::parse("eth0").unwrap(),
            },
            generation: 1,
        }
    }

    fn own_netns() -> (OwnedFd, NetnsIdentity) {
        let file = std::fs::File::open("/proc/self/ns/net").unwrap();
        let metadata = file.metadata().unwrap();
        let identity = NetnsIdentity {
            cookie: 1,
            device: metadata.dev(),
            inode: metadata.ino(),
            boot_id: "boot".into(),
        };
        (file.into(), identity)
    }

    /// Answers the next fetch.
    async fn answer(connection: &SeqpacketConnection) {
        connection.receive(1).await.unwrap();
        let (netns, identity) = own_netns();
        let reply = DescriptorReply {
            outcome: Some(descriptor_reply::Outcome::Ok((&identity).into())),
        };
        connection
            .send(&reply.encode_to_vec(), &[netns.as_fd()])
            .await
            .unwrap();
    }

    #[tokio::test]
    async fn a_connection_that_failed_is_made_anew_by_the_next_request() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("netns.sock");
        let listener = SeqpacketListener::bind(&path, 0o600, None).unwrap();
        let descriptors = Descriptors::connect(&path).unwrap();
        let executor = async {
            let first = listener.accept().await.unwrap();
            answer(&first).await;
            first.receive(1).await.unwrap();
            drop(first);
            answer(&listener.accept().await.unwrap()).await;
        };
        let broker = async {
            let (_, expected) = own_netns();
            descriptors.fetch(&id(), &expected).await.unwrap();
            descriptors.fetch(&id(), &expected).await.unwrap_err();
            descriptors.fetch(&id(), &expected).await.unwrap();
        };
        tokio::join!(executor, broker);
    }

    #[tokio::test]
    async fn a_fetch_does_not_wait_behind_offers_which_go_one_at_a_time() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("netns.sock");
        let listener = SeqpacketListener::bind(&path, 0o600, None).unwrap();
        let descriptors = Descriptors::connect(&path).unwrap();
        let fetches = listener.accept().await.unwrap();
        let offering: Vec<_> = (0..3)
            .map(|_| {
                let descriptors = descriptors.clone();
                tokio::spawn(async move { descriptors.offer(&id(), Arc::new(own_netns().0)).await })
            })
            .collect();
        let offers = listener.accept().await.unwrap();
        offers.receive(1).await.unwrap();
        let (_, expected) = own_netns();
        let id = id();
        let (fetched, ()) = tokio::join!(descriptors.fetch(&id, &expected), answer(&fetches));
        fetched.unwrap();
        let second = tokio::time::timeout(Duration::from_millis(50), offers.receive(1)).await;
        assert!(second.is_err(), "two offers under way");
        for offering in offering {
            offering.abort();
        }
    }
}

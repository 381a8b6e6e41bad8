//! ZDS: hands netns to ztunnel over `SOCK_SEQPACKET`, wire-compatible with Istio's node agent.
//!
//! Answers carry no id and come in order, so everything said on a connection goes through its own task, which
//! alone knows what is unanswered. Bookkeeping is keyed by connection, never by order of arrival. The set of
//! workloads that a new connection's snapshot needs is kept here, behind a lock that is never held across I/O.
//!
//! Sends nothing but what [`crate::reconcile`] decides; reports what became of it as events.

mod accept;
mod connection;
mod message;
mod queue;
mod status;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use sluice_proto::id::PodUid;
use sluice_proto::paths::DEADLINES;
use sluice_proto::transport::seqpacket::SeqpacketListener;
use sluice_proto::transport::uds::{BindError, PeerPolicy};
use tokio::sync::mpsc;

pub use connection::Phase;
pub use message::InvalidPacket;
pub use status::{ConnectionStatus, ServerStatus};

use crate::reconcile::Event;
use crate::reconcile::effect::WorkloadInfo;
use crate::reconcile::event::{ConnectionId, Epoch};

/// How the server behaves.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where the socket is.
    pub socket: PathBuf,
    /// Its mode.
    pub mode: u32,
    /// Its group.
    pub group: Option<u32>,
    /// Who may connect.
    pub peers: PeerPolicy,
    /// Snapshot messages in flight; 1: strictly one after the other.
    pub window: usize,
    /// One message, from when it is the oldest unanswered.
    pub deadline: Duration,
}

impl Options {
    /// The usual behaviour on `socket` for peers with these uids.
    pub fn new(socket: PathBuf, uids: Vec<u32>) -> Self {
        Self {
            socket,
            mode: 0o660,
            group: None,
            peers: PeerPolicy::uids(uids),
            window: 32,
            deadline: DEADLINES.zds,
        }
    }
}

/// A workload to hand over. Clones share what it consists of: a snapshot of hundreds is made while ztunnel waits for it.
#[derive(Debug, Clone)]
pub struct Workload(Arc<Handover>);

#[derive(Debug)]
struct Handover {
    uid: PodUid,
    epoch: Epoch,
    /// What ztunnel is told of it, as it goes out.
    message: Box<[u8]>,
    netns: Arc<OwnedFd>,
}

impl Workload {
    /// The pod `uid` in its attempt `epoch`: ztunnel is told `info` and given `netns`.
    pub fn new(uid: PodUid, epoch: Epoch, info: &WorkloadInfo, netns: Arc<OwnedFd>) -> Self {
        let message = message::add(&uid, info).into_boxed_slice();
        Self(Arc::new(Handover {
            uid,
            epoch,
            message,
            netns,
        }))
    }
}

/// What a connection's task is told.
#[derive(Debug)]
enum Command {
    /// Send this; `snapshot_only`: unless the snapshot has been ended.
    Offer { workload: Workload, snapshot_only: bool },
    /// The pod left. The guard reports once everyone has dropped it.
    Withdraw { uid: PodUid, guard: Arc<WithdrawGuard> },
    /// Snapshots may be ended.
    Open,
}

/// Reports the end of a withdrawal when the last connection is through with it, or gone.
#[derive(Debug)]
struct WithdrawGuard {
    uid: PodUid,
    epoch: Epoch,
    events: mpsc::UnboundedSender<Event>,
}

impl Drop for WithdrawGuard {
    fn drop(&mut self) {
        let _ = self.events.send(Event::ZdsWithdrawn {
            pod: self.uid.clone(),
            epoch: self.epoch,
        });
    }
}

/// What the server keeps of a connection.
#[derive(Debug)]
struct Member {
    commands: mpsc::UnboundedSender<Command>,
    /// It has said hello. Before that it is told nothing, so that a silent peer delays no withdrawal.
    greeted: bool,
    progress: Arc<Mutex<connection::Progress>>,
    peer_uid: u32,
    peer_pid: i32,
    connected_unix_ms: u64,
}

#[derive(Debug, Default)]
struct Hub {
    open: bool,
    workloads: HashMap<PodUid, Workload>,
    members: BTreeMap<ConnectionId, Member>,
    logged: HashMap<(u32, &'static str), Instant>,
    unknown_version: Option<i32>,
}

impl Hub {
    fn greeted(&self) -> impl Iterator<Item = &Member> {
        self.members.values().filter(|member| member.greeted)
    }
}

/// The server; clones share it.
#[derive(Debug, Clone)]
pub struct Zds {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    options: Options,
    events: mpsc::UnboundedSender<Event>,
    hub: Mutex<Hub>,
    ids: AtomicU64,
    ever_connected: AtomicU64,
    refused_peers: AtomicU64,
    protocol_errors: AtomicU64,
    started: Instant,
}

impl Zds {
    /// A server that reports to `events`; nothing listens yet.
    pub fn new(options: Options, events: mpsc::UnboundedSender<Event>) -> Self {
        Self {
            shared: Arc::new(Shared {
                options,
                events,
                hub: Mutex::default(),
                ids: AtomicU64::new(1),
                ever_connected: AtomicU64::new(0),
                refused_peers: AtomicU64::new(0),
                protocol_errors: AtomicU64::new(0),
                started: Instant::now(),
            }),
        }
    }

    /// Makes the socket. Call it inside a tokio runtime.
    pub fn bind(&self) -> Result<SeqpacketListener, BindError> {
        let options = &self.shared.options;
        SeqpacketListener::bind(&options.socket, options.mode, options.group)
    }

    /// From now on snapshots may be ended.
    pub fn open(&self) {
        let mut hub = self.hub();
        hub.open = true;
        for member in hub.greeted() {
            let _ = member.commands.send(Command::Open);
        }
    }

    /// Puts a workload into snapshots to come and those being sent; sends it on the ready connection `to`.
    pub fn offer(&self, workload: Workload, to: Option<ConnectionId>) {
        let mut hub = self.hub();
        for (id, member) in hub.members.iter().filter(|(_, member)| member.greeted) {
            let _ = member.commands.send(Command::Offer {
                workload: workload.clone(),
                snapshot_only: Some(*id) != to,
            });
        }
        hub.workloads.insert(workload.0.uid.clone(), workload);
    }

    /// Takes a workload out of snapshots and tells every connection; [`Event::ZdsWithdrawn`] follows.
    pub fn withdraw(&self, uid: &PodUid, epoch: Epoch) {
        let guard = Arc::new(WithdrawGuard {
            uid: uid.clone(),
            epoch,
            events: self.shared.events.clone(),
        });
        let mut hub = self.hub();
        hub.workloads.remove(uid);
        for member in hub.greeted() {
            let _ = member.commands.send(Command::Withdraw {
                uid: uid.clone(),
                guard: guard.clone(),
            });
        }
    }

    /// Takes every workload out, as [`Self::withdraw`] does with one.
    pub fn withdraw_all(&self) {
        let all: Vec<_> = {
            let hub = self.hub();
            hub.workloads
                .values()
                .map(|workload| (workload.0.uid.clone(), workload.0.epoch))
                .collect()
        };
        for (uid, epoch) in all {
            self.withdraw(&uid, epoch);
        }
    }

    /// How the server behaves.
    pub fn options(&self) -> &Options {
        &self.shared.options
    }

    /// What the snapshot of a connection that has just said hello consists of, and whether it may be ended. Every
    /// change from now on is told to it.
    fn snapshot(&self, id: ConnectionId) -> (Vec<Workload>, bool) {
        let mut hub = self.hub();
        if let Some(member) = hub.members.get_mut(&id) {
            member.greeted = true;
        }
        (hub.workloads.values().cloned().collect(), hub.open)
    }

    fn report(&self, event: Event) {
        let _ = self.shared.events.send(event);
    }

    fn hub(&self) -> MutexGuard<'_, Hub> {
        lock(&self.shared.hub)
    }
}

/// A panic while the lock was held left nothing half-done that matters: every critical section is one step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

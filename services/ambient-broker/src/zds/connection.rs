//! One ztunnel connection: one task, which alone reads and writes its socket.

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sluice_proto::transport::descriptors::TransportError;
use sluice_proto::transport::seqpacket::SeqpacketConnection;
use tokio::sync::mpsc;

pub use super::queue::Phase;
use super::queue::{Item, Queue, Sent};
use super::{Command, InvalidPacket, Workload, Zds, lock, message, unix_ms};
use crate::reconcile::Event;
use crate::reconcile::event::ConnectionId;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectionError {
    /// The peer went away, or the socket failed.
    #[error("socket failed")]
    Transport(#[from] TransportError),
    /// The first packet did not come in time.
    #[error("no hello within {0:?}")]
    NoHello(Duration),
    /// The peer speaks another version.
    #[error("peer speaks ZDS version {0}, ours is {ours}", ours = message::VERSION)]
    Version(i32),
    /// Not a packet of the protocol.
    #[error("malformed packet")]
    Packet(#[from] InvalidPacket),
    /// An answer to nothing.
    #[error("an answer came although nothing was asked")]
    Surplus,
    /// The oldest unanswered message waited too long.
    #[error("no answer within {0:?}")]
    Expired(Duration),
    /// The end of the snapshot was refused.
    #[error("peer refuses the snapshot: {0}")]
    SnapshotRefused(String),
}

impl ConnectionError {
    /// The peer did not keep to the protocol, as opposed to going away.
    pub(super) fn is_protocol(&self) -> bool {
        !matches!(self, Self::Transport(TransportError::Closed))
    }
}

/// How far the connection is, for people and metrics.
#[derive(Debug, Default)]
pub(super) struct Progress {
    pub(super) phase: Phase,
    pub(super) acked: usize,
    pub(super) pending: usize,
    pub(super) oldest: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct Connection {
    id: ConnectionId,
    socket: SeqpacketConnection,
    inbox: mpsc::UnboundedReceiver<Command>,
    progress: Arc<Mutex<Progress>>,
    deadline: Duration,
    queue: Queue,
    /// Since when the oldest unanswered message is the oldest.
    oldest: Option<Instant>,
    acks: usize,
}

enum Happened {
    Command(Option<Command>),
    Packet(Vec<u8>),
    Expired,
}

impl Connection {
    pub(super) fn new(
        id: ConnectionId,
        socket: SeqpacketConnection,
        inbox: mpsc::UnboundedReceiver<Command>,
        progress: Arc<Mutex<Progress>>,
        server: &Zds,
    ) -> Self {
        Self {
            id,
            socket,
            inbox,
            progress,
            deadline: server.options().deadline,
            queue: Queue::new(server.options().window),
            oldest: None,
            acks: 0,
        }
    }

    /// Serves the connection until it ends; it never ends well.
    pub(super) async fn run(&mut self, server: &Zds) -> Result<(), ConnectionError> {
        self.hello().await?;
        server.report(Event::ZdsConnected(self.id));
        let (workloads, open) = server.snapshot(self.id);
        self.queue.begin(workloads, open);
        loop {
            while let Some(item) = self.queue.next() {
                self.say(server, item).await?;
            }
            self.show();
            match self.wait().await? {
                Happened::Command(Some(command)) => self.take(command),
                // The server is gone.
                Happened::Command(None) => return Ok(()),
                Happened::Packet(bytes) => self.answered(server, &bytes)?,
                Happened::Expired => return Err(self.expire(server)),
            }
        }
    }

    /// The first packet.
    async fn hello(&mut self) -> Result<(), ConnectionError> {
        let packet = tokio::time::timeout(self.deadline, self.socket.receive(0))
            .await
            .map_err(|_| ConnectionError::NoHello(self.deadline))??;
        let version = message::parse_hello(&packet.bytes)?;
        if version == message::VERSION {
            Ok(())
        } else {
            Err(ConnectionError::Version(version))
        }
    }

    async fn wait(&mut self) -> Result<Happened, ConnectionError> {
        let due = self.oldest.map(|since| since + self.deadline);
        let expired = async {
            match due {
                Some(due) => tokio::time::sleep_until(due.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            packet = self.socket.receive(0) => Ok(Happened::Packet(packet?.bytes)),
            command = self.inbox.recv() => Ok(Happened::Command(command)),
            () = expired => Ok(Happened::Expired),
        }
    }

    fn take(&mut self, command: Command) {
        match command {
            Command::Offer {
                workload,
                snapshot_only,
            } => self.queue.offer(workload, snapshot_only),
            Command::Withdraw { uid, guard } => self.queue.withdraw(uid, guard),
            Command::Open => self.queue.open(),
        }
    }

    async fn say(&mut self, server: &Zds, item: Item) -> Result<(), ConnectionError> {
        self.oldest.get_or_insert_with(Instant::now);
        // Counted as said before it is: if the peer hangs here, this is what it hangs at.
        self.queue.said(&item);
        let send = async {
            match &item {
                Item::Add(Workload(add)) => self.socket.send(&add.message, &[add.netns.as_fd()]).await,
                Item::Del(uid, _) => self.socket.send(&message::del(uid), &[]).await,
                Item::SnapshotEnd => self.socket.send(&message::snapshot_sent(), &[]).await,
            }
        };
        let sent = tokio::time::timeout(self.deadline, send).await;
        match sent {
            Ok(sent) => Ok(sent?),
            Err(_) => Err(self.expire(server)),
        }
    }

    /// Names the one workload that fails; everything else that waits goes with the next snapshot.
    fn expire(&mut self, server: &Zds) -> ConnectionError {
        if let Some(Sent::Add(uid, epoch)) = self.queue.unanswered.front() {
            server.report(Event::ZdsExpired {
                connection: self.id,
                pod: uid.clone(),
                epoch: *epoch,
                waited: self.oldest.map(|since| since.elapsed()).unwrap_or_default(),
            });
        }
        ConnectionError::Expired(self.deadline)
    }

    fn answered(&mut self, server: &Zds, bytes: &[u8]) -> Result<(), ConnectionError> {
        let took = self.oldest.map(|since| since.elapsed()).unwrap_or_default();
        let refusal = message::parse_ack(bytes)?;
        let sent = self
            .queue
            .unanswered
            .pop_front()
            .ok_or(ConnectionError::Surplus)?;
        self.oldest = (!self.queue.unanswered.is_empty()).then(Instant::now);
        match (sent, refusal) {
            (Sent::Add(uid, epoch), Some(error)) => server.report(Event::ZdsNacked {
                connection: self.id,
                pod: uid,
                epoch,
                error,
            }),
            (Sent::Add(uid, epoch), None) => {
                self.acks += 1;
                if self.queue.phase == Phase::Ready {
                    server.report(Event::ZdsAcked {
                        connection: self.id,
                        pod: uid,
                        epoch,
                        took,
                        unix_ms: unix_ms(),
                    });
                } else {
                    self.queue.acked.insert(uid, epoch);
                }
            }
            // What a deletion is answered makes no difference: ztunnel forgets the workload either way.
            (Sent::Del(_), _) => {}
            (Sent::SnapshotEnd, Some(error)) => return Err(ConnectionError::SnapshotRefused(error)),
            (Sent::SnapshotEnd, None) => {
                self.queue.phase = Phase::Ready;
                tracing::info!(
                    connection = self.id.0,
                    workloads = self.queue.acked.len(),
                    "ztunnel ready"
                );
                server.report(Event::ZdsReady {
                    connection: self.id,
                    acked: self.queue.acked.drain().collect(),
                    unix_ms: unix_ms(),
                });
                self.queue.acked.shrink_to_fit();
            }
        }
        Ok(())
    }

    fn show(&self) {
        let mut progress = lock(&self.progress);
        progress.phase = self.queue.phase;
        progress.acked = self.acks;
        progress.pending = self.queue.pending();
        progress.oldest = self.oldest;
    }
}

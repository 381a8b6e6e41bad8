//! Who may connect, and what is left of a connection when it ends.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sluice_proto::transport::kept::{LOOK, is_gone};
use sluice_proto::transport::seqpacket::{SeqpacketConnection, SeqpacketListener};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::connection::{Connection, ConnectionError, Progress};
use super::{Member, Zds, unix_ms};
use crate::reconcile::Event;
use crate::reconcile::event::ConnectionId;

/// More connections at a time than any node has ztunnels.
const MAX_CONNECTIONS: usize = 64;
/// A peer that is refused again and again is logged once in this time.
const LOG_PAUSE: Duration = Duration::from_mins(1);

impl Zds {
    /// Accepts until `stop` is cancelled; connections, each a task of its own, last until `end` is.
    pub async fn serve(
        self,
        mut listener: SeqpacketListener,
        stop: CancellationToken,
        end: CancellationToken,
    ) {
        let mut look = tokio::time::interval(LOOK);
        loop {
            let accepted = tokio::select! {
                () = stop.cancelled() => return,
                accepted = listener.accept() => accepted,
                _ = look.tick() => {
                    if let Some(another) = self.bind_again() {
                        listener = another;
                    }
                    continue;
                }
            };
            match accepted {
                Ok(socket) => self.admit(socket, &end),
                Err(error) => {
                    // Out of descriptors: the listener stays ready, so without a pause this would spin.
                    tracing::warn!(%error, "cannot accept a ztunnel connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    /// Another listener if the socket's file is gone: connections stay, but no ztunnel finds us any more.
    fn bind_again(&self) -> Option<SeqpacketListener> {
        let path = &self.shared.options.socket;
        if !is_gone(path) {
            return None;
        }
        match self.bind() {
            Ok(listener) => {
                tracing::warn!(path = %path.display(), "the socket for ztunnel was removed; made it again");
                Some(listener)
            }
            Err(error) => {
                tracing::warn!(
                    error = sluice_runtime::telemetry::chain(&error),
                    "cannot make the socket for ztunnel again"
                );
                None
            }
        }
    }

    fn admit(&self, socket: SeqpacketConnection, end: &CancellationToken) {
        let peer = socket.peer();
        if let Err(refused) = self.shared.options.peers.check(peer) {
            self.shared.refused_peers.fetch_add(1, Ordering::Relaxed);
            if self.worth_logging(peer.uid, "refused") {
                tracing::warn!(peer_uid = peer.uid, peer_pid = peer.pid, error = %refused, "ztunnel peer refused");
            }
            return;
        }
        if self.hub().members.len() >= MAX_CONNECTIONS {
            self.shared.refused_peers.fetch_add(1, Ordering::Relaxed);
            if self.worth_logging(peer.uid, "too many") {
                tracing::warn!(
                    peer_uid = peer.uid,
                    limit = MAX_CONNECTIONS,
                    "too many ztunnel connections"
                );
            }
            return;
        }
        self.shared.ever_connected.fetch_add(1, Ordering::Relaxed);
        let id = ConnectionId(self.shared.ids.fetch_add(1, Ordering::Relaxed));
        let (commands, inbox) = mpsc::unbounded_channel();
        let progress = Arc::new(Mutex::new(Progress::default()));
        self.hub().members.insert(
            id,
            Member {
                commands,
                greeted: false,
                progress: progress.clone(),
                peer_uid: peer.uid,
                peer_pid: peer.pid,
                connected_unix_ms: unix_ms(),
            },
        );
        let server = self.clone();
        let end = end.clone();
        tokio::spawn(async move {
            let mut connection = Connection::new(id, socket, inbox, progress, &server);
            let ended = tokio::select! {
                ended = connection.run(&server) => Some(ended),
                () = end.cancelled() => None,
            };
            // First out of the list, then the report: whoever hears of it finds it gone.
            server.hub().members.remove(&id);
            if let Some(Err(error)) = ended {
                server.ended(id, peer.uid, &error);
            }
            drop(connection);
            let _ = server.shared.events.send(Event::ZdsClosed(id));
        });
    }

    fn ended(&self, id: ConnectionId, uid: u32, error: &ConnectionError) {
        if error.is_protocol() {
            self.shared.protocol_errors.fetch_add(1, Ordering::Relaxed);
        }
        if let ConnectionError::Version(version) = error {
            self.hub().unknown_version = Some(*version);
        }
        let error = sluice_runtime::telemetry::chain(error);
        if self.worth_logging(uid, "ended") {
            tracing::warn!(
                connection = id.0,
                peer_uid = uid,
                error,
                "ztunnel connection closed"
            );
        } else {
            tracing::debug!(
                connection = id.0,
                peer_uid = uid,
                error,
                "ztunnel connection closed"
            );
        }
    }

    fn worth_logging(&self, uid: u32, what: &'static str) -> bool {
        let mut hub = self.hub();
        let now = Instant::now();
        let last = hub.logged.get(&(uid, what)).copied();
        if last.is_some_and(|at| now - at < LOG_PAUSE) {
            return false;
        }
        if hub.logged.len() >= 1024 {
            hub.logged.clear();
        }
        hub.logged.insert((uid, what), now);
        true
    }
}

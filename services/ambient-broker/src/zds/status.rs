//! How the server and its connections stand, for people and metrics.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Phase, Zds, lock};
use crate::reconcile::event::ConnectionId;

/// What is known of a connection, for people.
#[derive(Debug, Clone)]
pub struct ConnectionStatus {
    /// Which.
    pub id: ConnectionId,
    /// How far it is.
    pub phase: Phase,
    /// Workloads it has acknowledged.
    pub acked: usize,
    /// Messages that wait to be sent or answered.
    pub pending: usize,
    /// How long the oldest of them waits.
    pub oldest: Option<Duration>,
    /// The peer's uid.
    pub peer_uid: u32,
    /// The peer's pid; 0 if it is not visible.
    pub peer_pid: i32,
    /// Unix time in milliseconds.
    pub connected_unix_ms: u64,
}

/// Counters of the server's life.
#[derive(Debug, Clone, Default)]
pub struct ServerStatus {
    /// Live connections, oldest first.
    pub connections: Vec<ConnectionStatus>,
    /// Connections ever accepted from a peer that may.
    pub ever_connected: u64,
    /// Peers refused by uid.
    pub refused_peers: u64,
    /// Connections closed for an unknown version, a surplus or undecodable answer, or an expired deadline.
    pub protocol_errors: u64,
    /// The last version other than ours that a peer spoke.
    pub unknown_version: Option<i32>,
    /// How long the socket has been there.
    pub listening: Duration,
}

impl Zds {
    /// How things stand.
    pub fn status(&self) -> ServerStatus {
        let hub = self.hub();
        let connections = hub
            .members
            .iter()
            .map(|(id, member)| {
                let progress = lock(&member.progress);
                ConnectionStatus {
                    id: *id,
                    phase: progress.phase,
                    acked: progress.acked,
                    pending: progress.pending,
                    oldest: progress.oldest.map(|since| since.elapsed()),
                    peer_uid: member.peer_uid,
                    peer_pid: member.peer_pid,
                    connected_unix_ms: member.connected_unix_ms,
                }
            })
            .collect();
        ServerStatus {
            connections,
            ever_connected: self.shared.ever_connected.load(Ordering::Relaxed),
            refused_peers: self.shared.refused_peers.load(Ordering::Relaxed),
            protocol_errors: self.shared.protocol_errors.load(Ordering::Relaxed),
            unknown_version: hub.unknown_version,
            listening: self.shared.started.elapsed(),
        }
    }
}

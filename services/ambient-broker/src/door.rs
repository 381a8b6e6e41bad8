//! Who may connect: the mode of a socket is the first gate, the peer's uid (`SO_PEERCRED`, unix(7)) the second.

use std::sync::Arc;

use sluice_proto::transport::uds::{Peer, PeerPolicy};
use tokio::net::UnixStream;

use crate::metrics::Metrics;

/// Who may use a socket, beside its mode.
#[derive(Debug)]
pub(crate) struct Door {
    socket: &'static str,
    peers: PeerPolicy,
    metrics: Arc<Metrics>,
}

/// For workload state, for metrics and health, for an istio-cni plugin and for the installer, which run as root.
pub(crate) fn doors(workloads: PeerPolicy, metrics: &Arc<Metrics>) -> [Door; 4] {
    let door = |socket, peers| Door {
        socket,
        peers,
        metrics: metrics.clone(),
    };
    // Also ourselves: exec probes run this program under our own user.
    let own = nix::unistd::geteuid().as_raw();
    let monitors = PeerPolicy::uids([workloads.uids.as_slice(), &[own]].concat());
    [
        door("workload", workloads),
        door("http", monitors),
        door("istio-cni", PeerPolicy::uids([0])),
        door("node", PeerPolicy::uids([0])),
    ]
}

impl Door {
    /// Checks who connected; a refused one is logged and counted.
    pub(crate) fn admits(&self, stream: &UnixStream) -> bool {
        let socket = self.socket;
        match Peer::of(stream).map(|peer| self.peers.check(peer)) {
            Ok(Ok(())) => return true,
            Ok(Err(refused)) => tracing::warn!(target: "audit", socket, error = %refused, "peer refused"),
            Err(error) => tracing::warn!(target: "audit", socket, %error, "peer is unknown"),
        }
        self.metrics.refused_peer(socket);
        false
    }
}

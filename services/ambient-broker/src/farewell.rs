//! The agent leaves the node, not merely restarts: what it did is undone while it still can be.
//!
//! In this order: pods are no longer called part of the mesh, so that nobody dials their proxy; their rules and the host's go;
//! the proxy is told. Each step has its time, and what fails is left to the next agent or the next reboot: the runtime kills
//! us in any case.

use std::path::Path;
use std::time::Duration;

use sluice_proto::paths::RunDir;
use tokio::time::{sleep, timeout};

use crate::executor::Executor;
use crate::lifecycle::{Fate, Node};
use crate::zds::Zds;

/// Until the cluster has taken the status of all pods back.
const STATUS: Duration = Duration::from_secs(4);
/// Until the executor has been reached: an agent may be asked to leave while it starts.
const EXECUTOR: Duration = Duration::from_secs(3);
/// Until the proxy has let go of all pods.
const PROXY: Duration = Duration::from_secs(2);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(10);

/// What takes part.
pub(crate) struct Farewell {
    pub(crate) node: Node,
    pub(crate) executor: Executor,
    pub(crate) zds: Zds,
}

impl Farewell {
    /// Once asked to stop: finds out what becomes of the agent, and undoes everything if it is to be removed. True if so.
    pub(crate) async fn say(self) -> bool {
        if self.node.last_word().await != Fate::Remove {
            return false;
        }
        if timeout(STATUS, self.node.facts().withdraw()).await.is_err() {
            tracing::warn!(within = ?STATUS, "the status of some pods could not be taken back");
        }
        let _ = timeout(EXECUTOR, self.executor.reached()).await;
        match self.executor.retire().await {
            Ok(0) => tracing::info!("no rules are left on this node"),
            Ok(unfinished) => tracing::warn!(unfinished, "some sandboxes did not end in time"),
            Err(error) => tracing::error!(%error, "rules are left on this node"),
        }
        // Not left to the state machine, which waits for another sandbox of a pod that still runs.
        self.zds.withdraw_all();
        let released = async {
            while !self.released() {
                sleep(LOOK).await;
            }
        };
        if timeout(PROXY, released).await.is_err() {
            tracing::warn!(within = ?PROXY, "the proxy has not let go of all pods");
        }
        true
    }

    fn released(&self) -> bool {
        let connections = self.zds.status().connections;
        connections
            .iter()
            .all(|peer| peer.acked == 0 && peer.pending == 0)
    }
}

/// Removes our sockets: a node without the agent has none of its files.
pub(crate) fn remove_sockets(run: &RunDir, zds: &Path) {
    let ours = [run.workload_socket(), run.http_socket(), run.node_socket()];
    for socket in ours.iter().map(std::path::PathBuf::as_path).chain([zds]) {
        if let Err(error) = std::fs::remove_file(socket) {
            tracing::warn!(socket = %socket.display(), %error, "cannot remove a socket");
        }
    }
}

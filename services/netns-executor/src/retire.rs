//! The end of the agent on this node: everything that was done to pods and host is undone, and nothing new begins.
//!
//! Asked for by the broker, which alone knows that the agent is not merely being restarted.

use std::sync::Arc;
use std::time::Duration;

use sluice_proto::sandbox::Failure;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::node::Node;

/// A broker that has not come yet is waited for so long: an agent may be asked to leave while it starts.
const NOT_YET: Duration = Duration::from_secs(3);
/// All sandboxes end within this, or are left alone.
const DEADLINE: Duration = Duration::from_secs(4);

/// Ends every sandbox, then removes the host's rules. Returns how many sandboxes had not ended in time.
pub async fn retire(node: &Node) -> (u32, Result<(), Failure>) {
    let ended = node.registry.retire();
    tracing::info!(target: "audit", sandboxes = ended.len(), "the agent leaves this node");
    let all = async {
        for token in &ended {
            token.cancelled().await;
        }
    };
    let unfinished = match tokio::time::timeout(DEADLINE, all).await {
        Ok(()) => 0,
        Err(_) => ended.iter().filter(|token| !token.is_cancelled()).count(),
    };
    (
        u32::try_from(unfinished).unwrap_or(u32::MAX),
        node.probes.retire().await,
    )
}

/// A token that is cancelled once `stop` is and no broker of our own agent watches any more, `limit` after `stop` at the latest.
///
/// A runtime asks all containers of a pod to stop at one time, but the broker may still have something to ask for. The next
/// agent's broker, which may have come already, waits for the next executor, that is for our end.
pub fn after_the_broker(
    stop: CancellationToken,
    mut watching: watch::Receiver<Option<usize>>,
    limit: Duration,
) -> CancellationToken {
    let end = CancellationToken::new();
    let ends = end.clone();
    tokio::spawn(async move {
        stop.cancelled().await;
        let came = watching.wait_for(Option::is_some);
        let came = tokio::time::timeout(limit.min(NOT_YET), came).await.is_ok();
        let alone = watching.wait_for(|brokers| *brokers == Some(0));
        if came && tokio::time::timeout(limit, alone).await.is_err() {
            tracing::warn!(?limit, "stops although a broker still watches");
        }
        ends.cancel();
    });
    end
}

/// Removes what only the running executor needs: a node without the agent has none of its files.
pub fn remove_sockets(node: &Arc<Node>, run: &sluice_proto::paths::RunDir) {
    if !node.registry.is_retired() {
        return;
    }
    for socket in [
        run.cni_socket(),
        run.executor_socket(),
        run.descriptor_socket(),
        run.opener_socket(),
    ] {
        if let Err(error) = std::fs::remove_file(&socket) {
            tracing::warn!(socket = %socket.display(), %error, "cannot remove a socket");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_end_waits_for_the_broker_but_not_for_ever() {
        let (brokers, watching) = watch::channel(None);
        let stop = CancellationToken::new();
        let end = after_the_broker(stop.clone(), watching.clone(), Duration::from_mins(1));
        stop.cancel();
        let early = tokio::time::timeout(Duration::from_millis(50), end.cancelled()).await;
        assert!(early.is_err(), "a broker may still come");
        brokers.send_replace(Some(1));
        let early = tokio::time::timeout(Duration::from_millis(50), end.cancelled()).await;
        assert!(early.is_err(), "a broker still watches");
        brokers.send_replace(Some(0));
        end.cancelled().await;

        brokers.send_replace(Some(1));
        let (stop, limit) = (CancellationToken::new(), Duration::from_millis(50));
        let end = after_the_broker(stop.clone(), watching, limit);
        let begun = std::time::Instant::now();
        stop.cancel();
        end.cancelled().await;
        assert!(begun.elapsed() >= limit);
    }
}

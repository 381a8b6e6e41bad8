//! The opener's socket: one opener at a time; when it connects, the host's namespace is opened and made right.

use std::sync::Arc;
use std::time::Duration;

use sluice_proto::opener::OpenerRequest;
use sluice_proto::transport::seqpacket::{SeqpacketConnection, SeqpacketListener};
use sluice_proto::transport::uds::PeerPolicy;

use super::listen::admit;
use crate::kernel::HostNetns;
use crate::node::Node;
use crate::opener_client::ask_on;

/// How often a quiet connection is looked at.
const LOOK: Duration = Duration::from_secs(1);

/// Accepts for ever.
pub(super) async fn serve(node: Arc<Node>, listener: SeqpacketListener, policy: PeerPolicy) {
    let mut interval = tokio::time::interval(LOOK);
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(connection) if admit(&node, &policy, connection.peer(), "opener") => {
                    tracing::info!(peer_uid = connection.peer().uid, "opener connected");
                    take(&node, connection).await;
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::error!(%error, "cannot accept on the opener's socket");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
            _ = interval.tick() => {
                if node.opener.forget_if_hung_up().await {
                    tracing::warn!("opener disconnected");
                }
            }
        }
    }
}

/// Only an opener that has shown the host's namespace is used: until that is known, the host's could be taken for a
/// pod's.
async fn take(node: &Node, connection: SeqpacketConnection) {
    match host(node, &connection).await {
        Ok(host) => {
            node.opener.attach(connection).await;
            match node.probes.attach(host).await {
                Ok(mended) if mended.worst.is_none() => tracing::info!("host rules are as they should be"),
                Ok(mended) => {
                    tracing::info!(target: "audit", mended = ?mended.lines, "host rules programmed");
                }
                Err(failure) => tracing::error!(error = %failure, "host rules not programmed"),
            }
        }
        Err(error) => {
            tracing::error!(
                error,
                "opener is not used, since it did not give the host's namespace"
            );
            // It dials again at once.
            tokio::time::sleep(LOOK).await;
        }
    }
}

async fn host(node: &Node, connection: &SeqpacketConnection) -> Result<Box<dyn HostNetns>, String> {
    let (_, descriptors) = ask_on(connection, &OpenerRequest::Host, None)
        .await
        .map_err(|error| sluice_runtime::telemetry::chain(&error))?;
    node.kernel.open_host(descriptors).map_err(|refusal| {
        node.metrics.refused_descriptor(refusal.reason());
        refusal.to_string()
    })
}

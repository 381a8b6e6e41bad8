//! The opener's socket: one opener at a time; when it connects, the host's namespace is opened and made right.

use std::sync::Arc;
use std::time::Duration;

use sluice_proto::opener::OpenerRequest;
use sluice_proto::transport::seqpacket::SeqpacketListener;
use sluice_proto::transport::uds::PeerPolicy;

use super::listen::admit;
use crate::node::Node;

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
                    node.opener.attach(connection).await;
                    take_host(&node).await;
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

async fn take_host(node: &Node) {
    let descriptors = match node.opener.open(&OpenerRequest::Host, None).await {
        Ok(descriptors) => descriptors,
        Err(error) => {
            let error = sluice_runtime::telemetry::chain(&error);
            tracing::error!(error, "the opener did not give the host's namespace");
            return;
        }
    };
    let host = match node.kernel.open_host(descriptors) {
        Ok(host) => host,
        Err(refusal) => {
            node.metrics.refused_descriptor(refusal.reason());
            tracing::error!(error = %refusal, "host descriptors refused");
            return;
        }
    };
    match node.probes.attach(host).await {
        Ok(mended) if mended.is_empty() => tracing::info!("host rules are as they should be"),
        Ok(mended) => tracing::info!(target: "audit", ?mended, "host rules programmed"),
        Err(failure) => tracing::error!(error = %failure, "host rules not programmed"),
    }
}

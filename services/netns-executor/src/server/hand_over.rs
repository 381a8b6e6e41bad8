//! What the plugin hands over on a node without an opener: the host's namespace, and those of sandboxes whose sockets
//! died with an earlier life of this process.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use sluice_proto::id::Attachment;
use sluice_proto::sandbox::Failure;

use super::convert::unknown;
use crate::descriptors::DescriptorRefusal;
use crate::node::Node;
use crate::sandbox::recovery;

const STAGE: &str = "hand over";

fn refused(node: &Node, refusal: &DescriptorRefusal) -> Failure {
    node.metrics.refused_descriptor(refusal.reason());
    tracing::warn!(target: "audit", error = %refusal, "handed-over descriptors refused");
    refusal.failure(STAGE)
}

/// The host's namespace. The first that comes in this life is believed, since the socket is root's alone; another
/// one is refused from then on.
pub(super) async fn host(node: &Node, descriptors: Vec<OwnedFd>) -> Result<(), Failure> {
    if node.probes.is_host_at_hand() {
        return Ok(());
    }
    let host = node
        .kernel
        .open_host(descriptors)
        .map_err(|refusal| refused(node, &refusal))?;
    let mended = node.probes.attach(host).await?;
    tracing::info!(target: "audit", mended = ?mended.lines, "the plugin has handed over the host's namespace");
    Ok(())
}

/// A sandbox's namespace; it must be the one on record.
pub(super) async fn sandbox(
    node: &Arc<Node>,
    key: &Attachment,
    descriptors: Vec<OwnedFd>,
) -> Result<(), Failure> {
    let handle = node.registry.find(key).ok_or_else(|| unknown(STAGE, key))?;
    if handle.reachable() {
        return Ok(());
    }
    let opened = node
        .kernel
        .open(descriptors)
        .map_err(|refusal| refused(node, &refusal))?;
    recovery::offer(node, &handle, opened, false).await
}

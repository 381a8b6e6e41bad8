//! Says what this process lacks, for the plugin to hand over: on a node without an opener nobody else can.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use sluice_proto::id::NetnsPath;
use sluice_proto::wanted::{Wanted, WantedSandbox};

use crate::node::Node;

/// How often it is looked at.
const LOOK: Duration = Duration::from_millis(500);

/// What is lacking now.
pub fn now(node: &Node) -> Wanted {
    let mut lost: Vec<_> = {
        let inner = node.registry.lock();
        let lost = inner.sandboxes.values().filter(|h| !h.reachable() && !h.ending);
        lost.map(|handle| handle.attachment.clone()).collect()
    };
    lost.sort();
    let sandboxes = lost.into_iter().filter_map(|attachment| {
        let view = node.hub.view(&attachment)?;
        // One that was adopted has none; it waits for an opener.
        let netns_path = NetnsPath::parse(view.netns_path).ok()?;
        Some(WantedSandbox {
            attachment,
            netns_path,
        })
    });
    Wanted {
        host: !node.probes.is_host_at_hand(),
        sandboxes: sandboxes.collect(),
    }
}

/// Keeps the file as things are, for ever.
pub async fn keep(node: Arc<Node>, path: PathBuf) {
    let mut told = None;
    loop {
        let wanted = now(&node);
        if told.as_ref() != Some(&wanted) {
            match wanted.write(&path) {
                Ok(()) => told = Some(wanted),
                Err(error) => {
                    tracing::error!(%error, path = %path.display(), "cannot say what is lacking");
                }
            }
        }
        tokio::time::sleep(LOOK).await;
    }
}

//! The table of an earlier life: read before anything is served, reached in the background.

use std::collections::HashMap;
use std::sync::Arc;

use sluice_proto::code::ErrorCode;
use sluice_proto::id::Attachment;
use sluice_proto::sandbox::Failure;
use sluice_proto::tombstone::Tombstone;
use tokio::sync::mpsc;

use super::add::register;
use super::registry::Inner;
use super::{Message, Reason};
use crate::node::Node;
use crate::pool::COMPONENT;
use crate::table::{Record, TableError};

/// Honours tombstones, then makes every recorded sandbox known, not reachable yet. Call it inside the runtime, before
/// the sockets are served.
pub async fn restore(node: &Arc<Node>) -> Result<(), TableError> {
    let tombstones = read_tombstones(node);
    let (records, unreadable) = node.table.load()?;
    for file in unreadable {
        tracing::error!(path = %file.path.display(), reason = file.reason, "sandbox file moved aside");
    }
    let mut restored = 0_usize;
    for record in records {
        let deleted = tombstones
            .get(&record.attachment)
            .is_some_and(|at| *at >= record.added_unix_ms);
        if deleted {
            bury(node, &record).await;
        } else {
            bring_back(node, &mut node.registry.lock(), record);
            restored += 1;
        }
    }
    forget(node, &tombstones);
    tracing::info!(
        sandboxes = restored,
        tombstones = tombstones.len(),
        "sandbox table read"
    );
    Ok(())
}

/// Ends the sandboxes that were deleted while nobody listened: a DEL may have come after the table was read and
/// before the sockets were there. Call it once they are, and now and then.
pub fn honour_tombstones(node: &Node) {
    let tombstones = read_tombstones(node);
    for (attachment, deleted) in &tombstones {
        let handle = node.registry.find(attachment);
        if let Some(handle) = handle.filter(|handle| handle.added_unix_ms <= *deleted) {
            tracing::info!(%attachment, pod = %handle.pod, "deleted while the executor was not listening");
            handle.send(Message::Remove(Reason::Del));
        }
    }
    forget(node, &tombstones);
}

fn forget(node: &Node, tombstones: &HashMap<Attachment, u64>) {
    for attachment in tombstones.keys() {
        if let Err(error) = Tombstone::remove(&node.settings.tombstones, attachment) {
            tracing::error!(%attachment, %error, "tombstone not removed");
        }
    }
}

fn read_tombstones(node: &Node) -> HashMap<Attachment, u64> {
    let directory = &node.settings.tombstones;
    let all = Tombstone::read_all(directory).unwrap_or_else(|error| {
        tracing::error!(path = %directory.display(), %error, "tombstones not read");
        Vec::new()
    });
    let mut tombstones = HashMap::new();
    for tombstone in all {
        match tombstone {
            Ok(tombstone) => {
                tombstones.insert(tombstone.attachment, tombstone.deleted_unix_ms);
            }
            Err(error) => {
                let aside = error.path.with_extension("unreadable");
                let moved = std::fs::rename(&error.path, &aside);
                tracing::error!(error = %sluice_runtime::telemetry::chain(&error), moved = moved.is_ok(),
                    "tombstone moved aside");
            }
        }
    }
    tombstones
}

/// The runtime deleted it while nobody was here; its namespace is the runtime's to remove.
async fn bury(node: &Node, record: &Record) {
    tracing::info!(attachment = %record.attachment, pod = %record.pod, "deleted while the executor was down");
    let removed = node
        .probes
        .remove(record.addresses.clone(), record.pod.uid.clone())
        .await;
    if let Err(failure) = removed {
        tracing::warn!(error = %failure, "probe addresses not removed");
    }
    if let Err(error) = node.table.remove(&record.attachment) {
        // One file must not keep the node without an executor.
        tracing::error!(attachment = %record.attachment, error = %sluice_runtime::telemetry::chain(&error),
            "sandbox file not removed");
    }
}

fn bring_back(node: &Arc<Node>, inner: &mut Inner, record: Record) {
    let (sender, inbox) = mpsc::unbounded_channel();
    let mut task = register(node, inner, record, sender, inbox);
    task.broken = Some(Failure::new(
        ErrorCode::OpenerUnavailable,
        COMPONENT,
        "re-open namespace",
        "the executor has restarted and not reached the namespace yet",
    ));
    // The first watcher must see it, however early it comes.
    task.publish_silently();
    tokio::spawn(task.run(Vec::new()));
}

//! Letting go of a namespace that nobody else has: a DEL that never came, seen from the namespace's side.
//!
//! Runtimes mount a namespace at a path and remove that when the sandbox ends; with the pause container's process, that
//! is all that keeps it. So a namespace whose path leads elsewhere, and in which no process of the pod lives, is alive
//! only because we hold it, and with it a dead pod's interface on the host.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use sluice_proto::opener::OpenerRequest;
use sluice_proto::sandbox::Failure;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::recovery::{OpenError, ask_scan, candidate, open};
use super::registry::Handle;
use super::task::{Flow, Task};
use super::{Message, Reason};
use crate::node::Node;

/// Shortest pause between two looks.
const PAUSE: Duration = Duration::from_millis(10);
/// As many as the opener keeps of a pod.
const MAX_CANDIDATES: u32 = 16;

/// Who has a namespace besides us.
#[derive(Debug)]
pub(crate) enum Use {
    /// Nobody.
    Nobody,
    /// The runtime, or a process of the pod, or it cannot be told; in words.
    Somebody(String),
}

/// Looks at one sandbox after the other for ever.
pub async fn watch(node: Arc<Node>) {
    let mut seen = HashSet::new();
    loop {
        let all = u32::try_from(node.registry.lock().sandboxes.len()).unwrap_or(u32::MAX);
        let pause = node.settings.unused / all.max(1);
        tokio::time::sleep(pause.max(PAUSE)).await;
        let mut next = unseen(&node, &seen);
        if next.is_none() {
            seen.clear();
            next = unseen(&node, &seen);
        }
        let Some(handle) = next else { continue };
        seen.insert(handle.generation);
        if matches!(who_has(&node, &handle).await, Use::Nobody) {
            tracing::warn!(target: "audit", attachment = %handle.attachment, pod = %handle.pod,
                "nobody else has the namespace any more");
            handle.send(Message::Remove(Reason::NetnsGone));
        }
    }
}

/// A sandbox whose turn it is; no two have the same generation.
fn unseen(node: &Node, seen: &HashSet<u64>) -> Option<Handle> {
    let inner = node.registry.lock();
    let mut settled = inner.sandboxes.values().filter(|h| h.reachable() && !h.ending);
    settled.find(|h| !seen.contains(&h.generation)).cloned()
}

/// Who else has the namespace of a sandbox. What cannot be told counts as somebody.
pub(crate) async fn who_has(node: &Arc<Node>, handle: &Handle) -> Use {
    let view = node.hub.view(&handle.attachment).unwrap_or_default();
    if view.pending {
        return Use::Somebody("an ADD is under way".to_owned());
    }
    if view.netns_path.is_empty() {
        return Use::Somebody("it has no path that the runtime would remove".to_owned());
    }
    match open(node, &OpenerRequest::Path(view.netns_path)).await {
        Ok(opened) if opened.identity.is_same_netns(&handle.netns) => {
            node.reaper.close(opened);
            return Use::Somebody("the runtime has it mounted at its path".to_owned());
        }
        // Another one: the path was used again.
        Ok(opened) => node.reaper.close(opened),
        Err(OpenError::Opener(error)) if error.is_not_found() => {}
        Err(error) => return Use::Somebody(error.failure().to_string()),
    }
    match has_process(node, handle).await {
        Ok(false) => Use::Nobody,
        Ok(true) => Use::Somebody("a process of the pod lives in it".to_owned()),
        Err(failure) => Use::Somebody(failure.to_string()),
    }
}

async fn has_process(node: &Arc<Node>, handle: &Handle) -> Result<bool, Failure> {
    ask_scan(node).await?;
    for index in 0..MAX_CANDIDATES {
        let Some(opened) = candidate(node, &handle.pod.uid, index).await? else {
            return Ok(false);
        };
        let same = opened.identity.is_same_netns(&handle.netns);
        node.reaper.close(opened);
        if same {
            return Ok(true);
        }
    }
    // More namespaces than are remembered.
    Ok(true)
}

impl Task {
    /// The pod is gone at the source; `used`: who else has its namespace.
    pub(super) fn pod_gone(
        &mut self,
        generation: u64,
        used: Option<String>,
        reply: oneshot::Sender<Result<(), String>>,
    ) -> Flow {
        if generation != self.record.generation {
            let _ = reply.send(Ok(()));
            return Flow::Continue(());
        }
        let since = *self.pod_gone.get_or_insert_with(Instant::now);
        let waited = since.elapsed() >= self.node.settings.pod_gone && self.add.is_none();
        match used {
            Some(cause) if !waited => {
                let _ = reply.send(Err(cause));
                Flow::Continue(())
            }
            used => {
                tracing::info!(target: "audit", attachment = %self.record.attachment, pod = %self.record.pod,
                    used, "pod is gone and no DEL has come");
                let _ = reply.send(Ok(()));
                Flow::Break(Reason::PodGone.into())
            }
        }
    }
}

/// The broker says that a sandbox's pod is gone: lets go if that may be done; otherwise says who has the namespace.
pub(crate) async fn pod_gone(node: &Arc<Node>, handle: Handle, generation: u64) -> Result<(), String> {
    let used = match who_has(node, &handle).await {
        Use::Nobody => None,
        Use::Somebody(cause) => Some(cause),
    };
    let (reply, outcome) = oneshot::channel();
    handle.send(Message::PodGone {
        generation,
        used,
        reply,
    });
    // A task that has ended has let go.
    outcome.await.unwrap_or(Ok(()))?;
    super::registry::wait_for_end(vec![handle.ended]).await;
    Ok(())
}

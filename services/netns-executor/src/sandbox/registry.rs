//! Which sandboxes there are, and how to reach their tasks.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sluice_proto::ambient::Desired;
use sluice_proto::code::ErrorCode;
use sluice_proto::id::{Attachment, ContainerId, NetworkName, PodRef, PodUid};
use sluice_proto::sandbox::{Failure, NetnsIdentity};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::index::Sandboxes;
use super::{Message, Reason, Sender, Slot};
use crate::foresight::{Foresight, NotForeseen};
use crate::pool::COMPONENT;

/// A DEL is remembered for this long.
pub const TOMBSTONE: Duration = Duration::from_mins(1);
/// Whoever waits for a sandbox's end waits at most this long.
pub const END_DEADLINE: Duration = Duration::from_secs(1);

/// How to reach one sandbox's task.
#[derive(Debug, Clone)]
pub(crate) struct Handle {
    pub(crate) attachment: Attachment,
    pub(crate) generation: u64,
    pub(crate) pod: PodRef,
    pub(crate) addresses: Vec<IpAddr>,
    /// When its last ADD came.
    pub(crate) added_unix_ms: u64,
    pub(crate) netns: NetnsIdentity,
    /// The namespace, while it is at hand: whoever asks for it need not wait for the sandbox's task.
    pub(crate) descriptor: Option<Arc<OwnedFd>>,
    pub(crate) ending: bool,
    pub(crate) sender: Sender,
    pub(crate) slot: Arc<Slot>,
    /// Cancelled when everything of it is undone.
    pub(crate) ended: CancellationToken,
}

impl Handle {
    pub(crate) fn is_for(&self, container_id: &ContainerId) -> bool {
        self.attachment.container_id == *container_id
    }

    /// The namespace's sockets are at hand.
    pub(crate) fn reachable(&self) -> bool {
        self.descriptor.is_some()
    }

    /// Sends; false if the task has ended.
    pub(crate) fn send(&self, message: Message) -> bool {
        self.sender.send(Box::new(message)).is_ok()
    }
}

#[derive(Debug, Default)]
pub(crate) struct Inner {
    pub(crate) sandboxes: Sandboxes,
    /// By hash: a node that is torn down deletes thousands within the time they are remembered.
    deleted: HashMap<u64, Instant>,
    hasher: RandomState,
    pruned: Option<Instant>,
    last_generation: u64,
    last_waiter: u64,
    /// No sandbox begins any more.
    retired: bool,
}

/// The registry.
#[derive(Debug, Default)]
pub(crate) struct Registry(Mutex<Inner>);

impl Registry {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        // Each holder leaves the map whole at every point where it could panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn find(&self, attachment: &Attachment) -> Option<Handle> {
        self.lock().sandboxes.get(attachment).cloned()
    }

    pub(crate) fn find_by_uid(&self, uid: &PodUid) -> Option<Handle> {
        let inner = self.lock();
        inner.sandboxes.of_pod(uid).find(|h| !h.ending).cloned()
    }

    /// Takes what a broker has decided ahead. A pod that has a sandbox is left out, under the lock under which sandboxes
    /// begin: otherwise a decision that comes late would be kept for the pod's next sandbox.
    pub(crate) fn foresee(
        &self,
        foresight: &Foresight,
        session: u64,
        mut decided: Vec<(PodUid, Desired)>,
        ask: &[PodUid],
    ) -> Result<(), NotForeseen> {
        let inner = self.lock();
        decided.retain(|(uid, _)| inner.sandboxes.of_pod(uid).next().is_none());
        foresight.note(session, decided, ask)
    }

    /// Whether a sandbox of this pod has this address on record.
    pub(crate) fn has_address(&self, uid: &PodUid, address: IpAddr) -> bool {
        let inner = self.lock();
        let mut own = inner.sandboxes.of_pod(uid).filter(|h| !h.ending);
        own.any(|h| {
            h.addresses
                .iter()
                .any(|a| a.to_canonical() == address.to_canonical())
        })
    }

    /// Ends all sandboxes, and lets none begin from now on. Returns what tells that each has ended.
    pub(crate) fn retire(&self) -> Vec<CancellationToken> {
        let mut inner = self.lock();
        inner.retired = true;
        let handles = inner.sandboxes.values();
        handles
            .map(|handle| {
                handle.send(Message::Remove(Reason::Retired));
                handle.ended.clone()
            })
            .collect()
    }

    /// Whether the agent leaves the node.
    pub(crate) fn is_retired(&self) -> bool {
        self.lock().retired
    }

    /// Those of one network that are not among `valid`.
    pub(crate) fn surplus(&self, network: &NetworkName, valid: &[Attachment]) -> Vec<Handle> {
        let inner = self.lock();
        let surplus = inner
            .sandboxes
            .values()
            .filter(|h| h.attachment.network_name == *network && !valid.contains(&h.attachment));
        surplus.cloned().collect()
    }

    /// Ends a sandbox and remembers that it was deleted. Returns it if there is one.
    pub(crate) fn delete(&self, attachment: &Attachment, reason: Reason) -> Option<Handle> {
        let mut inner = self.lock();
        let now = Instant::now();
        if inner
            .pruned
            .is_none_or(|at| now.duration_since(at) > TOMBSTONE / 10)
        {
            inner.deleted.retain(|_, at| now.duration_since(*at) < TOMBSTONE);
            inner.pruned = Some(now);
        }
        let key = inner.hasher.hash_one(attachment);
        inner.deleted.insert(key, now);
        let handle = inner.sandboxes.get(attachment).cloned()?;
        handle.send(Message::Remove(reason));
        Some(handle)
    }

    /// The task has begun to end.
    pub(crate) fn mark_ending(&self, attachment: &Attachment, generation: u64) {
        self.update(attachment, generation, |handle| handle.ending = true);
    }

    /// Changes what is known about a generation, if it is still the current one.
    pub(crate) fn update(&self, attachment: &Attachment, generation: u64, change: impl FnOnce(&mut Handle)) {
        self.lock().sandboxes.update(attachment, |handle| {
            if handle.generation == generation {
                change(handle);
            }
        });
    }

    /// Whether a generation is the newest of its key.
    pub(crate) fn is_current(&self, attachment: &Attachment, generation: u64) -> bool {
        let inner = self.lock();
        inner
            .sandboxes
            .get(attachment)
            .is_some_and(|h| h.generation == generation)
    }

    /// Forgets a generation that has ended.
    pub(crate) fn forget(&self, attachment: &Attachment, generation: u64) {
        let mut inner = self.lock();
        if inner
            .sandboxes
            .get(attachment)
            .is_some_and(|h| h.generation == generation)
        {
            inner.sandboxes.remove(attachment);
        }
    }
}

impl Inner {
    /// Whether a DEL of this key came after `since`.
    pub(crate) fn deleted_since(&self, attachment: &Attachment, since: Instant) -> bool {
        let key = self.hasher.hash_one(attachment);
        self.deleted.get(&key).is_some_and(|at| *at > since)
    }

    /// A generation that no earlier one reaches, in this life or one before: they start at the wall clock in
    /// milliseconds, and restored ones raise the mark.
    pub(crate) fn next_generation(&mut self) -> u64 {
        self.last_generation = self.last_generation.saturating_add(1).max(crate::node::unix_ms());
        self.last_generation
    }

    /// The reason why no sandbox may begin, if there is one.
    pub(crate) fn refuse_when_retired(&self, stage: &'static str) -> Result<(), Failure> {
        if self.retired {
            let cause = "the agent is being removed from this node";
            return Err(Failure::new(ErrorCode::TooLate, COMPONENT, stage, cause));
        }
        Ok(())
    }

    /// A restored sandbox has this one.
    pub(crate) fn raise_generation(&mut self, generation: u64) {
        self.last_generation = self.last_generation.max(generation);
    }

    pub(crate) fn next_waiter(&mut self) -> u64 {
        self.last_waiter += 1;
        self.last_waiter
    }

    /// Whose a namespace is.
    pub(crate) fn owner_of(&self, netns: &NetnsIdentity) -> Option<&Handle> {
        self.sandboxes.in_netns(netns).next()
    }
}

/// Waits for sandboxes to end, [`END_DEADLINE`] in all; whoever is later goes on alone.
pub(crate) async fn wait_for_end(ended: Vec<CancellationToken>) {
    let all = async {
        for token in ended {
            token.cancelled().await;
        }
    };
    if tokio::time::timeout(END_DEADLINE, all).await.is_err() {
        tracing::warn!("a sandbox did not end in time; its clean-up goes on in the background");
    }
}

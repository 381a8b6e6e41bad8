//! What a connection still has to say and what it has said without an answer: decides what may be sent next.
//!
//! Pure, so that the rules of the protocol are in one place: in a snapshot up to `window` adds are in flight,
//! afterwards one message; a deletion never overlaps anything; the snapshot ends when all of it was answered.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use sluice_proto::id::PodUid;

use super::{WithdrawGuard, Workload};
use crate::reconcile::event::Epoch;

/// How far a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Phase {
    /// Waiting for the peer's hello.
    #[default]
    Hello,
    /// Sending the snapshot.
    Snapshot,
    /// The snapshot's end awaits its answer.
    Ending,
    /// Serving.
    Ready,
}

impl Phase {
    /// As people read it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Hello => "hello",
            Self::Snapshot | Self::Ending => "snapshot",
            Self::Ready => "ready",
        }
    }
}

/// Something to say.
#[derive(Debug)]
pub(super) enum Item {
    Add(Workload),
    Del(PodUid, Arc<WithdrawGuard>),
    SnapshotEnd,
}

/// Something said, not answered.
#[derive(Debug)]
pub(super) enum Sent {
    Add(PodUid, Epoch),
    Del(#[expect(dead_code, reason = "reports when dropped")] Arc<WithdrawGuard>),
    SnapshotEnd,
}

#[derive(Debug)]
pub(super) struct Queue {
    pub(super) phase: Phase,
    window: usize,
    open: bool,
    waiting: VecDeque<Item>,
    pub(super) unanswered: VecDeque<Sent>,
    /// Workloads ever sent on this connection and not deleted since.
    sent: HashSet<PodUid>,
    /// Acknowledged while the snapshot was being sent.
    pub(super) acked: HashMap<PodUid, Epoch>,
}

impl Queue {
    pub(super) fn new(window: usize) -> Self {
        Self {
            phase: Phase::Hello,
            window: window.max(1),
            open: false,
            waiting: VecDeque::new(),
            unanswered: VecDeque::new(),
            sent: HashSet::new(),
            acked: HashMap::new(),
        }
    }

    /// The peer has said hello; the snapshot may start.
    pub(super) fn begin(&mut self, workloads: Vec<Workload>, open: bool) {
        self.phase = Phase::Snapshot;
        self.open |= open;
        // Nothing waits yet and each workload is there once, so none has to be looked for as in `offer`.
        self.waiting.extend(workloads.into_iter().map(Item::Add));
    }

    pub(super) fn open(&mut self) {
        self.open = true;
    }

    /// Replaces what waits for the same workload; `snapshot_only` means nothing once the snapshot was ended.
    pub(super) fn offer(&mut self, workload: Workload, snapshot_only: bool) {
        let over = matches!(self.phase, Phase::Ending | Phase::Ready);
        if self.phase == Phase::Hello || (snapshot_only && over) {
            return;
        }
        let uid = &workload.0.uid;
        let epoch = workload.0.epoch;
        let in_flight =
            |sent: &Sent| matches!(sent, Sent::Add(other, attempt) if other == uid && *attempt == epoch);
        let known = self.acked.get(uid) == Some(&epoch);
        if !over && (known || self.unanswered.iter().any(in_flight)) {
            return;
        }
        let waits = self
            .waiting
            .iter_mut()
            .find(|item| matches!(item, Item::Add(other) if other.0.uid == *uid));
        match waits {
            Some(item) => *item = Item::Add(workload),
            None => self.waiting.push_back(Item::Add(workload)),
        }
    }

    /// What waits for the workload is forgotten; a deletion follows if the peer may know it.
    pub(super) fn withdraw(&mut self, uid: PodUid, guard: Arc<WithdrawGuard>) {
        self.waiting
            .retain(|item| !matches!(item, Item::Add(other) if other.0.uid == uid));
        self.acked.remove(&uid);
        match self.phase {
            Phase::Hello => {}
            // Not named in the snapshot: the peer drops it by itself.
            Phase::Snapshot if !self.sent.contains(&uid) => {}
            Phase::Snapshot | Phase::Ending | Phase::Ready => {
                self.waiting.push_back(Item::Del(uid, guard));
            }
        }
    }

    /// The next message, if one may be sent now.
    pub(super) fn next(&mut self) -> Option<Item> {
        let alone = self.unanswered.is_empty();
        match (self.phase, self.waiting.front()) {
            (Phase::Snapshot, None) if alone && self.open => {
                self.phase = Phase::Ending;
                Some(Item::SnapshotEnd)
            }
            (Phase::Hello | Phase::Ending, _) | (Phase::Snapshot | Phase::Ready, None) => None,
            (Phase::Snapshot, Some(Item::Add(_))) => {
                let deleting = matches!(self.unanswered.back(), Some(Sent::Del(_)));
                let room = self.unanswered.len() < self.window && !deleting;
                if room { self.waiting.pop_front() } else { None }
            }
            (Phase::Snapshot | Phase::Ready, Some(_)) => {
                if alone {
                    self.waiting.pop_front()
                } else {
                    None
                }
            }
        }
    }

    /// The message was sent.
    pub(super) fn said(&mut self, item: &Item) {
        self.unanswered.push_back(match item {
            Item::Add(workload) => {
                let uid = &workload.0.uid;
                self.sent.insert(uid.clone());
                Sent::Add(uid.clone(), workload.0.epoch)
            }
            Item::Del(uid, guard) => {
                self.sent.remove(uid);
                Sent::Del(guard.clone())
            }
            Item::SnapshotEnd => Sent::SnapshotEnd,
        });
    }

    /// Messages that wait to be sent or answered.
    pub(super) fn pending(&self) -> usize {
        self.waiting.len() + self.unanswered.len()
    }
}

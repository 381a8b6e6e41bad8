//! Telling the executor ahead of time what is decided about pods that have no sandbox yet: their ADDs are answered
//! sooner.

use std::collections::BTreeMap;
use std::time::Instant;

use sluice_proto::ambient::Desired;
use sluice_proto::id::PodUid;
use sluice_proto::sandbox::Failure;

use super::backoff::Backoff;
use super::effect::Effect;
use super::pod::{Offer, Pod};
use super::world::World;

/// What the executor has yet to be told.
///
/// Invariant: calls go out one at a time, so that the executor hears changes in the order in which they were decided:
/// a pod that came into the mesh must not be let pass by a call that was overtaken. `None`: it has to ask.
#[derive(Debug, Default)]
pub(super) struct Foresight {
    changes: BTreeMap<PodUid, Option<Desired>>,
    in_flight: Option<BTreeMap<PodUid, Option<Desired>>>,
    /// Number of the last call, so that the answer to one that was given up is not taken for the next one's.
    call: u64,
    pub(super) backoff: Backoff,
}

impl Foresight {
    fn set(&mut self, pod: &PodUid, ahead: Option<Desired>) {
        self.changes.insert(pod.clone(), ahead);
    }

    /// A sandbox of the pod has begun. The executor has then forgotten what it was told of the pod, and keeps nothing that it is
    /// told while there is one; so nothing is left to tell, unless a call is on its way that may come once that one has ended.
    /// Without it the executor has nothing else to do while ztunnel and the runtime wait.
    fn is_used_up(&mut self, pod: &PodUid) -> bool {
        self.changes.remove(pod);
        let on_its_way = |calls: &BTreeMap<_, _>| calls.contains_key(pod);
        !self.in_flight.as_ref().is_some_and(on_its_way)
    }

    /// The executor's connection has ended, and with it all that it was told.
    pub(super) fn forget(&mut self) {
        *self = Self {
            call: self.call,
            ..Self::default()
        };
    }

    /// The next call, if one is due.
    pub(super) fn take(&mut self, now: Instant) -> Option<Effect> {
        if self.changes.is_empty() || self.in_flight.is_some() || !self.backoff.ready(now) {
            return None;
        }
        let changes = std::mem::take(&mut self.changes);
        let decided = changes
            .iter()
            .filter_map(|(pod, ahead)| Some((pod.clone(), ahead.clone()?)));
        let open = changes.iter().filter(|(_, ahead)| ahead.is_none());
        self.call += 1;
        let effect = Effect::Foresee {
            call: self.call,
            decided: decided.collect(),
            ask: open.map(|(pod, _)| pod.clone()).collect(),
        };
        self.in_flight = Some(changes);
        Some(effect)
    }
}

impl World {
    /// Decides what the executor may do by itself when the pod's ADD comes. `advance` ends with it.
    pub(super) fn foresee(&mut self, pod: &mut Pod) {
        let untouched = pod.current.is_none() && pod.offer == Offer::Off && pod.probes.is_empty();
        let known = self.synced && pod.object.is_some() && !pod.lacks_namespace;
        let decision = pod.decision.as_ref().filter(|_| self.executor_up());
        let ahead = decision
            .filter(|_| known && untouched && !pod.ended())
            .map(|decision| decision.options.clone().map_or(Desired::None, Desired::Ambient));
        if ahead == pod.foreseen {
            return;
        }
        pod.foreseen.clone_from(&ahead);
        let uid = &pod.reference.uid;
        if pod.current.is_some() && self.foresight.is_used_up(uid) {
            return;
        }
        self.foresight.set(uid, ahead);
    }

    pub(super) fn foreseen(&mut self, call: u64, result: &Result<(), Failure>) {
        if call != self.foresight.call {
            return;
        }
        let Some(told) = self.foresight.in_flight.take() else {
            return;
        };
        if result.is_ok() {
            self.foresight.backoff.reset();
            return;
        }
        let (first, longest) = self.settings.retry;
        let (now, jitter) = (self.now, &mut self.jitter);
        self.foresight.backoff.failed(now, first, longest, jitter);
        for (pod, ahead) in told {
            // What was decided since wins.
            self.foresight.changes.entry(pod).or_insert(ahead);
        }
    }
}

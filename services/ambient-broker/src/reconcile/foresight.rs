//! Telling the executor ahead of time which pods pass: an ADD that nobody has to be asked about is answered sooner.

use std::collections::BTreeMap;
use std::time::Instant;

use sluice_proto::id::PodUid;
use sluice_proto::sandbox::Failure;

use super::backoff::Backoff;
use super::event::Effect;
use super::pod::{Offer, Pod};
use super::world::World;

/// What the executor has yet to be told.
///
/// Invariant: calls go out one at a time, so that the executor hears changes in the order in which they were decided:
/// a pod that came into the mesh must not be let pass by a call that was overtaken.
#[derive(Debug, Default)]
pub(super) struct Foresight {
    /// True: passes; false: ask.
    changes: BTreeMap<PodUid, bool>,
    in_flight: Option<BTreeMap<PodUid, bool>>,
    /// Number of the last call, so that the answer to one that was given up is not taken for the next one's.
    call: u64,
    pub(super) backoff: Backoff,
}

impl Foresight {
    fn set(&mut self, pod: &PodUid, passes: bool) {
        self.changes.insert(pod.clone(), passes);
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
        let all = |passes| {
            let those = changes.iter().filter(move |(_, change)| **change == passes);
            those.map(|(pod, _)| pod.clone()).collect()
        };
        self.call += 1;
        let effect = Effect::Foresee {
            call: self.call,
            pass: all(true),
            ask: all(false),
        };
        self.in_flight = Some(changes);
        Some(effect)
    }
}

impl World {
    /// Decides whether the pod may be let pass by the executor alone. `advance` ends with it.
    pub(super) fn foresee(&mut self, pod: &mut Pod) {
        let out = pod
            .decision
            .as_ref()
            .is_some_and(|decision| decision.options.is_none());
        let untouched = pod.current.is_none() && pod.offer == Offer::Off && pod.probes.is_empty();
        let known = self.synced && pod.object.is_some() && !pod.lacks_namespace;
        let passes = self.executor_up() && known && out && untouched && !pod.ended();
        if passes != pod.foreseen {
            pod.foreseen = passes;
            self.foresight.set(&pod.reference.uid, passes);
        }
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
        for (pod, passes) in told {
            // What was decided since wins.
            self.foresight.changes.entry(pod).or_insert(passes);
        }
    }
}

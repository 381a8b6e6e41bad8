//! Who is in the mesh and what has to be done about it: a state machine without I/O, clock or threads.
//!
//! [`State::handle`] takes a fact and returns what to do; whoever carries it out reports back with another fact.
//! Each pod is level-triggered: after every event that concerns it, what is known is compared with what should be
//! and whatever may start now is started (`advance`), so a lost or repeated event cannot leave a pod half-way.
//!
//! Order of enrolment: rules and ztunnel, probe set, status. Each failure takes the earlier steps back, except for a
//! pod that has served in the mesh: its rules stay, because taking them away would let its traffic out in plain text.

mod add;
mod advance;
mod answer;
mod backoff;
mod decide;
pub mod effect;
pub mod event;
mod foresight;
mod leave;
mod object;
mod pod;
pub mod report;
mod sandbox;
mod workload;
mod world;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sluice_proto::ambient::Desired;
use sluice_proto::id::{Namespace, PodName, PodUid};
use sluice_selection::{SelectionConfig, Verdict as Selection};

pub use effect::Effect;
pub use event::Event;
pub use world::Settings;

use pod::{Descriptor, Pod};
use report::{PodReport, Standing};
use world::World;

/// Our name in failures.
pub const COMPONENT: &str = "ambient-broker";

/// All pods are looked at this often, whatever happens.
const SWEEP: Duration = Duration::from_secs(5);

/// How many pods stand where.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// All pods known.
    pub pods: usize,
    /// Selected and not ended: enrolled + broken + pending.
    pub expected: usize,
    /// In the mesh.
    pub enrolled: usize,
    /// Something is wrong.
    pub broken: usize,
    /// On their way.
    pub pending: usize,
}

/// The whole state.
#[derive(Debug)]
pub struct State {
    pods: HashMap<PodUid, Pod>,
    /// When which pod wants to be looked at again, so that neither an event nor a tick costs a walk over all.
    due: BTreeSet<(Instant, PodUid)>,
    swept: Instant,
    world: World,
}

impl State {
    /// Nothing is known yet.
    pub fn new(settings: Settings, selection: SelectionConfig, now: Instant) -> Self {
        Self {
            pods: HashMap::new(),
            due: BTreeSet::new(),
            swept: now,
            world: World::new(settings, selection, now),
        }
    }

    /// Takes a fact, returns what to do, in order.
    pub fn handle(&mut self, now: Instant, event: Event) -> Vec<Effect> {
        self.world.now = now;
        self.dispatch(event);
        self.open_zds();
        self.prune_probes();
        if let Some(effect) = self.world.probes.take(now) {
            self.world.emit(effect);
        }
        if let Some(effect) = self.world.foresight.take(now) {
            self.world.emit(effect);
        }
        std::mem::take(&mut self.world.out)
    }

    /// When the next [`Event::Tick`] is due, if nothing else happens.
    pub fn wake(&self) -> Option<Instant> {
        let now = self.world.now;
        let mut wake = self.due.first().map(|(at, _)| *at);
        wake = earliest(wake, self.world.probes.backoff.wake(now));
        wake = earliest(wake, self.world.prune.backoff.wake(now));
        wake = earliest(wake, self.world.foresight.backoff.wake(now));
        if let (Some(listed), false) = (self.world.listed, self.world.zds_open) {
            wake = earliest(
                wake,
                Some(listed + self.world.settings.snapshot_wait).filter(|at| *at > now),
            );
        }
        wake
    }

    /// Where the pods stand.
    pub fn counts(&self) -> Counts {
        let mut counts = Counts {
            pods: self.pods.values().filter(|pod| pod.object.is_some()).count(),
            ..Counts::default()
        };
        for report in self.pods.values().filter_map(|pod| pod.report.as_ref()) {
            match report.standing {
                Standing::Enrolled => counts.enrolled += 1,
                Standing::Broken => counts.broken += 1,
                Standing::Pending => counts.pending += 1,
                Standing::Out | Standing::Draining => continue,
            }
            counts.expected += 1;
        }
        counts
    }

    /// ADDs that wait for a verdict.
    pub fn adding(&self) -> usize {
        let adding = |pod: &&Pod| pod.current.as_ref().is_some_and(|current| current.add.is_some());
        self.pods.values().filter(adding).count()
    }

    /// All reports.
    pub fn reports(&self) -> impl Iterator<Item = &Arc<PodReport>> {
        self.pods.values().filter_map(|pod| pod.report.as_ref())
    }

    /// A pod's report, the checks of its selection, and its sandbox.
    pub fn explain(&self, namespace: &Namespace, name: &PodName) -> Option<Explanation> {
        let pod = self
            .pods
            .values()
            .filter(|pod| pod.reference.namespace == *namespace && pod.reference.name == *name)
            .max_by_key(|pod| pod.object.is_some())?;
        let selection = pod.object.as_ref().map(|object| {
            let known = self.world.namespaces.get(&object.id.namespace);
            let view = known.map(|namespace| namespace.view());
            sluice_selection::select(&self.world.selection, &object.view(), view)
        });
        Some(Explanation {
            report: pod.report.clone()?,
            selection,
            sandbox: pod.current.as_ref().map(|current| current.id().clone()),
        })
    }

    /// The source has been told in full.
    pub fn synced(&self) -> bool {
        self.world.synced
    }

    /// Snapshots may be ended.
    pub fn zds_open(&self) -> bool {
        self.world.zds_open
    }

    fn dispatch(&mut self, event: Event) {
        match event {
            Event::SourceSynced => {
                self.world.synced = true;
                self.advance_all();
            }
            Event::PodApplied(object) => self.pod_applied(object),
            Event::PodDeleted(object) => self.pod_deleted(&object),
            Event::NamespaceApplied(namespace) => {
                self.namespace_changed(&namespace.name.clone(), Some(namespace));
            }
            Event::NamespaceDeleted(namespace) => self.namespace_changed(&namespace.name, None),
            Event::Undetermined(undetermined) => self.undetermined(undetermined),
            Event::LookedUp { pod, found } => self.looked_up(&pod, found),
            Event::Tick => self.tick(),
            event @ (Event::ZdsConnected(_)
            | Event::ZdsReady { .. }
            | Event::ZdsAcked { .. }
            | Event::ZdsNacked { .. }
            | Event::ZdsExpired { .. }
            | Event::ZdsClosed(_)
            | Event::ZdsWithdrawn { .. }) => self.zds(event),
            executor => self.executor(executor),
        }
    }

    /// Changes one pod and lets it take its next step.
    fn with(&mut self, uid: &PodUid, change: impl FnOnce(&mut World, &mut Pod)) {
        let Some(pod) = self.pods.get_mut(uid) else { return };
        change(&mut self.world, pod);
        self.world.advance(pod);
        let wake = pod.wake(self.world.now);
        if wake != pod.due {
            if let Some(at) = std::mem::replace(&mut pod.due, wake) {
                self.due.remove(&(at, uid.clone()));
            }
            self.due.extend(wake.map(|at| (at, uid.clone())));
        }
        if pod.forgettable() {
            debug_assert!(
                pod.foreseen.is_none(),
                "what is not in the source cannot be foreseen"
            );
            if let Some(at) = pod.due {
                self.due.remove(&(at, uid.clone()));
            }
            let reference = pod.reference.clone();
            let published = pod.report.is_some();
            self.pods.remove(uid);
            if published {
                self.world.emit(Effect::Publish {
                    pod: reference,
                    report: None,
                });
            }
        }
    }

    /// Looks at the pods whose time has come; at all of them once in a while, in case anything was overlooked.
    fn tick(&mut self) {
        let now = self.world.now;
        if now >= self.swept + SWEEP {
            self.swept = now;
            self.advance_all();
            return;
        }
        let due = self.due.iter().take_while(|(at, _)| *at <= now);
        let due: Vec<_> = due.map(|(_, uid)| uid.clone()).collect();
        for uid in due {
            self.with(&uid, |_, _| {});
        }
    }

    fn advance_all(&mut self) {
        let uids: Vec<_> = self.pods.keys().cloned().collect();
        for uid in uids {
            self.with(&uid, |_, _| {});
        }
    }

    /// Lets snapshots end once every netns that was redirected before this life is in them, be it by us or, on a node
    /// that is being moved over, by Istio's agent: ztunnel drops what a snapshot does not name.
    fn open_zds(&mut self) {
        if self.world.zds_open || !self.world.synced || !self.world.executor_up() {
            return;
        }
        let waited = self
            .world
            .listed
            .is_some_and(|listed| self.world.now >= listed + self.world.settings.snapshot_wait);
        let missing = |pod: &Pod| {
            let Some(current) = pod.usable() else {
                return pod.awaits_adoption();
            };
            let ours = current.established && current.rules != Desired::None;
            let counts = pod.object.is_some() && (ours || (pod.wanted().is_some() && current.add.is_none()));
            let tried = current.fetch.attempts() > 0;
            counts && !matches!(current.descriptor, Descriptor::Held(_)) && !tried
        };
        if !waited && self.pods.values().any(missing) {
            return;
        }
        self.world.zds_open = true;
        self.world.emit(Effect::ZdsOpen);
        self.world.prune.owed = true;
    }

    /// Removes what earlier lives left in the probe set, once it is certain what belongs there, until it was done.
    fn prune_probes(&mut self) {
        let now = self.world.now;
        let prune = &self.world.prune;
        if !prune.owed || !prune.backoff.ready(now) || !self.world.executor_up() {
            return;
        }
        if self.world.probes.is_pruning() {
            return;
        }
        let uncertain = self.pods.values().any(|pod| {
            let running = pod
                .object
                .as_ref()
                .is_some_and(|object| object.phase == sluice_selection::Phase::Running);
            let adding = pod.current.as_ref().is_some_and(|current| current.add.is_some());
            let belongs = pod.wanted().is_some() || pod.is_undecided();
            adding || (running && belongs && pod.usable().is_none())
        });
        if uncertain {
            self.world.prune_later();
            return;
        }
        for pod in self.pods.values_mut() {
            let redirected = pod.usable().is_some_and(|current| current.rules != Desired::None);
            if redirected && pod.object.is_some() && !pod.ended() {
                self.world.ensure_probes(pod);
                for entry in World::entries(&pod.reference, &pod.probes) {
                    self.world.probes.add(entry);
                }
            }
        }
        self.world.probes.prune();
    }
}

/// Everything about one pod.
#[derive(Debug, Clone)]
pub struct Explanation {
    /// Where it stands.
    pub report: Arc<PodReport>,
    /// Every check of the selection.
    pub selection: Option<Selection>,
    /// Its sandbox.
    pub sandbox: Option<event::SandboxId>,
}

/// The earlier of two points in time at which an [`Event::Tick`] is wanted.
fn earliest(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (one, other) => one.or(other),
    }
}

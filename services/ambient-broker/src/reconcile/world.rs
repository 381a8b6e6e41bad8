//! What all pods share: settings, the state of the peers, and the effects collected so far.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sluice_proto::id::{Namespace, PodRef};
use sluice_proto::paths::DEADLINES;
use sluice_selection::SelectionConfig;

use super::backoff::{Backoff, Jitter};
use super::effect::{Effect, Level, ProbeEntry};
use super::event::{ConnectionId, Epoch, SandboxId};
use super::foresight::Foresight;
use super::pod::Pod;
use crate::source;

/// First pause before the probe set is pruned after all.
const PRUNE_AGAIN: Duration = Duration::from_millis(250);

/// Numbers an operator may change.
#[derive(Debug, Clone)]
pub struct Settings {
    /// A pod that leaves the mesh keeps its kept connections at most this long.
    pub drain: Duration,
    /// Pause between two looks at a draining pod.
    pub drain_poll: Duration,
    /// An ADD that is not decided by then is refused; below the executor's own deadline, so that the reason is ours.
    pub add_deadline: Duration,
    /// How long the source is asked again for a pod of an ADD that it does not know.
    pub lookup: Duration,
    /// A refused ADD waits this long for what was done to be taken back.
    pub unwind: Duration,
    /// First and longest pause between attempts.
    pub retry: (Duration, Duration),
    /// Pause between two offers of a workload that ztunnel refuses.
    pub nack_retry: Duration,
    /// Longest pause before a workload is offered again that made ztunnel hang.
    pub expired_retry: Duration,
    /// A pod's status outlives a lost ztunnel connection this long.
    pub status_hold: Duration,
    /// At most one message per pod in this time.
    pub log_pause: Duration,
    /// After a start, snapshots wait this long for namespaces that the executor cannot reach yet.
    pub snapshot_wait: Duration,
    /// First and longest pause between two searches for the netns of a running pod.
    pub adopt_retry: (Duration, Duration),
    /// Seed of the jitter.
    pub seed: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            drain: Duration::from_mins(1),
            drain_poll: Duration::from_millis(250),
            add_deadline: DEADLINES.executor.saturating_sub(Duration::from_millis(500)),
            lookup: Duration::from_secs(1),
            unwind: Duration::from_millis(500),
            retry: (Duration::from_millis(5), Duration::from_secs(5)),
            nack_retry: Duration::from_secs(5),
            expired_retry: Duration::from_mins(5),
            status_hold: Duration::from_secs(5),
            log_pause: Duration::from_secs(10),
            snapshot_wait: Duration::from_secs(5),
            adopt_retry: (Duration::from_millis(250), Duration::from_millis(3_500)),
            seed: 1,
        }
    }
}

/// How far the executor's watch is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Link {
    Down,
    /// Its sandboxes are being listed; these were told.
    Listing(HashSet<SandboxId>),
    Up,
}

/// Changes to the probe set that wait for their turn: one call at a time, changes in between are merged.
#[derive(Debug, Default)]
pub(super) struct ProbeQueue {
    add: BTreeSet<ProbeEntry>,
    remove: BTreeSet<ProbeEntry>,
    prune: bool,
    pub(super) in_flight: Option<(BTreeSet<ProbeEntry>, BTreeSet<ProbeEntry>, bool)>,
    pub(super) backoff: Backoff,
}

impl ProbeQueue {
    pub(super) fn add(&mut self, entry: ProbeEntry) {
        self.remove.remove(&entry);
        self.add.insert(entry);
    }

    pub(super) fn remove(&mut self, entry: ProbeEntry) {
        self.add.remove(&entry);
        self.remove.insert(entry);
    }

    pub(super) fn prune(&mut self) {
        self.prune = true;
    }

    pub(super) fn is_pruning(&self) -> bool {
        self.prune || self.in_flight.as_ref().is_some_and(|(_, _, prune)| *prune)
    }

    /// The next call, if one is due.
    pub(super) fn take(&mut self, now: Instant) -> Option<Effect> {
        let idle = self.add.is_empty() && self.remove.is_empty() && !self.prune;
        if idle || self.in_flight.is_some() || !self.backoff.ready(now) {
            return None;
        }
        let batch = (
            std::mem::take(&mut self.add),
            std::mem::take(&mut self.remove),
            std::mem::take(&mut self.prune),
        );
        let effect = Effect::SyncProbes {
            add: batch.0.iter().cloned().collect(),
            remove: batch.1.iter().cloned().collect(),
            prune: batch.2,
        };
        self.in_flight = Some(batch);
        Some(effect)
    }

    /// Puts back a batch that failed; what was decided since wins.
    pub(super) fn put_back(&mut self, batch: (BTreeSet<ProbeEntry>, BTreeSet<ProbeEntry>, bool)) {
        // A prune is not put back: its list would be an old one. It stays owed.
        let (add, remove, _) = batch;
        for entry in add {
            if !self.remove.contains(&entry) {
                self.add.insert(entry);
            }
        }
        for entry in remove {
            if !self.add.contains(&entry) {
                self.remove.insert(entry);
            }
        }
    }
}

/// Whether the probe set still has to be freed of what earlier lives left in it.
#[derive(Debug, Default)]
pub(super) struct Prune {
    pub(super) owed: bool,
    pub(super) backoff: Backoff,
}

/// Everything but the pods.
#[derive(Debug)]
pub(super) struct World {
    pub(super) settings: Settings,
    pub(super) selection: SelectionConfig,
    pub(super) namespaces: HashMap<Namespace, Arc<source::Namespace>>,
    /// A namespace that is not known may exist all the same.
    pub(super) undetermined: bool,
    /// The source was asked for these since it last told of a namespace, and has none.
    pub(super) absent: HashSet<Namespace>,
    pub(super) synced: bool,
    pub(super) link: Link,
    /// When the executor's first list was complete.
    pub(super) listed: Option<Instant>,
    /// ztunnel connections by age; true: ready.
    pub(super) connections: BTreeMap<ConnectionId, bool>,
    pub(super) zds_open: bool,
    pub(super) probes: ProbeQueue,
    pub(super) prune: Prune,
    pub(super) foresight: Foresight,
    pub(super) jitter: Jitter,
    pub(super) now: Instant,
    pub(super) out: Vec<Effect>,
    epoch: u64,
}

impl World {
    pub(super) fn new(settings: Settings, selection: SelectionConfig, now: Instant) -> Self {
        Self {
            jitter: Jitter::new(settings.seed),
            settings,
            selection,
            namespaces: HashMap::new(),
            undetermined: false,
            absent: HashSet::new(),
            synced: false,
            link: Link::Down,
            listed: None,
            connections: BTreeMap::new(),
            zds_open: false,
            probes: ProbeQueue::default(),
            prune: Prune::default(),
            foresight: Foresight::default(),
            now,
            out: Vec::new(),
            epoch: 0,
        }
    }

    pub(super) fn emit(&mut self, effect: Effect) {
        self.out.push(effect);
    }

    pub(super) fn next_epoch(&mut self) -> Epoch {
        self.epoch += 1;
        Epoch(self.epoch)
    }

    /// The probe set cannot be pruned now.
    pub(super) fn prune_later(&mut self) {
        let (now, longest) = (self.now, self.settings.retry.1);
        self.prune
            .backoff
            .failed(now, PRUNE_AGAIN, longest, &mut self.jitter);
    }

    /// The connection that serves ADDs: the newest of those whose snapshot was acknowledged.
    pub(super) fn proxy(&self) -> Option<ConnectionId> {
        self.connections
            .iter()
            .rev()
            .find_map(|(id, ready)| ready.then_some(*id))
    }

    pub(super) fn executor_up(&self) -> bool {
        self.link == Link::Up
    }

    /// A message about a pod, at most one in [`Settings::log_pause`] (changes of state always).
    pub(super) fn log(&mut self, pod: &mut Pod, level: Level, message: &'static str, details: String) {
        if level == Level::Warn {
            let quiet_until = pod.logged.map(|at| at + self.settings.log_pause);
            if quiet_until.is_some_and(|until| until > self.now) {
                return;
            }
            pod.logged = Some(self.now);
        }
        self.emit(Effect::Log {
            level,
            pod: pod.reference.clone(),
            message,
            details,
        });
    }

    pub(super) fn entries(pod: &PodRef, addresses: &[std::net::IpAddr]) -> Vec<ProbeEntry> {
        addresses
            .iter()
            .map(|address| ProbeEntry {
                address: *address,
                owner: pod.uid.clone(),
            })
            .collect()
    }
}

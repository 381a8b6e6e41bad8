//! Of every pod of this node: what its status annotation is, what it should be, and what people were told of it.
//!
//! Level-triggered: what should be is compared with what the API was last seen to have, so a lost patch, a patch of
//! somebody else and a restart are all the same case. A pod that is not in the book is never patched; only pods that
//! the API says are on this node get into it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sluice_proto::id::{PodRef, PodUid};
use sluice_selection::{Phase, REDIRECTION_STATUS};
use tokio::sync::{Notify, oneshot};

use super::pause::Pause;
use super::wire::{Owner, WirePod};
use crate::reconcile::report::{PodReport, Standing};

/// The value that the control plane takes for "accepts HBONE".
pub(super) const ENABLED: &str = "enabled";

/// Between two looks whether everything is written.
const LOOK: Duration = Duration::from_millis(10);
/// A new pod's sandbox is finished first: it takes the runtime some tens of milliseconds more, and nobody can reach the pod
/// before its containers run.
const SANDBOX: Duration = Duration::from_millis(250);

/// The annotation as the API has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    Absent,
    Enabled,
    /// Another value: another agent's, or somebody's who takes it for a setting.
    Other,
}

impl Mark {
    fn of(pod: &WirePod) -> Self {
        match pod.pod.annotations.get(REDIRECTION_STATUS).map(String::as_str) {
            None => Self::Absent,
            Some(ENABLED) => Self::Enabled,
            Some(_) => Self::Other,
        }
    }

    fn says(self, enrolled: bool) -> bool {
        self == if enrolled { Self::Enabled } else { Self::Absent }
    }
}

/// One pod's page.
#[derive(Debug)]
struct Page {
    /// The pod with its `metadata.uid`, which for a static pod is not the UID everybody else knows it by.
    api: PodRef,
    mark: Mark,
    /// Of the object that `mark` was read from.
    version: u64,
    wanted: bool,
    /// Told once the API has what is wanted.
    written: Option<oneshot::Sender<()>>,
    patching: bool,
    pause: Pause,
    not_before: Option<Instant>,
    running: bool,
    trouble: Option<Trouble>,
    /// Annotations that are not taken; true: people were told.
    ignored: (String, bool),
    posing: Posing,
}

impl Page {
    /// Another value is wanted from now on, and at once.
    fn want(&mut self, enrolled: bool) {
        self.wanted = enrolled;
        self.written = None;
        self.not_before = None;
        self.pause.reset();
    }

    fn tell_written(&mut self) {
        if self.mark.says(self.wanted)
            && let Some(written) = self.written.take()
        {
            let _ = written.send(());
        }
    }
}

/// Whether the pod has a name by which the plugin lets the agent's own pods pass.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Posing {
    /// It has not, or people were told.
    No,
    /// It has; this is its controller.
    Named(Option<Owner>),
    /// And it was enrolled.
    Enrolled(Option<Owner>),
}

/// A pod that is not as it should be.
#[derive(Debug)]
struct Trouble {
    report: Arc<PodReport>,
    since: Instant,
    /// People were told of this reason.
    told: bool,
}

/// A patch to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Patch {
    /// Its page.
    pub(super) key: PodUid,
    /// The pod as the API knows it.
    pub(super) pod: PodRef,
    /// The annotation's new value: set or removed.
    pub(super) enrolled: bool,
}

/// How a patch ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Patched {
    /// The object has this version now.
    Done(u64),
    /// The pod is gone, or another one has its name.
    Gone,
    /// Try again, not before this time.
    Failed(Option<Duration>),
}

/// The book. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct Book {
    /// The agent leaves: no annotation is set any more.
    withdrawn: Arc<AtomicBool>,
    pages: Arc<Mutex<HashMap<PodUid, Page>>>,
    changed: Arc<Notify>,
    retry: (Duration, Duration),
}

impl Book {
    /// `retry`: first and longest pause between two attempts at one patch.
    pub(super) fn new(retry: (Duration, Duration)) -> Self {
        Self {
            withdrawn: Arc::default(),
            pages: Arc::default(),
            changed: Arc::default(),
            retry,
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PodUid, Page>> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The API has this pod of our node; `agent`: it has a name of the agent's own pods. True if somebody else has
    /// changed the annotation.
    pub(super) fn seen(&self, pod: &WirePod, agent: bool) -> bool {
        let Ok(key) = PodUid::parse(pod.pod.sandbox_uid()) else {
            return false;
        };
        let mark = Mark::of(pod);
        let mut pages = self.lock();
        let Some(page) = pages.get_mut(&key).filter(|page| page.api == pod.pod.id) else {
            let wanted = mark == Mark::Enabled && !self.withdrawn.load(Ordering::Relaxed);
            pages.insert(
                key,
                Page {
                    api: pod.pod.id.clone(),
                    mark,
                    version: pod.version,
                    // The state machine takes what it sees first for what it wrote in an earlier life.
                    wanted,
                    written: None,
                    patching: false,
                    pause: Pause::new(self.retry),
                    not_before: None,
                    running: pod.pod.phase == Phase::Running,
                    trouble: None,
                    ignored: (String::new(), true),
                    posing: if agent {
                        Posing::Named(pod.owner.clone())
                    } else {
                        Posing::No
                    },
                },
            );
            if mark == Mark::Other {
                self.changed.notify_one();
            }
            return false;
        };
        page.running = pod.pod.phase == Phase::Running;
        // News from before our own patch.
        if pod.version < page.version {
            return false;
        }
        let right_before = page.mark.says(page.wanted) && !page.patching;
        page.mark = mark;
        page.version = pod.version;
        page.tell_written();
        if page.mark.says(page.wanted) {
            return false;
        }
        self.changed.notify_one();
        right_before
    }

    /// A pod by its name.
    pub(super) fn named(&self, namespace: &str, name: &str) -> Option<PodRef> {
        let pages = self.lock();
        let mut pods = pages.values().map(|page| &page.api);
        let found = pods.find(|pod| pod.namespace.as_str() == namespace && pod.name.as_str() == name);
        found.cloned()
    }

    /// The pod is gone.
    pub(super) fn gone(&self, uid: &str) {
        self.lock().retain(|key, _| key.as_str() != uid);
    }

    /// What the annotation should say. `false`: no such pod here.
    pub(super) fn want(&self, key: &PodUid, enrolled: bool) -> bool {
        let mut pages = self.lock();
        let enrolled = enrolled && !self.withdrawn.load(Ordering::Relaxed);
        let Some(page) = pages.get_mut(key) else {
            return false;
        };
        if page.wanted != enrolled {
            page.want(enrolled);
            let new = enrolled && !page.running;
            page.not_before = new.then(|| Instant::now() + SANDBOX);
        }
        if !page.mark.says(enrolled) {
            self.changed.notify_one();
        }
        true
    }

    /// Told once the API has what is wanted, dropped when that changes; `None`: the API has it.
    pub(super) fn written(&self, key: &PodUid) -> Option<oneshot::Receiver<()>> {
        let mut pages = self.lock();
        let page = pages.get_mut(key).filter(|page| !page.mark.says(page.wanted))?;
        let (sender, receiver) = oneshot::channel();
        page.written = Some(sender);
        Some(receiver)
    }

    /// Takes every annotation back, and lets none be set from now on. Returns when that is written.
    pub(super) async fn withdraw(&self) {
        {
            let mut pages = self.lock();
            self.withdrawn.store(true, Ordering::Relaxed);
            for page in pages.values_mut() {
                page.want(false);
            }
        }
        self.changed.notify_one();
        while !self.lock().values().all(|page| page.mark.says(false)) {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// At most `room` patches that are due, and when the next one is. Each is under way from now on.
    pub(super) fn due(&self, now: Instant, room: usize) -> (Vec<Patch>, Option<Instant>) {
        let (mut due, mut next) = (Vec::new(), None::<Instant>);
        for (key, page) in self.lock().iter_mut() {
            if page.patching || page.mark.says(page.wanted) {
                continue;
            }
            match page.not_before.filter(|at| *at > now) {
                Some(at) => next = Some(next.map_or(at, |next| next.min(at))),
                None if due.len() < room => {
                    page.patching = true;
                    due.push(Patch {
                        key: key.clone(),
                        pod: page.api.clone(),
                        enrolled: page.wanted,
                    });
                }
                None => {}
            }
        }
        (due, next)
    }

    /// A patch has ended.
    pub(super) fn patched(&self, patch: &Patch, result: Patched, now: Instant) {
        let mut pages = self.lock();
        let Some(page) = pages.get_mut(&patch.key).filter(|page| page.api == patch.pod) else {
            return;
        };
        page.patching = false;
        match result {
            Patched::Done(version) => {
                page.pause.reset();
                page.not_before = None;
                if version >= page.version {
                    page.version = version;
                    page.mark = if patch.enrolled {
                        Mark::Enabled
                    } else {
                        Mark::Absent
                    };
                }
                page.tell_written();
            }
            // The watch is about to tell; if it does not, it was something else.
            Patched::Gone => page.not_before = Some(now + self.retry.1),
            Patched::Failed(wait) => {
                page.not_before = Some(now + page.pause.next().max(wait.unwrap_or_default()));
            }
        }
    }

    /// Waits until something may be due.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// How a pod stands.
    pub(super) fn reported(&self, key: &PodUid, report: &Arc<PodReport>, now: Instant) {
        let mut pages = self.lock();
        let Some(page) = pages.get_mut(key) else { return };
        if report.standing == Standing::Enrolled
            && let Posing::Named(owner) = &page.posing
        {
            page.posing = Posing::Enrolled(owner.clone());
        }
        if page.ignored.0 != report.ignored {
            page.ignored = (report.ignored.clone(), report.ignored.is_empty());
        }
        let wrong = matches!(report.standing, Standing::Broken | Standing::Pending);
        page.trouble = match page.trouble.take().filter(|_| wrong) {
            Some(trouble) if trouble.report.reason == report.reason => Some(Trouble {
                report: Arc::clone(report),
                ..trouble
            }),
            old if wrong => Some(Trouble {
                report: Arc::clone(report),
                // A pod that goes from one reason to the next has been out of the mesh all the time.
                since: old.map_or(now, |old| old.since),
                told: false,
            }),
            _ => None,
        };
    }

    /// Pods that are not as they should be, each reason once: an ADD that was refused at once, a running pod only
    /// after `patience`, since most troubles are over before anybody could read of them.
    pub(super) fn untold(&self, now: Instant, patience: Duration) -> Vec<(PodRef, Arc<PodReport>)> {
        let mut untold = Vec::new();
        for page in self.lock().values_mut() {
            let Some(trouble) = page.trouble.as_mut().filter(|trouble| !trouble.told) else {
                continue;
            };
            let due = if page.running {
                now >= trouble.since + patience
            } else {
                trouble.report.standing == Standing::Broken
            };
            if due {
                trouble.told = true;
                untold.push((page.api.clone(), Arc::clone(&trouble.report)));
            }
        }
        untold
    }

    /// Annotations of pods that are not taken, each once.
    pub(super) fn ignored(&self) -> Vec<(PodRef, String)> {
        let mut ignored = Vec::new();
        for page in self.lock().values_mut() {
            if !std::mem::replace(&mut page.ignored.1, true) {
                ignored.push((page.api.clone(), page.ignored.0.clone()));
            }
        }
        ignored
    }

    /// Enrolled pods that have a name of the agent's own but do not belong to it, each once.
    pub(super) fn posing(&self, ours: impl Fn(Option<&Owner>) -> bool) -> Vec<PodRef> {
        let mut posing = Vec::new();
        for page in self.lock().values_mut() {
            if let Posing::Enrolled(owner) = &page.posing {
                if !ours(owner.as_ref()) {
                    posing.push(page.api.clone());
                }
                page.posing = Posing::No;
            }
        }
        posing
    }
}

#[cfg(test)]
mod tests;

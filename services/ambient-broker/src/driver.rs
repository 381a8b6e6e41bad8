//! Runs the state machine: one task takes facts in, one at a time, and starts what the machine wants done. No
//! effect is waited for here; each reports back with a fact.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sluice_proto::code::ErrorCode;
use sluice_proto::id::{Namespace, PodName, PodRef};
use sluice_proto::sandbox::Failure;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::executor::Executor;
use crate::metrics::Metrics;
use crate::reconcile::effect::Level;
use crate::reconcile::event::SandboxId;
use crate::reconcile::{COMPONENT, Counts, Effect, Event, Explanation, Settings, State};
use crate::registry::Registry;
use crate::source::PodSource;
use crate::status::StatusWriter;
use crate::zds::{Workload, Zds};

/// The loop shows that it lives at least this often.
const BEAT: Duration = Duration::from_secs(1);

/// A question to the loop.
#[derive(Debug)]
pub enum Query {
    /// Everything about one pod.
    Explain {
        /// Its namespace.
        namespace: Namespace,
        /// Its name.
        name: PodName,
        /// `None`: no such pod.
        reply: oneshot::Sender<Option<Box<Explanation>>>,
    },
    /// Where the pods stand.
    Counts(oneshot::Sender<Overview>),
}

/// The state as a whole.
#[derive(Debug, Clone, Copy)]
pub struct Overview {
    /// Where the pods stand.
    pub counts: Counts,
    /// ADDs that wait for a verdict.
    pub adding: usize,
    /// The source has been told in full.
    pub synced: bool,
    /// ZDS snapshots may be ended.
    pub zds_open: bool,
}

/// When the loop was last seen alive.
#[derive(Debug, Clone)]
pub struct Beat {
    started: Instant,
    millis: Arc<AtomicU64>,
}

impl Default for Beat {
    fn default() -> Self {
        Self {
            started: Instant::now(),
            millis: Arc::default(),
        }
    }
}

impl Beat {
    /// Of a loop that turned last so long ago.
    #[cfg(test)]
    pub(crate) fn of_age(age: Duration) -> Self {
        Self {
            started: Instant::now().checked_sub(age).unwrap(),
            millis: Arc::default(),
        }
    }

    fn now(&self) {
        let millis = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.millis.store(millis, Ordering::Relaxed);
    }

    /// How long ago.
    pub fn age(&self) -> Duration {
        let last = Duration::from_millis(self.millis.load(Ordering::Relaxed));
        self.started.elapsed().saturating_sub(last)
    }
}

/// What carries effects out.
#[derive(Debug, Clone)]
pub struct Parts {
    /// Mechanism.
    pub executor: Executor,
    /// ztunnel.
    pub zds: Zds,
    /// Where pods come from.
    pub source: Arc<dyn PodSource>,
    /// Where enrolment is made known.
    pub status: Arc<dyn StatusWriter>,
    /// Who may look.
    pub registry: Registry,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// The sign of life.
    pub beat: Beat,
}

/// The loop.
#[derive(Debug)]
pub struct Driver {
    state: State,
    parts: Parts,
    events: mpsc::UnboundedSender<Event>,
    inbox: mpsc::UnboundedReceiver<Event>,
    queries: mpsc::Receiver<Query>,
    held: Held,
}

impl Driver {
    /// A loop that knows nothing yet. `events` must be the other end of `inbox`.
    pub fn new(
        settings: Settings,
        selection: sluice_selection::SelectionConfig,
        parts: Parts,
        events: mpsc::UnboundedSender<Event>,
        inbox: mpsc::UnboundedReceiver<Event>,
        queries: mpsc::Receiver<Query>,
    ) -> Self {
        Self {
            state: State::new(settings, selection, Instant::now()),
            parts,
            events,
            inbox,
            queries,
            held: Held::default(),
        }
    }

    /// Runs until `stop` is cancelled.
    pub async fn run(mut self, stop: CancellationToken) {
        loop {
            self.parts.beat.now();
            let beat = Instant::now() + BEAT;
            let wake = self.state.wake().map_or(beat, |wake| wake.min(beat));
            let event = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                event = self.inbox.recv() => match event {
                    Some(event) => event,
                    None => return,
                },
                Some(query) = self.queries.recv() => {
                    self.answer(query);
                    continue;
                }
                () = tokio::time::sleep_until(wake.into()) => Event::Tick,
            };
            self.handle(event);
        }
    }

    fn handle(&mut self, event: Event) {
        let started = Instant::now();
        self.parts.metrics.event(&event);
        let effects = self.state.handle(started, event);
        for effect in effects {
            self.perform(effect);
        }
        self.parts.metrics.reconciled(started.elapsed());
    }

    fn answer(&self, query: Query) {
        match query {
            Query::Explain {
                namespace,
                name,
                reply,
            } => {
                let _ = reply.send(self.state.explain(&namespace, &name).map(Box::new));
            }
            Query::Counts(reply) => {
                let _ = reply.send(Overview {
                    counts: self.state.counts(),
                    adding: self.state.adding(),
                    synced: self.state.synced(),
                    zds_open: self.state.zds_open(),
                });
            }
        }
    }

    fn perform(&self, effect: Effect) {
        let parts = &self.parts;
        match effect {
            Effect::ZdsOffer {
                pod,
                epoch,
                held,
                info,
                to,
            } => {
                let Some(netns) = self.held.get(&held) else {
                    tracing::error!(pod_uid = %pod, sandbox = %held, "descriptor to offer is not held");
                    return;
                };
                parts.zds.offer(Workload::new(pod, epoch, &info, netns), to);
            }
            Effect::ZdsWithdraw { pod, epoch } => parts.zds.withdraw(&pod, epoch),
            Effect::ZdsOpen => parts.zds.open(),
            Effect::DropDescriptor(id) => self.held.remove(&id),
            Effect::Publish { pod, report } => {
                parts.status.report(&pod, report.as_ref());
                parts.registry.publish(&pod, report);
            }
            Effect::Timed { stage, elapsed } => parts.metrics.stage(stage, elapsed),
            Effect::Log {
                level,
                pod,
                message,
                details,
            } => log(level, &pod, message, &details),
            Effect::WriteStatus { pod, enrolled } => {
                let written = parts.status.write(&pod, enrolled);
                // What is withdrawn is no step of an ADD.
                if let Some(written) = written.filter(|_| enrolled) {
                    let metrics = Arc::clone(&parts.metrics);
                    let since = Instant::now();
                    tokio::spawn(async move {
                        if written.await.is_ok() {
                            metrics.stage("status", since.elapsed());
                        }
                    });
                }
            }
            call => self.call(call),
        }
    }

    /// Effects that wait for somebody: each has a task of its own and always reports back.
    fn call(&self, effect: Effect) {
        let events = self.events.clone();
        let (executor, source) = (self.parts.executor.clone(), self.parts.source.clone());
        let held = self.held.clone();
        tokio::spawn(async move {
            let event = match effect {
                Effect::Lookup(pod) => {
                    let found = source.lookup(pod.namespace.as_str(), pod.name.as_str()).await;
                    let found = found.map_err(|error| sluice_runtime::telemetry::chain(&error));
                    Event::LookedUp { pod, found }
                }
                Effect::Program { id, pod, desired } => {
                    let result = executor.program(&id, &pod, &desired).await;
                    Event::Programmed {
                        id,
                        pod,
                        desired,
                        result,
                    }
                }
                Effect::FetchDescriptor { id, pod, netns } => {
                    let fetched = executor.fetch(&id, &netns).await;
                    let result = fetched.map(|descriptor| held.insert(id.clone(), descriptor));
                    Event::Fetched { id, pod, result }
                }
                Effect::OfferDescriptor { id, pod, held: key } => {
                    let result = match held.get(&key) {
                        Some(netns) => executor.offer(&id, netns).await,
                        None => Err(not_held()),
                    };
                    Event::DescriptorOffered { id, pod, result }
                }
                Effect::Inspect { id, pod } => {
                    let found = executor.inspect(&id).await;
                    let result = found.map(|inspection| inspection.redirected_connections);
                    Event::Inspected { id, pod, result }
                }
                Effect::Complete { id, pod, verdict } => {
                    let result = executor.complete(&id, &verdict).await;
                    Event::Completed { id, pod, result }
                }
                Effect::Adopt { pod, addresses } => {
                    let result = executor.adopt(&pod, &addresses).await.map(Box::new);
                    Event::Adopted { pod: pod.uid, result }
                }
                Effect::LetGo { id, pod } => {
                    let result = executor.pod_gone(&id, &pod).await;
                    Event::LetGo { id, pod, result }
                }
                Effect::SyncProbes { add, remove, prune } => {
                    Event::ProbesSynced(executor.sync_probes(&add, &remove, prune).await)
                }
                Effect::Foresee { call, decided, ask } => {
                    let result = executor.foresee(&decided, &ask).await;
                    Event::Foreseen { call, result }
                }
                _ => return,
            };
            let _ = events.send(event);
        });
    }
}

/// Netns descriptors held, one a sandbox. Clones share them.
#[derive(Debug, Clone, Default)]
struct Held(Arc<Mutex<HashMap<SandboxId, Arc<OwnedFd>>>>);

impl Held {
    fn get(&self, id: &SandboxId) -> Option<Arc<OwnedFd>> {
        self.lock().get(id).cloned()
    }

    fn insert(&self, id: SandboxId, netns: OwnedFd) {
        self.lock().insert(id, Arc::new(netns));
    }

    fn remove(&self, id: &SandboxId) {
        self.lock().remove(id);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<SandboxId, Arc<OwnedFd>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn not_held() -> Failure {
    Failure::new(
        ErrorCode::BrokerState,
        COMPONENT,
        "offer descriptor",
        "the descriptor is not held",
    )
}

fn log(level: Level, pod: &PodRef, message: &'static str, details: &str) {
    let (namespace, name, uid) = (pod.namespace.as_str(), pod.name.as_str(), pod.uid.as_str());
    match level {
        Level::Info => tracing::info!(namespace, pod = name, pod_uid = uid, details, "{message}"),
        Level::Warn => tracing::warn!(namespace, pod = name, pod_uid = uid, details, "{message}"),
    }
}

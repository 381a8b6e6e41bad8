//! What node-local tools may see: the last report of every pod, and those who want to hear of changes.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use sluice_proto::id::{PodRef, PodUid};
use sluice_proto::pb::executor::SnapshotDone;
use sluice_proto::pb::types;
use sluice_proto::pb::workload::{Pod, PodEvent, PodState, StageTiming, pod_event};
use sluice_proto::sandbox::Failure;
use tokio::sync::{Notify, mpsc};

use crate::handoff::not_handed_over;
use crate::reconcile::report::{PodReport, Standing};

/// Changes that may wait for one subscriber; whoever is slower is cut off and lists again.
const BACKLOG: usize = 1024;

/// The reports. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Registry {
    shared: Arc<Mutex<Shared>>,
    handoffs_changed: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Shared {
    reports: HashMap<PodUid, Arc<PodReport>>,
    /// Mesh pods that no proxy has, and why.
    missing: BTreeMap<PodUid, Failure>,
    subscribers: Vec<mpsc::Sender<PodEvent>>,
}

/// A subscription: the pods as they are, then changes. Ends when the subscriber is too slow.
#[derive(Debug)]
pub struct Subscription {
    snapshot: VecDeque<Arc<PodReport>>,
    listed: bool,
    changes: mpsc::Receiver<PodEvent>,
}

impl Registry {
    /// Takes over a pod's report, or that the pod is gone.
    pub fn publish(&self, pod: &PodRef, report: Option<Arc<PodReport>>) {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        // An ADD that goes well wakes nobody up here, however many pods there are.
        let missing = report.as_deref().and_then(not_handed_over);
        if missing.as_ref() != shared.missing.get(&pod.uid) {
            match missing {
                Some(failure) => shared.missing.insert(pod.uid.clone(), failure),
                None => shared.missing.remove(&pod.uid),
            };
            self.handoffs_changed.notify_one();
        }
        let event = if let Some(report) = report {
            let heard = !shared.subscribers.is_empty();
            let event = heard.then(|| pod_event::Event::Changed(to_pb(&report)));
            shared.reports.insert(pod.uid.clone(), report);
            event
        } else {
            shared.reports.remove(&pod.uid);
            Some(pod_event::Event::Gone(pod.into()))
        };
        if let Some(event) = event {
            let event = PodEvent { event: Some(event) };
            shared
                .subscribers
                .retain(|subscriber| subscriber.try_send(event.clone()).is_ok());
        }
    }

    /// Starts a subscription.
    pub fn subscribe(&self) -> Subscription {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        let (sender, changes) = mpsc::channel(BACKLOG);
        shared.subscribers.retain(|subscriber| !subscriber.is_closed());
        shared.subscribers.push(sender);
        Subscription {
            snapshot: shared.reports.values().cloned().collect(),
            listed: false,
            changes,
        }
    }

    /// Mesh pods that no proxy has, and why.
    pub(crate) fn missing_handoffs(&self) -> BTreeMap<PodUid, Failure> {
        let shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.missing.clone()
    }

    /// Waits until these have changed since the last call. For one caller.
    pub(crate) async fn handoffs_changed(&self) {
        self.handoffs_changed.notified().await;
    }

    /// One pod's report.
    pub fn report(&self, uid: &PodUid) -> Option<Arc<PodReport>> {
        let shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.reports.get(uid).cloned()
    }

    /// All reports.
    pub fn reports(&self) -> Vec<Arc<PodReport>> {
        let shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.reports.values().cloned().collect()
    }
}

impl Subscription {
    /// The next event; `None`: the subscriber was too slow.
    pub async fn next(&mut self) -> Option<PodEvent> {
        let event = match self.snapshot.pop_front() {
            Some(report) => pod_event::Event::Present(to_pb(&report)),
            None if !self.listed => {
                self.listed = true;
                self.snapshot.shrink_to_fit();
                pod_event::Event::SnapshotDone(SnapshotDone {})
            }
            None => return self.changes.recv().await,
        };
        Some(PodEvent { event: Some(event) })
    }
}

/// A report as a message.
pub fn to_pb(report: &PodReport) -> Pod {
    let micros = |elapsed: std::time::Duration| u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
    Pod {
        pod: Some(types::PodRef::from(&report.pod)),
        state: match report.standing {
            Standing::Out => PodState::Out,
            Standing::Pending => PodState::Pending,
            Standing::Enrolled => PodState::Enrolled,
            Standing::Broken => PodState::Broken,
            Standing::Draining => PodState::Draining,
        }
        .into(),
        verdict: report.verdict.clone(),
        reason: report.reason.to_owned(),
        last_error: report
            .last_error
            .as_ref()
            .map(ToString::to_string)
            .unwrap_or_default(),
        netns: report.netns.as_ref().map(Into::into),
        addresses: report.addresses.iter().map(ToString::to_string).collect(),
        timings: report
            .timings
            .iter()
            .map(|(stage, elapsed)| StageTiming {
                stage: (*stage).to_owned(),
                microseconds: micros(*elapsed),
            })
            .collect(),
        zds_connection: report.acked.map_or(0, |(connection, _)| connection.0),
        acked_unix_ms: report.acked.map_or(0, |(_, at)| at),
        retries: report.retries,
        rules_version: report.rules_version.clone(),
        ignored_annotations: report.ignored.clone(),
    }
}

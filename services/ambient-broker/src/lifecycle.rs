//! `NodeLifecycle`: what the installer needs to know of the cluster and of us. It has no API token of its own.
//!
//! Its stream begins with the state as it is and ends with a `final` one, found out after we were asked to stop.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::Stream;
use futures_util::future::BoxFuture;
use sluice_proto::pb::node::node_lifecycle_server::{NodeLifecycle, NodeLifecycleServer};
use sluice_proto::pb::node::{
    InstallerReport, Lifecycle as PbLifecycle, NodeState, PluginCredentials, ReportResponse, WatchRequest,
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::health::Health;

/// A change is told this late at most.
const LOOK: Duration = Duration::from_millis(200);
/// An installer that is not ready for so long at the start is not just starting.
const STARTING: Duration = Duration::from_secs(5);

/// Whether the node agent is meant to stay on this node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Fate {
    /// Nobody can say; everything stays where it is.
    #[default]
    Unknown,
    /// Upgrade, restart or reboot: everything stays where it is.
    Keep,
    /// The agent is not wanted here any more.
    Remove,
}

impl Fate {
    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Keep => "keep",
            Self::Remove => "remove",
        }
    }
}

/// A fate and what was observed that led to it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Lifecycle {
    /// The fate.
    pub fate: Fate,
    /// As a sentence.
    pub reason: String,
}

/// Who knows of the cluster.
pub trait NodeFacts: fmt::Debug + Send + Sync {
    /// What was observed last.
    fn lifecycle(&self) -> Lifecycle;
    /// For the plugin; `None`: none were issued yet.
    fn credentials(&self) -> Option<PluginCredentials>;
    /// Looks once more, within 2 s.
    fn last_look(&self) -> BoxFuture<'_, Lifecycle>;
    /// Takes the status of every pod of this node back, for good; done once that is written.
    fn withdraw(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }
    /// The installer is not ready, and is not just starting: tells people why. Must not block.
    fn installer_failed(&self, problem: &str) {
        let _ = problem;
    }
}

/// The server. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    facts: Arc<dyn NodeFacts>,
    health: Health,
    agent: String,
    last: Arc<watch::Sender<Option<NodeState>>>,
}

impl Node {
    /// `agent` is the name of the pod that we are a part of.
    pub(crate) fn new(facts: Arc<dyn NodeFacts>, health: Health, agent: String) -> Self {
        Self {
            facts,
            health,
            agent,
            last: Arc::new(watch::Sender::new(None)),
        }
    }

    /// The service.
    pub(crate) fn server(&self) -> NodeLifecycleServer<Self> {
        NodeLifecycleServer::new(self.clone())
    }

    /// Waits until `stop`, then finds out the last word and tells it.
    pub(crate) async fn conclude(self, stop: CancellationToken) {
        stop.cancelled().await;
        let lifecycle = self.facts.last_look().await;
        tracing::info!(
            fate = lifecycle.fate.as_str(),
            reason = lifecycle.reason,
            "last look at the lifecycle"
        );
        let state = NodeState {
            r#final: true,
            ..self.state(lifecycle)
        };
        self.last.send_replace(Some(state));
    }

    /// Tells people what keeps the installer from being ready for the first time, as a probe of its own would; from then on
    /// [`NodeLifecycle::report`] does.
    pub(crate) async fn complain(self, stop: CancellationToken) {
        let mut told = String::new();
        let mut look =
            tokio::time::interval_at(tokio::time::Instant::now() + STARTING, Duration::from_secs(1));
        loop {
            tokio::select! {
                _ = look.tick() => {}
                () = stop.cancelled() => return,
            }
            let problem = match self.health.installer() {
                Some(report) if report.ready => return,
                Some(report) => report.problem,
                None => "it has not reported yet".to_owned(),
            };
            if problem != told {
                self.facts.installer_failed(&problem);
                told = problem;
            }
        }
    }

    /// The cluster.
    pub(crate) fn facts(&self) -> &dyn NodeFacts {
        &*self.facts
    }

    /// What was found out after we were asked to stop.
    pub(crate) async fn last_word(&self) -> Fate {
        let mut last = self.last.subscribe();
        // The sender lives in `self`, so there is no error.
        let word = last.wait_for(Option::is_some).await;
        match word
            .ok()
            .and_then(|state| state.as_ref().map(NodeState::lifecycle))
        {
            Some(PbLifecycle::Remove) => Fate::Remove,
            Some(PbLifecycle::Keep) => Fate::Keep,
            Some(PbLifecycle::Unspecified) | None => Fate::Unknown,
        }
    }

    fn state(&self, lifecycle: Lifecycle) -> NodeState {
        let missing = self.health.cannot_serve_because();
        let fate = match lifecycle.fate {
            Fate::Unknown => PbLifecycle::Unspecified,
            Fate::Keep => PbLifecycle::Keep,
            Fate::Remove => PbLifecycle::Remove,
        };
        NodeState {
            can_serve: missing.is_empty(),
            why_not: missing.join("; "),
            lifecycle: fate.into(),
            lifecycle_reason: lifecycle.reason,
            credentials: self.facts.credentials(),
            r#final: false,
            agent: self.agent.clone(),
        }
    }
}

type States = Pin<Box<dyn Stream<Item = Result<NodeState, Status>> + Send>>;

#[tonic::async_trait]
impl NodeLifecycle for Node {
    type WatchStream = States;

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<States>, Status> {
        let watcher = (self.clone(), self.last.subscribe(), None::<NodeState>);
        let states = futures_util::stream::unfold(watcher, |(node, mut last, told)| async move {
            if told.as_ref().is_some_and(|told| told.r#final) {
                return None;
            }
            loop {
                let concluded = last.borrow_and_update().clone();
                let state = concluded.unwrap_or_else(|| node.state(node.facts.lifecycle()));
                if told.as_ref() != Some(&state) {
                    return Some((Ok(state.clone()), (node, last, Some(state))));
                }
                // The sender lives in `node`, so there is no error.
                let _ = tokio::time::timeout(LOOK, last.changed()).await;
            }
        });
        Ok(Response::new(Box::pin(states)))
    }

    async fn report(&self, request: Request<InstallerReport>) -> Result<Response<ReportResponse>, Status> {
        let report = request.into_inner();
        let (ready, mode) = (report.ready, report.mode.as_str());
        let (file, problem) = (report.effective_file.as_str(), report.problem.as_str());
        // Another try that failed the same way is only counted.
        let uncounted = |report: &InstallerReport| InstallerReport {
            installs: None,
            ..report.clone()
        };
        let before = self.health.installer();
        if before.as_ref().is_some_and(|before| before.ready) && !ready {
            self.facts.installer_failed(problem);
        }
        if before.as_ref().map(uncounted) != Some(uncounted(&report)) {
            tracing::info!(
                ready,
                mode,
                file,
                problem,
                repairs = report.repairs,
                "installer reports"
            );
        }
        self.health.set_installer(report);
        Ok(Response::new(ReportResponse {}))
    }
}

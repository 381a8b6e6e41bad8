//! Everything that is asked of the Kubernetes API, and nothing else: pods and namespaces as the broker's source, the
//! status annotation, Events, the agent's own DaemonSet, and the token for the plugin.
//!
//! Decides nothing about the mesh and needs no privilege but its ServiceAccount's roles. What it asks for is exactly
//! what the chart's roles allow; `tests/cluster_api.rs` derives them from its requests.

mod access;
mod annotation;
mod book;
mod client;
mod credentials;
mod daemon_set;
mod events;
mod failure;
mod guard;
mod mirror;
mod node_affinity;
mod notes;
mod pause;
mod retire;
mod source;
mod troubles;
mod watch;
mod wire;

use std::sync::{Arc, Mutex};
use std::time::Instant;

use futures_util::future::BoxFuture;
use sluice_proto::id::{PodName, PodRef};
use sluice_proto::pb::node::PluginCredentials;
use sluice_selection::OwnPods;
use tokio::sync::oneshot;
use tokio::sync::watch as state;
use tokio::task::JoinSet;

pub use access::{Access, ConnectError, SERVICE_ACCOUNT};
pub use client::Timing;
pub use failure::{ApiError, Kind};
pub use retire::{RetireError, Retired, retire};

use crate::lifecycle::{Lifecycle, NodeFacts};
use crate::reconcile::report::PodReport;
use crate::status::StatusWriter;
use book::Book;
use client::Api;
use credentials::Credentials;
use daemon_set::{Known, Own};
use events::Recorder;
use mirror::Found;
use wire::WirePod;

/// Who we are in the cluster.
#[derive(Debug, Clone)]
pub struct Settings {
    /// How the API server is reached.
    pub access: Access,
    /// The node's name, as pods name it in `spec.nodeName`.
    pub node: String,
    /// Our own pod.
    pub pod: PodName,
    /// The DaemonSet we belong to, and its namespace.
    pub own: OwnPods,
    /// The ServiceAccount in that namespace that the plugin's token is of.
    pub plugin_service_account: String,
    /// How long things may take.
    pub timing: Timing,
}

/// The Kubernetes API as the broker uses it. Clones share everything; with the last one all tasks end.
#[derive(Debug, Clone)]
pub struct Kubernetes {
    api: Api,
    settings: Arc<Settings>,
    book: Book,
    recorder: Recorder,
    found: Arc<Mutex<Vec<Found>>>,
    own: Own,
    known: state::Receiver<Known>,
    credentials: state::Receiver<Option<Credentials>>,
    _tasks: Arc<JoinSet<()>>,
}

impl Kubernetes {
    /// Sets everything up. The API server need not be there. Call it inside a tokio runtime.
    pub async fn new(settings: Settings) -> Result<Self, ConnectError> {
        let api = Api::new(&settings.access, settings.timing.clone()).await?;
        let book = Book::new(settings.timing.retry);
        let (recorder, queue) = Recorder::new();
        let own = Own {
            namespace: settings.own.namespace.clone(),
            name: settings.own.daemon_set.clone(),
            node: settings.node.clone(),
        };
        let (knows, known) = state::channel(Known::default());
        let (issues, credentials) = state::channel(None);
        let account = (
            settings.own.namespace.clone(),
            settings.plugin_service_account.clone(),
        );
        let mut tasks = JoinSet::new();
        tasks.spawn(annotation::write(api.clone(), book.clone()));
        tasks.spawn(events::write(api.clone(), queue, settings.pod.to_string()));
        tasks.spawn(own.clone().watch(api.clone(), knows));
        tasks.spawn(credentials::renew(api.clone(), account, issues));
        tasks.spawn(notes::take(
            book.clone(),
            recorder.clone(),
            known.clone(),
            settings.own.clone(),
        ));
        tracing::info!(server = api.server, node = settings.node, "Kubernetes API");
        Ok(Self {
            api,
            settings: Arc::new(settings),
            book,
            recorder,
            found: Arc::default(),
            own,
            known,
            credentials,
            _tasks: Arc::new(tasks),
        })
    }

    /// The API has this pod of our node.
    fn seen(&self, pod: &WirePod) {
        let id = &pod.pod.id;
        let agent = self
            .settings
            .own
            .contains(id.namespace.as_str(), id.name.as_str());
        if self.book.seen(pod, agent) {
            self.recorder.record(notes::not_a_setting(id));
        }
    }
}

impl StatusWriter for Kubernetes {
    fn write(&self, pod: &PodRef, enrolled: bool) -> Option<oneshot::Receiver<()>> {
        if !self.book.want(&pod.uid, enrolled) {
            tracing::debug!(%pod, enrolled, "no pod of this node to write a status to");
            return None;
        }
        self.book.written(&pod.uid)
    }

    fn report(&self, pod: &PodRef, report: Option<&Arc<PodReport>>) {
        if let Some(report) = report {
            self.book.reported(&pod.uid, report, Instant::now());
        }
    }
}

impl NodeFacts for Kubernetes {
    fn lifecycle(&self) -> Lifecycle {
        self.known.borrow().lifecycle.clone()
    }

    fn credentials(&self) -> Option<PluginCredentials> {
        self.credentials.borrow().as_ref().map(Credentials::to_pb)
    }

    fn withdraw(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.book.withdraw())
    }

    fn installer_failed(&self, problem: &str) {
        let own = &self.settings;
        if let Some(pod) = self.book.named(&own.own.namespace, own.pod.as_str()) {
            self.recorder.record(notes::installer_not_ready(pod, problem));
        }
    }

    fn last_look(&self) -> BoxFuture<'_, Lifecycle> {
        let known = self.known.borrow().clone();
        Box::pin(async move { self.own.last_look(&self.api, &known).await })
    }
}

//! The broker, as far as the installer has to do with it: what it says of the node, and what it is told.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sluice_proto::broker::{self, BrokerError};
use sluice_proto::pb::node::node_lifecycle_client::NodeLifecycleClient;
use sluice_proto::pb::node::{InstallerReport, Lifecycle, NodeState, WatchRequest};
use sluice_proto::transport::grpc::{UdsChannel, origin};
use sluice_runtime::redial::Redial;
use sluice_runtime::telemetry::chain;
use tokio::sync::watch;
use tonic::Code;

use crate::kubeconfig::Credentials;

/// The longest pause between attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Connecting and reporting take at most this long.
const ANSWER: Duration = Duration::from_secs(5);

type Client = NodeLifecycleClient<UdsChannel>;

/// What is known from the broker.
#[derive(Debug, Clone, PartialEq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "facts that do not exclude each other"
)]
pub(crate) struct View {
    pub(crate) connected: bool,
    pub(crate) can_serve: bool,
    /// It could at some time since we started.
    pub(crate) could_serve: bool,
    pub(crate) why_not: String,
    pub(crate) lifecycle: Lifecycle,
    pub(crate) lifecycle_reason: String,
    pub(crate) credentials: Option<Credentials>,
    /// The lifecycle is the last word of our own agent's broker, which is stopping; it has not come back since.
    pub(crate) last_word: bool,
    /// Who said something last is the broker of the next agent.
    pub(crate) of_another_agent: bool,
}

impl Default for View {
    fn default() -> Self {
        Self {
            connected: false,
            can_serve: false,
            could_serve: false,
            why_not: "the broker has not been reached yet".to_owned(),
            lifecycle: Lifecycle::Unspecified,
            lifecycle_reason: String::new(),
            credentials: None,
            last_word: false,
            of_another_agent: false,
        }
    }
}

impl View {
    /// What a broker says to an installer of `agent`.
    fn hear(&mut self, agent: &str, state: NodeState) {
        self.connected = true;
        self.can_serve = state.can_serve;
        self.could_serve |= state.can_serve;
        self.of_another_agent = state.agent != agent;
        if !(self.of_another_agent && self.last_word) {
            self.lifecycle = state.lifecycle();
            state.lifecycle_reason.clone_into(&mut self.lifecycle_reason);
            self.last_word = state.r#final;
        }
        self.why_not = state.why_not;
        if state.r#final {
            let lifecycle = self.lifecycle.as_str_name();
            tracing::info!(
                lifecycle,
                reason = self.lifecycle_reason,
                "the broker is stopping"
            );
        }
        // Credentials that were given stay good until they expire, whatever the broker lacks now.
        match state.credentials.map(Credentials::try_from) {
            Some(Ok(credentials)) => self.credentials = Some(credentials),
            Some(Err(error)) => tracing::error!(%error, "credentials of the broker cannot be used"),
            None => {}
        }
    }

    /// True if that is news.
    fn lose(&mut self, error: &BrokerError) -> bool {
        let why_not = chain(error);
        let news = self.connected || self.can_serve || self.why_not != why_not;
        self.connected = false;
        self.can_serve = false;
        self.why_not = why_not;
        news
    }
}

/// Follows the broker at `path`, whoever it is, until dropped; `agent` is ours.
pub(crate) async fn follow(
    path: PathBuf,
    agent: String,
    view: watch::Sender<View>,
    mut reports: watch::Receiver<InstallerReport>,
) {
    let mut redial = Redial::new(LONGEST_PAUSE);
    loop {
        let heard = follow_one(&path, &agent, &view, &mut reports).await;
        let (progress, error) = heard;
        if progress {
            redial.reset();
        }
        tracing::debug!(error = chain(&error), "lost the broker");
        view.send_if_modified(|view| view.lose(&error));
        tokio::time::sleep(redial.failed(Instant::now())).await;
    }
}

/// Follows one connection to its end. Whether anything was heard, and why it ended.
async fn follow_one(
    path: &Path,
    agent: &str,
    view: &watch::Sender<View>,
    reports: &mut watch::Receiver<InstallerReport>,
) -> (bool, BrokerError) {
    let mut heard = false;
    let mut attempt = async || -> Result<(), BrokerError> {
        let mut client = within(dial(path)).await?;
        let mut states = within(async { Ok(client.watch(WatchRequest {}).await?.into_inner()) }).await?;
        // A new broker has heard nothing yet.
        reports.mark_changed();
        let mut reported = true;
        loop {
            tokio::select! {
                state = states.message() => {
                    let state = state?.ok_or(BrokerError::Closed)?;
                    heard = true;
                    view.send_modify(|view| view.hear(agent, state));
                }
                changed = reports.changed(), if reported => {
                    if changed.is_err() {
                        // Nothing will be reported any more.
                        reported = false;
                        continue;
                    }
                    let report = reports.borrow_and_update().clone();
                    tell(&mut client, report).await?;
                }
            }
        }
    };
    let ended = attempt().await.err().unwrap_or(BrokerError::Closed);
    (heard, ended)
}

async fn tell(client: &mut Client, report: InstallerReport) -> Result<(), BrokerError> {
    match within(async { Ok(client.report(report).await?) }).await {
        Err(BrokerError::Answered(status)) if status.code() == Code::Unimplemented => {
            tracing::debug!("the broker takes no reports; it is of another version");
            Ok(())
        }
        told => told.map(drop),
    }
}

/// What the broker says first; for commands that ask only once.
pub(crate) async fn ask_once(path: &Path) -> Result<View, BrokerError> {
    let mut client = within(dial(path)).await?;
    let mut states = within(async { Ok(client.watch(WatchRequest {}).await?.into_inner()) }).await?;
    let state = within(async { Ok(states.message().await?) })
        .await?
        .ok_or(BrokerError::Closed)?;
    let mut view = View::default();
    let agent = state.agent.clone();
    view.hear(&agent, state);
    Ok(view)
}

async fn dial(path: &Path) -> Result<Client, BrokerError> {
    Ok(Client::with_origin(broker::dial(path).await?, origin()))
}

async fn within<T>(answer: impl Future<Output = Result<T, BrokerError>>) -> Result<T, BrokerError> {
    broker::within(ANSWER, answer).await
}

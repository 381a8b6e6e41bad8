//! The broker, as far as the installer has to do with it: what it says of the node, and what it is told.

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sluice_proto::pb::node::node_lifecycle_client::NodeLifecycleClient;
use sluice_proto::pb::node::{InstallerReport, Lifecycle, NodeState, WatchRequest};
use sluice_proto::transport::grpc::{UdsChannel, origin};
use sluice_runtime::telemetry::chain;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tonic::{Code, Status};

use crate::kubeconfig::Credentials;

/// Pauses between attempts double between these.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
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
    /// This is the last word of a broker that is stopping, and no other broker has said anything since.
    pub(crate) last_word: bool,
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
        }
    }
}

impl View {
    fn hear(&mut self, state: NodeState) {
        self.connected = true;
        self.can_serve = state.can_serve;
        self.could_serve |= state.can_serve;
        self.lifecycle = state.lifecycle();
        self.why_not = state.why_not;
        self.lifecycle_reason = state.lifecycle_reason;
        self.last_word = state.r#final;
        if self.last_word {
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

    fn lose(&mut self, error: &DialError) {
        self.connected = false;
        self.can_serve = false;
        self.why_not = chain(error);
    }
}

/// The broker cannot be asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DialError {
    #[error("cannot reach the broker at {}", path.display())]
    Connect {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} does not speak the broker's protocol", path.display())]
    Handshake {
        path: PathBuf,
        #[source]
        source: hyper::Error,
    },
    #[error("the broker did not answer within {ANSWER:?}")]
    Deadline,
    #[error("the broker answered {}: {}", .0.code(), .0.message())]
    Answered(Box<Status>),
    #[error("the broker closed the connection")]
    Closed,
}

impl From<Status> for DialError {
    fn from(status: Status) -> Self {
        // A status with a cause was made here, from a broken connection.
        if std::error::Error::source(&status).is_some() {
            Self::Closed
        } else {
            Self::Answered(Box::new(status))
        }
    }
}

/// Follows the broker at `path`, whoever it is, until dropped.
pub(crate) async fn follow(
    path: PathBuf,
    view: watch::Sender<View>,
    mut reports: watch::Receiver<InstallerReport>,
) {
    let mut pause = BACKOFF.0;
    loop {
        let heard = follow_one(&path, &view, &mut reports).await;
        let (progress, error) = heard;
        if progress {
            pause = BACKOFF.0;
        }
        tracing::debug!(error = chain(&error), "lost the broker");
        view.send_modify(|view| view.lose(&error));
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(BACKOFF.1);
    }
}

/// Follows one connection to its end. Whether anything was heard, and why it ended.
async fn follow_one(
    path: &Path,
    view: &watch::Sender<View>,
    reports: &mut watch::Receiver<InstallerReport>,
) -> (bool, DialError) {
    let mut heard = false;
    let mut attempt = async || -> Result<(), DialError> {
        let mut client = within(dial(path)).await?;
        let mut states = within(async { Ok(client.watch(WatchRequest {}).await?.into_inner()) }).await?;
        // A new broker has heard nothing yet.
        reports.mark_changed();
        let mut reported = true;
        loop {
            tokio::select! {
                state = states.message() => {
                    let state = state?.ok_or(DialError::Closed)?;
                    heard = true;
                    view.send_modify(|view| view.hear(state));
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
    let ended = attempt().await.err().unwrap_or(DialError::Closed);
    (heard, ended)
}

async fn tell(client: &mut Client, report: InstallerReport) -> Result<(), DialError> {
    match within(async { Ok(client.report(report).await?) }).await {
        Err(DialError::Answered(status)) if status.code() == Code::Unimplemented => {
            tracing::debug!("the broker takes no reports; it is of another version");
            Ok(())
        }
        told => told.map(drop),
    }
}

/// What the broker says first; for commands that ask only once.
pub(crate) async fn ask_once(path: &Path) -> Result<View, DialError> {
    let mut client = within(dial(path)).await?;
    let mut states = within(async { Ok(client.watch(WatchRequest {}).await?.into_inner()) }).await?;
    let state = within(async { Ok(states.message().await?) })
        .await?
        .ok_or(DialError::Closed)?;
    let mut view = View::default();
    view.hear(state);
    Ok(view)
}

async fn dial(path: &Path) -> Result<Client, DialError> {
    let stream = UnixStream::connect(path)
        .await
        .map_err(|source| DialError::Connect {
            path: path.to_owned(),
            source,
        })?;
    let channel = UdsChannel::handshake(stream)
        .await
        .map_err(|source| DialError::Handshake {
            path: path.to_owned(),
            source,
        })?;
    Ok(Client::with_origin(channel, origin()))
}

async fn within<T>(answer: impl Future<Output = Result<T, DialError>>) -> Result<T, DialError> {
    tokio::time::timeout(ANSWER, answer)
        .await
        .map_err(|_| DialError::Deadline)?
}

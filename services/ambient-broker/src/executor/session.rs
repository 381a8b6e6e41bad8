//! The watch on the executor, kept open. A session ends when the watch ends, is silent for too long or overflows; then
//! everything is listed again.

use std::time::{Duration, Instant};

use sluice_proto::pb::executor::netns_executor_client::NetnsExecutorClient;
use sluice_proto::pb::executor::{WatchRequest, sandbox_event};
use sluice_proto::transport::descriptors::TransportError;
use sluice_proto::transport::dial::DialError;
use sluice_proto::transport::grpc::{UdsChannel, origin};
use sluice_runtime::redial::Redial;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::descriptors::Descriptors;
use super::{Executor, Session, convert};
use crate::reconcile::{COMPONENT, Event};

/// The executor sends a heartbeat every 5 s; without any event for this long the session is given up.
const SILENCE: Duration = Duration::from_secs(12);
/// The longest pause between attempts to connect.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
enum SessionError {
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error("cannot connect the descriptor socket")]
    Descriptors(#[source] TransportError),
    #[error("watch failed")]
    Watch(#[source] Box<tonic::Status>),
    #[error("watch ended")]
    Ended,
    #[error("nothing heard for {SILENCE:?}")]
    Silent,
}

impl Executor {
    /// Keeps a session open and reports what it tells, until `stop` is cancelled.
    pub async fn watch(self, events: mpsc::UnboundedSender<Event>, stop: CancellationToken) {
        let mut redial = Redial::new(LONGEST_PAUSE);
        let mut told = false;
        loop {
            let ended = tokio::select! {
                () = stop.cancelled() => return,
                ended = self.session(&events) => ended,
            };
            let (was_there, listed) = {
                let mut link = self.link();
                (link.session.take().is_some(), std::mem::take(&mut link.listed))
            };
            if listed {
                redial.reset();
                told = false;
            }
            // Not at each of many attempts: every pod is looked at then.
            if was_there {
                let _ = events.send(Event::ExecutorDisconnected);
            }
            let error = sluice_runtime::telemetry::chain(&ended);
            if told {
                tracing::debug!(error, "executor not connected");
            } else {
                tracing::warn!(error, "executor not connected");
                told = true;
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(redial.failed(Instant::now())) => {}
            }
        }
    }

    async fn session(&self, events: &mpsc::UnboundedSender<Event>) -> SessionError {
        match self.connect_and_watch(events).await {
            Ok(()) => SessionError::Ended,
            Err(error) => error,
        }
    }

    async fn connect_and_watch(&self, events: &mpsc::UnboundedSender<Event>) -> Result<(), SessionError> {
        let path = self.run.executor_socket();
        let channel = UdsChannel::dial("executor", &path).await?;
        let mut client = NetnsExecutorClient::with_origin(channel, origin());
        let descriptors =
            Descriptors::connect(&self.run.descriptor_socket()).map_err(SessionError::Descriptors)?;
        let id = session_id();
        let request = WatchRequest {
            watcher: format!("{COMPONENT} {}", env!("CARGO_PKG_VERSION")),
            session: id,
            config_hash: self.config_hash.clone(),
            agent: self.agent.clone(),
        };
        self.link().session = Some(Session {
            id,
            client: client.clone(),
            descriptors,
        });
        let status = |status| SessionError::Watch(Box::new(status));
        let mut stream = client.watch(request).await.map_err(status)?.into_inner();
        let _ = events.send(Event::ExecutorConnected);
        self.preflight_once();
        loop {
            let message = tokio::time::timeout(SILENCE, stream.message())
                .await
                .map_err(|_| SessionError::Silent)?
                .map_err(status)?;
            let Some(event) = message.and_then(|message| message.event) else {
                return Ok(());
            };
            self.link().heard = Some(Instant::now());
            if matches!(event, sandbox_event::Event::SnapshotDone(_)) {
                self.link().listed = true;
                tracing::info!("executor connected");
            }
            if let sandbox_event::Event::Repaired(repaired) = &event {
                self.link().repaired += 1;
                tracing::warn!(
                    differences = repaired.differences.join("; "),
                    "executor repaired drift"
                );
            }
            match convert::event(event) {
                Ok(Some(event)) => {
                    let _ = events.send(event);
                }
                Ok(None) => {}
                Err(error) => tracing::warn!(%error, "executor sent a message that is not valid"),
            }
        }
    }

    /// Asks once a session which kernel features are there; readiness depends on it.
    fn preflight_once(&self) {
        let executor = self.clone();
        tokio::spawn(async move {
            let features = executor.preflight().await.map_err(|failure| failure.to_string());
            executor.link().preflight = Some(features);
        });
    }
}

/// Differs from that of every other broker that may watch the same executor.
fn session_id() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id()).max(1)
}

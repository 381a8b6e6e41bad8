//! The executor as seen from here: one gRPC connection, one descriptor socket, and the watch that feeds the
//! state machine. A session ends when the watch ends, is silent for too long or overflows; then everything is
//! listed again. The executor is never dialled by anybody but us, and never dials.

mod convert;
mod descriptors;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sluice_proto::ambient::Desired;
use sluice_proto::code::ErrorCode;
use sluice_proto::id::{PodRef, PodUid};
use sluice_proto::paths::RunDir;
use sluice_proto::pb::executor::netns_executor_client::NetnsExecutorClient;
use sluice_proto::pb::executor::{
    AdoptRequest, CompleteRequest, Feature, ForeseeRequest, Foreseen, InspectRequest, InspectResponse,
    MissingHandoff, NodeStatusRequest, NodeStatusResponse, PodGoneRequest, PreflightRequest, ProbeAddress,
    ProgramRequest, RetireRequest, SyncHandoffsRequest, SyncProbeSetRequest, WatchRequest, adopt_response,
    complete_request, complete_response, program_response, sandbox_event,
};
use sluice_proto::pb::types;
use sluice_proto::sandbox::{Failure, NetnsIdentity};
use sluice_proto::transport::grpc::{UdsChannel, origin};
use sluice_selection::SelectionConfig;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::reconcile::event::{ProbeEntry, Refused, Sandbox, SandboxId, Verdict};
use crate::reconcile::{COMPONENT, Event};
use descriptors::Descriptors;

/// The executor sends a heartbeat every 5 s; without any event for this long the session is given up.
const SILENCE: Duration = Duration::from_secs(12);
/// From here on the silence is worth telling.
const HEARTBEAT: Duration = Duration::from_secs(7);
/// One call, unless it says otherwise.
const CALL: Duration = Duration::from_secs(5);
/// Adoption may scan all of `/proc`.
const ADOPT: Duration = Duration::from_secs(15);
/// The end of all sandboxes.
const RETIRE: Duration = Duration::from_secs(6);
/// Pauses between attempts to connect.
const RECONNECT: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// A connected executor. Clones share the connection.
#[derive(Debug, Clone)]
struct Session {
    /// Tells this watch from any other.
    id: u64,
    client: NetnsExecutorClient<UdsChannel>,
    descriptors: Descriptors,
}

/// The executor, connected or not. Clones share it.
#[derive(Debug, Clone)]
pub struct Executor {
    run: RunDir,
    ipv6: bool,
    config_hash: String,
    state: Arc<Mutex<Link>>,
}

#[derive(Debug, Default)]
struct Link {
    session: Option<Session>,
    listed: bool,
    preflight: Option<Result<Vec<Feature>, String>>,
    /// When the watch told something last; a heartbeat counts.
    heard: Option<Instant>,
    repaired: u64,
}

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
enum SessionError {
    #[error("cannot connect to {}", path.display())]
    Connect {
        path: std::path::PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("HTTP/2 handshake failed")]
    Handshake(#[source] hyper::Error),
    #[error("cannot connect the descriptor socket")]
    Descriptors(#[source] sluice_proto::transport::descriptors::TransportError),
    #[error("watch failed")]
    Watch(#[source] Box<tonic::Status>),
    #[error("watch ended")]
    Ended,
    #[error("nothing heard for {SILENCE:?}")]
    Silent,
}

impl Executor {
    /// The executor of this run directory; not connected yet.
    pub fn new(run: RunDir, selection: &SelectionConfig) -> Self {
        Self {
            run,
            ipv6: selection.ipv6,
            config_hash: selection.hash(),
            state: Arc::default(),
        }
    }

    /// Keeps a session open and reports what it tells, until `stop` is cancelled.
    pub async fn watch(self, events: mpsc::UnboundedSender<Event>, stop: CancellationToken) {
        let mut pause = RECONNECT.0;
        let mut told = false;
        loop {
            let ended = tokio::select! {
                () = stop.cancelled() => return,
                ended = self.session(&events) => ended,
            };
            let listed = {
                let mut link = self.link();
                link.session = None;
                std::mem::take(&mut link.listed)
            };
            if listed {
                pause = RECONNECT.0;
                told = false;
            }
            let _ = events.send(Event::ExecutorDisconnected);
            let error = sluice_runtime::telemetry::chain(&ended);
            if told {
                tracing::debug!(error, "executor not connected");
            } else {
                tracing::warn!(error, "executor not connected");
                told = true;
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
            pause = (pause * 2).min(RECONNECT.1);
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
        let stream = tokio::net::UnixStream::connect(&path)
            .await
            .map_err(|source| SessionError::Connect { path, source })?;
        let channel = UdsChannel::handshake(stream)
            .await
            .map_err(SessionError::Handshake)?;
        let mut client = NetnsExecutorClient::with_origin(channel, origin());
        let descriptors =
            Descriptors::connect(&self.run.descriptor_socket()).map_err(SessionError::Descriptors)?;
        let id = session_id();
        let request = WatchRequest {
            watcher: format!("{COMPONENT} {}", env!("CARGO_PKG_VERSION")),
            session: id,
            config_hash: self.config_hash.clone(),
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

    /// The watch is up and its snapshot complete.
    pub fn is_connected(&self) -> bool {
        self.link().listed
    }

    /// How long the watch has been silent, if that is longer than the executor's heartbeat allows.
    pub fn silence(&self) -> Option<Duration> {
        silence(self.link().heard?, Instant::now())
    }

    /// The last preflight: `None` before the first answer.
    pub fn last_preflight(&self) -> Option<Result<Vec<Feature>, String>> {
        self.link().preflight.clone()
    }

    /// How often drift was repaired in this life.
    pub fn repaired(&self) -> u64 {
        self.link().repaired
    }

    /// Makes a sandbox's namespace match `desired`; returns the fingerprint of its rules.
    pub async fn program(&self, id: &SandboxId, pod: &PodUid, desired: &Desired) -> Result<String, Refused> {
        let stage = "program rules";
        let mut client = self.client(stage).map_err(Refused::Lost)?;
        let request = ProgramRequest {
            attachment: Some((&id.attachment).into()),
            generation: id.generation,
            pod_uid: pod.to_string(),
            desired: Some(desired.into()),
        };
        let response = call(stage, CALL, client.program(request))
            .await
            .map_err(Refused::Lost)?;
        match response.outcome {
            Some(program_response::Outcome::Programmed(programmed)) => Ok(programmed.fingerprint),
            Some(program_response::Outcome::TooLate(_)) => Err(Refused::TooLate),
            Some(program_response::Outcome::Failed(failure)) => Err(Refused::Failed(failure.into())),
            None => Err(Refused::Failed(malformed(stage))),
        }
    }

    /// Tells what is decided about pods without a sandbox, and which have to be asked about.
    pub async fn foresee(&self, decided: &[(PodUid, Desired)], ask: &[PodUid]) -> Result<(), Failure> {
        let stage = "foresee";
        let session = self.link().session.as_ref().map(|s| (s.id, s.client.clone()));
        let (session, mut client) =
            session.ok_or_else(|| unreachable(stage, "the executor is not connected"))?;
        let pb = |(pod, desired): &(PodUid, Desired)| Foreseen {
            pod_uid: pod.to_string(),
            desired: Some(desired.into()),
        };
        let request = ForeseeRequest {
            session,
            decided: decided.iter().map(pb).collect(),
            ask: ask.iter().map(ToString::to_string).collect(),
        };
        call(stage, CALL, client.foresee(request)).await?;
        Ok(())
    }

    /// Ends a pending ADD.
    pub async fn complete(&self, id: &SandboxId, verdict: &Verdict) -> Result<(), Refused> {
        let stage = "complete";
        let mut client = self.client(stage).map_err(Refused::Lost)?;
        let verdict = match verdict {
            Verdict::Pass => complete_request::Verdict::Admit(types::Mode::None.into()),
            Verdict::Ambient => complete_request::Verdict::Admit(types::Mode::Ambient.into()),
            Verdict::Refuse(failure) => complete_request::Verdict::Refuse(failure.into()),
        };
        let request = CompleteRequest {
            attachment: Some((&id.attachment).into()),
            generation: id.generation,
            verdict: Some(verdict),
        };
        let response = call(stage, CALL, client.complete(request))
            .await
            .map_err(Refused::Lost)?;
        match response.outcome {
            Some(complete_response::Outcome::Accepted(_)) => Ok(()),
            Some(complete_response::Outcome::TooLate(_)) => Err(Refused::TooLate),
            Some(complete_response::Outcome::Failed(failure)) => Err(Refused::Failed(failure.into())),
            None => Err(Refused::Failed(malformed(stage))),
        }
    }

    /// Finds the netns of a running pod.
    pub async fn adopt(&self, pod: &PodRef, addresses: &[std::net::IpAddr]) -> Result<Sandbox, Failure> {
        self.adopt_at(pod, addresses, None).await
    }

    /// As [`Executor::adopt`], from a path that the runtime gave.
    pub async fn adopt_at(
        &self,
        pod: &PodRef,
        addresses: &[std::net::IpAddr],
        netns_path: Option<&str>,
    ) -> Result<Sandbox, Failure> {
        let stage = "adopt";
        let mut client = self.client(stage)?;
        let request = AdoptRequest {
            pod: Some(pod.into()),
            addresses: addresses.iter().map(ToString::to_string).collect(),
            netns_path: netns_path.unwrap_or_default().to_owned(),
        };
        let response = call(stage, ADOPT, client.adopt(request)).await?;
        match response.outcome {
            Some(adopt_response::Outcome::Sandbox(sandbox)) => {
                convert::sandbox(sandbox).map_err(|error| invalid(stage, &error))
            }
            Some(adopt_response::Outcome::Failed(failure)) => Err(failure.into()),
            None => Err(malformed(stage)),
        }
    }

    /// Tells that the pod of a sandbox no longer exists; an error says who still has its namespace.
    pub async fn pod_gone(&self, id: &SandboxId, pod: &PodUid) -> Result<(), String> {
        let stage = "let go";
        let mut client = self.client(stage).map_err(|failure| failure.to_string())?;
        let request = PodGoneRequest {
            attachment: Some((&id.attachment).into()),
            generation: id.generation,
            pod_uid: pod.to_string(),
        };
        let response = call(stage, ADOPT, client.pod_gone(request)).await;
        match response.map_err(|failure| failure.to_string())?.held {
            held if held.is_empty() => Ok(()),
            held => Err(held),
        }
    }

    /// Reads a namespace back.
    pub async fn inspect(&self, id: &SandboxId) -> Result<InspectResponse, Failure> {
        let stage = "inspect";
        let mut client = self.client(stage)?;
        let request = InspectRequest {
            attachment: Some((&id.attachment).into()),
        };
        call(stage, CALL, client.inspect(request)).await
    }

    /// Changes the host's probe set.
    pub async fn sync_probes(
        &self,
        add: &[ProbeEntry],
        remove: &[ProbeEntry],
        prune: bool,
    ) -> Result<(), Failure> {
        let stage = "sync probe set";
        let mut client = self.client(stage)?;
        let pb = |entries: &[ProbeEntry]| {
            let address = |entry: &ProbeEntry| ProbeAddress {
                address: entry.address.to_string(),
                owner_uid: entry.owner.to_string(),
            };
            entries.iter().map(address).collect::<Vec<_>>()
        };
        let request = SyncProbeSetRequest {
            addresses: pb(add),
            prune,
            remove: pb(remove),
        };
        let response = call(stage, CALL, client.sync_probe_set(request)).await?;
        response.failed.map_or(Ok(()), |failure| Err(failure.into()))
    }

    /// Tells which mesh pods no proxy has.
    pub async fn sync_handoffs(&self, missing: &BTreeMap<PodUid, Failure>) -> Result<(), Failure> {
        let stage = "sync handoffs";
        let mut client = self.client(stage)?;
        let missing = missing.iter().map(|(pod, failure)| MissingHandoff {
            pod_uid: pod.to_string(),
            failure: Some(failure.into()),
        });
        let request = SyncHandoffsRequest {
            missing: missing.collect(),
        };
        call(stage, CALL, client.sync_handoffs(request)).await.map(drop)
    }

    /// The agent leaves the node: everything that was programmed goes. Returns how many sandboxes were too slow.
    pub async fn retire(&self) -> Result<u32, Failure> {
        let stage = "retire";
        let mut client = self.client(stage)?;
        let response = call(stage, RETIRE, client.retire(RetireRequest {})).await?;
        match response.failed {
            Some(failure) => Err(failure.into()),
            None => Ok(response.unfinished),
        }
    }

    /// Which kernel features are there.
    pub async fn preflight(&self) -> Result<Vec<Feature>, Failure> {
        let stage = "preflight";
        let mut client = self.client(stage)?;
        let request = PreflightRequest { ipv6: self.ipv6 };
        Ok(call(stage, CALL, client.preflight(request)).await?.features)
    }

    /// Facts about the executor itself.
    pub async fn node_status(&self) -> Result<NodeStatusResponse, Failure> {
        let stage = "node status";
        let mut client = self.client(stage)?;
        call(stage, CALL, client.node_status(NodeStatusRequest {})).await
    }

    /// Gets a descriptor of a sandbox's netns and checks that it is what was told.
    pub async fn fetch(&self, id: &SandboxId, netns: &NetnsIdentity) -> Result<OwnedFd, Failure> {
        let descriptors = self.descriptors("fetch descriptor")?;
        descriptors.fetch(id, netns).await
    }

    /// Gives the executor back a descriptor that it lacks.
    pub async fn offer(&self, id: &SandboxId, netns: Arc<OwnedFd>) -> Result<(), Failure> {
        let descriptors = self.descriptors("offer descriptor")?;
        descriptors.offer(id, netns).await
    }

    fn client(&self, stage: &str) -> Result<NetnsExecutorClient<UdsChannel>, Failure> {
        let session = self.link().session.as_ref().map(|session| session.client.clone());
        session.ok_or_else(|| unreachable(stage, "the executor is not connected"))
    }

    fn descriptors(&self, stage: &str) -> Result<Descriptors, Failure> {
        let session = self
            .link()
            .session
            .as_ref()
            .map(|session| session.descriptors.clone());
        session.ok_or_else(|| unreachable(stage, "the executor is not connected"))
    }

    fn link(&self) -> std::sync::MutexGuard<'_, Link> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn silence(heard: Instant, now: Instant) -> Option<Duration> {
    let silence = now.saturating_duration_since(heard);
    (silence > HEARTBEAT).then_some(silence)
}

async fn call<T>(
    stage: &str,
    limit: Duration,
    response: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
) -> Result<T, Failure> {
    match tokio::time::timeout(limit, response).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(unreachable(
            stage,
            format!("executor answers {:?}: {}", status.code(), status.message()),
        )),
        Err(_) => Err(unreachable(
            stage,
            format!("no answer from the executor within {limit:?}"),
        )),
    }
}

fn unreachable(stage: &str, cause: impl Into<String>) -> Failure {
    Failure::new(ErrorCode::BrokerState, COMPONENT, stage, cause)
}

fn malformed(stage: &str) -> Failure {
    Failure::new(
        ErrorCode::InvalidInput,
        COMPONENT,
        stage,
        "the executor's answer is empty",
    )
}

fn invalid(stage: &str, error: &sluice_proto::sandbox::InvalidMessage) -> Failure {
    Failure::new(ErrorCode::InvalidInput, COMPONENT, stage, error.to_string())
}

/// Differs from that of every other broker that may watch the same executor.
fn session_id() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id()).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_is_silent_only_once_a_heartbeat_is_missing() {
        let heard = Instant::now();
        let after = |seconds| silence(heard, heard + Duration::from_secs(seconds));
        assert_eq!(after(6), None);
        assert_eq!(after(9), Some(Duration::from_secs(9)));
    }
}

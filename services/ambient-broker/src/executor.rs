//! The executor as seen from here: one gRPC connection, one descriptor socket, and the watch that feeds the
//! state machine. The executor is never dialled by anybody but us, and never dials.

mod calls;
mod convert;
mod descriptors;
mod session;

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sluice_proto::paths::RunDir;
use sluice_proto::pb::executor::Feature;
use sluice_proto::pb::executor::netns_executor_client::NetnsExecutorClient;
use sluice_proto::sandbox::{Failure, NetnsIdentity};
use sluice_proto::transport::grpc::UdsChannel;
use sluice_selection::SelectionConfig;

use crate::reconcile::event::SandboxId;
use calls::unreachable;
use descriptors::Descriptors;

/// The executor sends a heartbeat every 5 s; from here on its silence is worth telling.
const HEARTBEAT: Duration = Duration::from_secs(7);

/// Between two looks whether it is connected.
const LOOK: Duration = Duration::from_millis(10);

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
    agent: String,
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

impl Executor {
    /// The executor of this run directory; not connected yet. `agent` is the name of the pod that we are a part of, empty where
    /// there is none.
    pub fn new(run: RunDir, selection: &SelectionConfig, agent: String) -> Self {
        Self {
            run,
            ipv6: selection.ipv6,
            config_hash: selection.hash(),
            agent,
            state: Arc::default(),
        }
    }

    /// Hash of the selection that pods are decided by.
    pub fn config_hash(&self) -> &str {
        &self.config_hash
    }

    /// The watch is up and its snapshot complete.
    pub fn is_connected(&self) -> bool {
        self.link().listed
    }

    /// Waits until calls find it.
    pub async fn reached(&self) {
        while self.link().session.is_none() {
            tokio::time::sleep(LOOK).await;
        }
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

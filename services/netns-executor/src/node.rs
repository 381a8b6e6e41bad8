//! What all servers and sandboxes share.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sluice_proto::paths::Deadlines;

use crate::configuration::Configurations;
use crate::handoff::Handoffs;
use crate::hub::Hub;
use crate::kernel::Kernel;
use crate::metrics::Metrics;
use crate::opener_client::OpenerClient;
use crate::probe_set::ProbeSet;
use crate::reaper::Reaper;
use crate::rules::HostOptions;
use crate::sandbox::registry::Registry;
use crate::table::probes::ProbeOwners;
use crate::table::{Table, TableError};

/// What can be set from outside.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where sandbox and probe files live.
    pub state: PathBuf,
    /// Where the plugin leaves tombstones.
    pub tombstones: PathBuf,
    /// Name of the agent's pod that we are a part of, empty where there is none.
    pub agent: String,
    /// How long an ADD may take, and how long it waits for a broker.
    pub deadlines: Deadlines,
    /// How often generation ids are looked at.
    pub drift: Duration,
    /// How often everything is read back although nothing moved.
    pub full_drift: Duration,
    /// How often unreachable sandboxes are looked for.
    pub recovery: Duration,
    /// After so long in vain a namespace that is nowhere is given up. A runtime may take its time to bring it back
    /// after a restart; the broker can have a pod that still runs looked for again.
    pub give_up: Duration,
    /// How often it is looked whether anybody else still has a namespace.
    pub unused: Duration,
    /// So long after it was told that the pod is gone at the source, a sandbox is let go of although somebody else
    /// still has its namespace: the runtime's DEL had its time.
    pub pod_gone: Duration,
    /// How often a scratch namespace is programmed, as proof that this process works.
    pub self_test: Duration,
    /// The health probe fails while a kernel call takes longer than this.
    pub stuck: Duration,
    /// What the host's rules are made of; pods must be programmed with the same.
    pub host: HostOptions,
}

/// The executor cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The table cannot be used.
    #[error(transparent)]
    Table(#[from] TableError),
    /// No thread for the reaper.
    #[error("cannot start the reaper thread")]
    Thread(#[source] std::io::Error),
}

/// The shared state of one executor.
pub struct Node {
    /// Settings.
    pub settings: Settings,
    /// The kernel.
    pub kernel: Arc<dyn Kernel>,
    /// Views and watchers.
    pub hub: Arc<Hub>,
    /// Sandbox files.
    pub table: Table,
    /// The host's address sets.
    pub probes: ProbeSet,
    /// Pods that no proxy has.
    pub handoffs: Handoffs,
    /// What plugin and broker decide by.
    pub configurations: Configurations,
    /// The opener.
    pub opener: OpenerClient,
    /// Counters.
    pub metrics: Metrics,
    /// Closes namespaces.
    pub reaper: Reaper,
    pub(crate) registry: Registry,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

impl Node {
    /// Opens the state directory; restores nothing yet (see [`crate::sandbox::restore`]).
    pub fn new(settings: Settings, kernel: Arc<dyn Kernel>) -> Result<Arc<Self>, StartError> {
        let reaper = Reaper::start().map_err(StartError::Thread)?;
        let table = Table::open(settings.state.join("sandboxes"))?;
        let (owners, unreadable) = ProbeOwners::open(settings.state.join("probe-set"))?;
        for file in unreadable {
            tracing::error!(path = %file.path.display(), reason = file.reason, "probe owner file moved aside");
        }
        Ok(Arc::new(Self {
            settings,
            kernel,
            hub: Arc::default(),
            table,
            probes: ProbeSet::new(owners, reaper.clone()),
            handoffs: Handoffs::default(),
            configurations: Configurations::default(),
            opener: OpenerClient::default(),
            metrics: Metrics::default(),
            reaper,
            registry: Registry::default(),
        }))
    }
}

/// Now, Unix time in milliseconds.
pub(crate) fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

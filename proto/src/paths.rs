//! Where the processes meet: one directory a socket, so that each is mounted only where it is needed
//! (peer credentials cannot tell three uid-0 peers apart).

use std::path::{Path, PathBuf};
use std::time::Duration;

/// Root of all run-time directories; a tmpfs on the host.
pub const RUN_DIR: &str = "/run/sluice";

/// uid and gid of the broker's process: nobody else's, because in-flight descriptors are counted per uid.
pub const BROKER_UID: u32 = 64_807;

/// The directories and sockets below one run directory.
#[derive(Debug, Clone)]
pub struct RunDir(PathBuf);

impl Default for RunDir {
    fn default() -> Self {
        Self(RUN_DIR.into())
    }
}

impl RunDir {
    /// Paths below `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self(root.into())
    }
    /// The root itself.
    pub fn root(&self) -> &Path {
        &self.0
    }
    /// Plugin to executor, gRPC: `CniService`. Mode 0600, root.
    pub fn cni_socket(&self) -> PathBuf {
        self.0.join("cni/executor.sock")
    }
    /// Where the plugin leaves tombstones of DELs that found no executor; read by the executor.
    pub fn tombstones(&self) -> PathBuf {
        self.0.join("cni/tombstones")
    }
    /// What the executor lacks on a node without an opener; read by the plugin.
    pub fn wanted(&self) -> PathBuf {
        self.0.join("cni/wanted.json")
    }
    /// Broker to executor, gRPC: `NetnsExecutor`. Group of the broker.
    pub fn executor_socket(&self) -> PathBuf {
        self.0.join("executor/executor.sock")
    }
    /// Broker to executor, SOCK_SEQPACKET: netns descriptors. Group of the broker.
    pub fn descriptor_socket(&self) -> PathBuf {
        self.0.join("executor/netns.sock")
    }
    /// Opener to executor, SOCK_SEQPACKET. Mode 0600, root.
    pub fn opener_socket(&self) -> PathBuf {
        self.0.join("opener/opener.sock")
    }
    /// The executor's sandbox table, a file a sandbox.
    pub fn sandboxes(&self) -> PathBuf {
        self.0.join("state/sandboxes")
    }
    /// Node-local tools to broker, gRPC: `PodNetns`.
    pub fn workload_socket(&self) -> PathBuf {
        self.0.join("broker/workload.sock")
    }
    /// Metrics and readiness of the broker over HTTP.
    pub fn http_socket(&self) -> PathBuf {
        self.0.join("broker/http.sock")
    }
    /// Installer to broker, gRPC: `NodeLifecycle`. Group of the directory (the installer's).
    pub fn node_socket(&self) -> PathBuf {
        self.0.join("node/broker.sock")
    }
    /// Credentials for the plugin's degraded decision: written by the installer, read by the plugin. Mode 0600, root.
    pub fn kubeconfig(&self) -> PathBuf {
        self.0.join("plugin/kubeconfig")
    }
    /// Plugin to installer, SOCK_DGRAM: one JSON log line a datagram. Mode 0600, root.
    pub fn plugin_log_socket(&self) -> PathBuf {
        self.0.join("plugin/log.sock")
    }
    /// Where the plugin leaves a record of each static pod that it let pass without an agent; read by the installer.
    pub fn unprotected(&self) -> PathBuf {
        self.0.join("plugin/unprotected")
    }
    /// ZDS, SOCK_SEQPACKET. On a cluster the path ztunnel expects is used instead.
    pub fn zds_socket(&self) -> PathBuf {
        self.0.join("ztunnel/ztunnel.sock")
    }
    /// What the serving executor locks: a directory that no other service has mounted. The same for the next three.
    pub fn executor_lease(&self) -> PathBuf {
        self.0.join("cni")
    }
    /// What the serving opener locks. The executor, which can do what the opener cannot, has it mounted as well.
    pub fn opener_lease(&self) -> PathBuf {
        self.0.join("opener")
    }
    /// What the serving broker locks. The installer, which makes it, has it mounted as well.
    pub fn broker_lease(&self) -> PathBuf {
        self.0.join("broker")
    }
    /// What the serving installer locks.
    pub fn installer_lease(&self) -> PathBuf {
        self.0.join("plugin")
    }
    /// `/cmdadd` as an installed istio-cni plugin calls it.
    pub fn compatibility_socket(&self) -> PathBuf {
        self.0.join("istio-cni/pluginevent.sock")
    }
}

/// All deadlines in one place, because they must nest: ZDS < executor < plugin.
#[derive(Debug, Clone, Copy)]
pub struct Deadlines {
    /// One ZDS message, from when it is the oldest unanswered.
    pub zds: Duration,
    /// One ADD inside the executor.
    pub executor: Duration,
    /// One ADD inside the plugin, everything included.
    pub plugin: Duration,
    /// Without a broker, an ADD is answered `NoBroker` after this.
    pub no_broker: Duration,
    /// The plugin tries to reach the executor for this long.
    pub connect: Duration,
    /// Without an agent the plugin has its answer from the API server, or has given up, by then, counted from its start.
    pub without_agent: Duration,
}

/// The deadlines of this version.
pub const DEADLINES: Deadlines = Deadlines {
    zds: Duration::from_secs(4),
    executor: Duration::from_secs(9),
    plugin: Duration::from_secs(10),
    no_broker: Duration::from_secs(2),
    connect: Duration::from_secs(1),
    without_agent: Duration::from_secs(4),
};

const _: () = assert!(DEADLINES.zds.as_millis() < DEADLINES.executor.as_millis());
const _: () = assert!(DEADLINES.no_broker.as_millis() < DEADLINES.without_agent.as_millis());
const _: () = assert!(DEADLINES.executor.as_millis() < DEADLINES.plugin.as_millis());

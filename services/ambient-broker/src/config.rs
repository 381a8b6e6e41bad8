//! What the operator sets: flags (each also an environment variable), and a YAML file for the selection.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{ArgGroup, Parser};
use sluice_proto::id::{Namespace, PodName};
use sluice_proto::paths::{RUN_DIR, RunDir};
use sluice_proto::transport::uds::PeerPolicy;
use sluice_selection::{OwnPods, SelectionConfig, SelectionFileError, parse_selection_file};

use crate::cluster::{
    self, Access, ConnectError, Kubernetes, RetireError, Retired, SERVICE_ACCOUNT, Timing, retire,
};
use crate::lifecycle::NodeFacts;
use crate::reconcile::Settings;
use crate::source::{ManifestDirectory, PodSource, WatchMode};
use crate::status::{NoStatus, StatusWriter};
use crate::{service, zds};

/// Decides which pods are in the mesh, drives the executor and serves ztunnel.
#[derive(Debug, Clone, Parser)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a switch of the command line"
)]
#[command(name = "ambient-broker", version)]
#[command(group(ArgGroup::new("source").required(true).args(["manifests", "kubernetes", "retire"])))]
pub struct Args {
    /// Directory of Pod and Namespace manifests that is watched.
    #[arg(long, env = "SLUICE_MANIFESTS")]
    pub manifests: Option<PathBuf>,
    /// Watch the Kubernetes API instead: in a pod with its ServiceAccount, elsewhere by --kubeconfig.
    #[arg(long, env = "SLUICE_KUBERNETES", requires_all = ["node_name", "pod_name", "pod_namespace", "daemon_set"])]
    pub kubernetes: bool,
    /// Serve nobody: tell the agent's DaemonSet to want no node any more, and wait at most so many seconds for the end of its
    /// pods. For uninstalling.
    #[arg(long, value_name = "SECONDS", requires_all = ["pod_namespace", "daemon_set"])]
    pub retire: Option<u32>,
    /// Who we are in the cluster.
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// Look for changes twice a second instead of being told (for file systems that announce nothing).
    #[arg(long, env = "SLUICE_POLL_MANIFESTS")]
    pub poll_manifests: bool,
    /// Run directory; all sockets are below it.
    #[arg(long, env = "SLUICE_RUN_DIR", default_value = RUN_DIR)]
    pub run_dir: PathBuf,
    /// YAML file with the selection: enablementSelectors, excludedNamespaces, dnsCapture, ipv6 and so on.
    #[arg(long, env = "SLUICE_SELECTION")]
    pub selection: Option<PathBuf>,
    /// Where ztunnel connects; the default is below the run directory.
    #[arg(long, env = "ZTUNNEL_UDS_ADDRESS")]
    pub zds_socket: Option<PathBuf>,
    /// uids that may connect as ztunnel.
    #[arg(long, env = "SLUICE_ZDS_UIDS", value_delimiter = ',', default_value = "0")]
    pub zds_uids: Vec<u32>,
    /// Mode of the ZDS socket, octal.
    #[arg(long, env = "SLUICE_ZDS_MODE", value_parser = octal, default_value = "0660")]
    pub zds_mode: u32,
    /// Group of the ZDS socket, for a ztunnel that does not run as root. The broker must be a member of it.
    #[arg(long, env = "SLUICE_ZDS_GID")]
    pub zds_gid: Option<u32>,
    /// Snapshot messages in flight on one connection; 1: one after the other.
    #[arg(long, env = "SLUICE_ZDS_WINDOW", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub zds_window: u16,
    /// A pod that leaves the mesh keeps its kept connections at most this many seconds.
    #[arg(long, env = "SLUICE_DRAIN_SECONDS", default_value_t = 60)]
    pub drain_seconds: u32,
    /// Not ready without a ready ztunnel connection.
    #[arg(long, env = "SLUICE_REQUIRE_ZTUNNEL")]
    pub require_ztunnel: bool,
    /// Also serve metrics and health on this TCP address. Off by default: no port of the host is taken.
    #[arg(long, env = "SLUICE_LISTEN")]
    pub listen: Option<SocketAddr>,
    /// Serve `/cmdadd` for an istio-cni plugin that is still installed.
    #[arg(long, env = "SLUICE_ISTIO_CNI")]
    pub istio_cni: bool,
    /// Mode of that socket, octal. The plugin runs as root, so nobody else needs it.
    #[arg(long, env = "SLUICE_ISTIO_CNI_MODE", value_parser = octal, default_value = "0600")]
    pub istio_cni_mode: u32,
    /// If another broker serves this node, wait for its end, as an upgrade does that starts the new agent before the old one
    /// ends. Otherwise that is an error.
    #[arg(long, env = "SLUICE_STAND_BY")]
    pub stand_by: bool,
    /// A directory of our own pod that is locked before anything else: of two containers that are given the same one, one waits
    /// for the end of the other, and then does its work.
    #[arg(long, env = "SLUICE_POD_LEASE")]
    pub pod_lease: Option<PathBuf>,
    /// uids that may ask for workload state.
    #[arg(
        long,
        env = "SLUICE_WORKLOAD_UIDS",
        value_delimiter = ',',
        default_value = "0"
    )]
    pub workload_uids: Vec<u32>,
    /// Run as uid 0 all the same. For tests and machines without a broker user.
    #[arg(long, env = "SLUICE_ALLOW_ROOT")]
    pub allow_root: bool,
}

/// What is set with `--kubernetes`; in a pod the downward API gives it.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ClusterArgs {
    /// Name of this node (`spec.nodeName`).
    #[arg(long, env = "NODE_NAME")]
    pub node_name: Option<String>,
    /// Name of our own pod.
    #[arg(long, env = "POD_NAME")]
    pub pod_name: Option<PodName>,
    /// Namespace of our own pod.
    #[arg(long, env = "POD_NAMESPACE")]
    pub pod_namespace: Option<Namespace>,
    /// The DaemonSet we belong to.
    #[arg(long, env = "SLUICE_DAEMON_SET")]
    pub daemon_set: Option<String>,
    /// ServiceAccount in the same namespace that the plugin's token is issued for.
    #[arg(long, env = "SLUICE_PLUGIN_SERVICE_ACCOUNT", default_value = "sluice-plugin")]
    pub plugin_service_account: String,
    /// Reach the API server by this file instead of the pod's ServiceAccount.
    #[arg(long, env = "KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,
    /// Address of the API server; the kubelet sets it.
    #[arg(long, env = "KUBERNETES_SERVICE_HOST", hide = true)]
    pub api_host: Option<String>,
    /// Its port.
    #[arg(long, env = "KUBERNETES_SERVICE_PORT", default_value_t = 443, hide = true)]
    pub api_port: u16,
    /// Directory of the pod's ServiceAccount: `token` and `ca.crt`.
    #[arg(long, env = "SLUICE_SERVICE_ACCOUNT_DIR", default_value = SERVICE_ACCOUNT, hide = true)]
    pub service_account_dir: PathBuf,
}

impl ClusterArgs {
    /// How the API server is reached.
    fn access(&self) -> Result<Access, ConfigError> {
        match (&self.kubeconfig, &self.api_host) {
            (Some(path), _) => Ok(Access::Kubeconfig(path.clone())),
            (None, Some(host)) => Ok(Access::InCluster {
                host: host.clone(),
                port: self.api_port,
                secrets: self.service_account_dir.clone(),
            }),
            (None, None) => Err(ConfigError::Access),
        }
    }

    /// Whose pods we are one of.
    fn own(&self) -> Result<OwnPods, ConfigError> {
        let missing = |what| ConfigError::Missing { what };
        let namespace = self.pod_namespace.as_ref().ok_or(missing("POD_NAMESPACE"))?;
        Ok(OwnPods {
            namespace: namespace.to_string(),
            daemon_set: self.daemon_set.clone().ok_or(missing("SLUICE_DAEMON_SET"))?,
        })
    }

    /// Who we are.
    fn settings(&self) -> Result<cluster::Settings, ConfigError> {
        let missing = |what| ConfigError::Missing { what };
        Ok(cluster::Settings {
            access: self.access()?,
            node: self.node_name.clone().ok_or(missing("NODE_NAME"))?,
            pod: self.pod_name.clone().ok_or(missing("POD_NAME"))?,
            own: self.own()?,
            plugin_service_account: self.plugin_service_account.clone(),
            timing: Timing::default(),
        })
    }
}

/// Where pods come from, where enrolment is made known, and who knows of the cluster.
#[derive(Debug)]
pub struct Source {
    /// Pods and namespaces.
    pub pods: Arc<dyn PodSource>,
    /// The status annotation.
    pub status: Arc<dyn StatusWriter>,
    /// For the installer; without a cluster there is none.
    pub node: Option<Arc<dyn NodeFacts>>,
}

/// A setting that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The selection file cannot be used.
    #[error(transparent)]
    Selection(#[from] SelectionFileError),
    /// The API server's address is not known.
    #[error(
        "--kubernetes needs KUBERNETES_SERVICE_HOST, which the kubelet sets in a pod, or --kubeconfig elsewhere"
    )]
    Access,
    /// Something of `--kubernetes` is not set.
    #[error("--kubernetes needs {what}")]
    Missing {
        /// The environment variable.
        what: &'static str,
    },
    /// The API server cannot be asked.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The agent cannot be retired.
    #[error(transparent)]
    Retire(#[from] RetireError),
    /// The process runs as root.
    #[error("runs as uid 0; run it as a user of its own (uid {uid}), or say --allow-root", uid = sluice_proto::paths::BROKER_UID)]
    Root,
}

impl Args {
    /// Refuses to run as root unless told otherwise.
    pub fn check_user(&self) -> Result<(), ConfigError> {
        if nix::unistd::geteuid().is_root() && !self.allow_root {
            return Err(ConfigError::Root);
        }
        Ok(())
    }

    /// The selection configuration; defaults where there is no file.
    pub fn selection(&self) -> Result<SelectionConfig, ConfigError> {
        match &self.selection {
            None => Ok(SelectionConfig::default()),
            Some(path) => Ok(parse_selection_file(path, std::fs::read_to_string(path))?),
        }
    }

    /// The source. Call it inside a tokio runtime.
    pub async fn source(&self) -> Result<Source, ConfigError> {
        if let Some(manifests) = &self.manifests {
            let mode = if self.poll_manifests {
                WatchMode::Poll
            } else {
                WatchMode::Auto
            };
            return Ok(Source {
                pods: Arc::new(ManifestDirectory::new(manifests, mode)),
                status: Arc::new(NoStatus),
                node: None,
            });
        }
        let kubernetes = Kubernetes::new(self.cluster.settings()?).await?;
        Ok(Source {
            pods: Arc::new(kubernetes.clone()),
            status: Arc::new(kubernetes.clone()),
            node: Some(Arc::new(kubernetes)),
        })
    }

    /// Ends the agent in the whole cluster. Call it inside a tokio runtime.
    pub async fn retire(&self, seconds: u32) -> Result<(), ConfigError> {
        let wait = Duration::from_secs(seconds.into());
        match retire(&self.cluster.access()?, &self.cluster.own()?, wait).await? {
            Retired::Nothing => tracing::info!("there is no DaemonSet to retire"),
            Retired::Done => tracing::info!("every node is clean"),
            Retired::Unfinished(nodes) => {
                tracing::warn!(
                    nodes,
                    "some nodes did not finish in time; they clean up when they can"
                );
            }
        }
        Ok(())
    }

    /// How the broker runs, its source apart.
    pub fn service(&self) -> Result<service::Config, ConfigError> {
        let socket = self.zds_socket.clone().unwrap_or_else(|| self.run().zds_socket());
        Ok(service::Config {
            run: self.run(),
            selection: self.selection()?,
            settings: Settings {
                drain: self.drain(),
                seed: std::process::id().into(),
                ..Settings::default()
            },
            zds: zds::Options {
                mode: self.zds_mode,
                group: self.zds_gid,
                window: self.zds_window.into(),
                ..zds::Options::new(socket, self.zds_uids.clone())
            },
            listen: self.listen,
            istio_cni: self.istio_cni.then_some(self.istio_cni_mode),
            workload_peers: PeerPolicy::uids(self.workload_uids.clone()),
            require_ztunnel: self.require_ztunnel,
            agent: self
                .cluster
                .pod_name
                .as_ref()
                .map(ToString::to_string)
                .unwrap_or_default(),
            node: None,
        })
    }

    /// The run directory.
    pub fn run(&self) -> RunDir {
        RunDir::new(&self.run_dir)
    }

    /// How long a leaving pod keeps its connections.
    pub fn drain(&self) -> Duration {
        Duration::from_secs(self.drain_seconds.into())
    }
}

fn octal(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| *mode <= 0o777)
        .ok_or_else(|| "an octal file mode from 0 to 0777".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(extra: &[&str]) -> Result<Args, clap::Error> {
        Args::try_parse_from(["ambient-broker", "--manifests", "/m"].iter().chain(extra))
    }

    #[test]
    fn the_zds_sockets_group_is_as_it_was_unless_named() {
        assert_eq!(args(&[]).unwrap().zds_gid, None);
        assert_eq!(args(&["--zds-gid", "1337"]).unwrap().zds_gid, Some(1337));
    }

    #[test]
    fn modes_are_octal_and_bounded() {
        assert_eq!(args(&["--zds-mode", "0600"]).unwrap().zds_mode, 0o600);
        for bad in ["888", "7777", "rw"] {
            assert!(args(&["--zds-mode", bad]).is_err(), "{bad}");
        }
    }
}

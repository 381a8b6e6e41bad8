//! Command line and environment, validated before anything else happens.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand};
use sluice_proto::ambient::{PROBE_IPV4, PROBE_IPV6};
use sluice_proto::paths::{BROKER_UID, DEADLINES, RUN_DIR, RunDir};
use sluice_proto::transport::uds::PeerPolicy;

use crate::node::Settings;
use crate::rules::HostOptions;
use crate::server::Peers;

/// Programs redirection rules in pod network namespaces.
#[derive(Debug, Parser)]
#[command(name = "netns-executor", version)]
pub struct Arguments {
    /// Directory of all sockets.
    #[arg(long, env = "SLUICE_RUN_DIR", default_value = RUN_DIR)]
    run_dir: PathBuf,
    /// Directory of the sandbox table; default: state below the run directory.
    #[arg(long, env = "SLUICE_STATE_DIR")]
    state_dir: Option<PathBuf>,
    /// uid of the broker; it and root may use the broker's sockets.
    #[arg(long, env = "SLUICE_BROKER_UID", default_value_t = BROKER_UID)]
    broker_uid: u32,
    /// Group of the broker's sockets.
    #[arg(long, env = "SLUICE_BROKER_GID", default_value_t = BROKER_UID)]
    broker_gid: u32,
    /// uid that may use the plugin's socket, repeatable.
    #[arg(long = "plugin-uid", env = "SLUICE_PLUGIN_UID", value_delimiter = ',', default_values_t = [0])]
    plugin_uids: Vec<u32>,
    /// uid that may use the opener's socket, repeatable.
    #[arg(long = "opener-uid", env = "SLUICE_OPENER_UID", value_delimiter = ',', default_values_t = [0])]
    opener_uids: Vec<u32>,
    /// Milliseconds between two looks at each pod's generation id.
    #[arg(long, env = "SLUICE_DRIFT_INTERVAL_MS", default_value_t = 5_000, value_parser = clap::value_parser!(u64).range(100..=600_000))]
    drift_interval_ms: u64,
    /// Milliseconds between two looks at each pod's policy routing, which the generation id says nothing about; ten times
    /// as many where the kernel tells of changes, which make the next look at the rules one at the routing, too.
    #[arg(long, env = "SLUICE_FULL_DRIFT_INTERVAL_MS", default_value_t = 30_000, value_parser = clap::value_parser!(u64).range(100..=3_600_000))]
    full_drift_interval_ms: u64,
    /// Milliseconds between two attempts to reach lost namespaces.
    #[arg(long, env = "SLUICE_RECOVERY_INTERVAL_MS", default_value_t = 2_000, value_parser = clap::value_parser!(u64).range(100..=600_000))]
    recovery_interval_ms: u64,
    /// Source address of the host's probes to mesh pods, IPv4; the broker must be told the same.
    #[arg(long, env = "SLUICE_PROBE_IPV4", default_value_t = PROBE_IPV4)]
    probe_ipv4: Ipv4Addr,
    /// Source address of the host's probes to mesh pods, IPv6; the broker must be told the same.
    #[arg(long, env = "SLUICE_PROBE_IPV6", default_value_t = PROBE_IPV6)]
    probe_ipv6: Ipv6Addr,
    /// Leave IPv6 alone.
    #[arg(long, env = "SLUICE_NO_IPV6")]
    no_ipv6: bool,
    /// Asked to stop, serve on until the broker of the same agent has gone, so many seconds at most. For a runtime that asks both
    /// at one time.
    #[arg(long, env = "SLUICE_LINGER_SECONDS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..=600))]
    linger_seconds: u64,
    /// Name of the agent's pod, by which our own broker is told from the next agent's.
    #[arg(long, env = "POD_NAME", default_value = "")]
    pod_name: String,
    /// There is no opener on this node: the plugin is asked to hand over the host's namespace, and after a restart those of
    /// the sandboxes.
    #[arg(long, env = "SLUICE_NO_OPENER")]
    no_opener: bool,
    /// If another executor serves this node, wait for its end, as an upgrade does that starts the new agent before the old one
    /// ends. Otherwise that is an error.
    #[arg(long, env = "SLUICE_STAND_BY")]
    stand_by: bool,
    /// A directory of our own pod that is locked before anything else: of two containers that are given the same one, one waits
    /// for the end of the other, and then does its work.
    #[arg(long, env = "SLUICE_POD_LEASE")]
    pod_lease: Option<PathBuf>,
    /// What to do; serve if nothing is named.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// Other things than serving.
#[derive(Debug, Clone, Copy, Subcommand)]
pub enum Command {
    /// Ask the running executor whether it works; exit status 0 if so.
    Healthcheck,
}

/// Everything that a running executor needs to know.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where the sockets are.
    pub run: RunDir,
    /// Who may connect.
    pub peers: Peers,
    /// The rest.
    pub settings: Settings,
    /// How long to wait for the broker's end.
    pub linger: Duration,
    /// The plugin has to hand over what an opener would.
    pub no_opener: bool,
    /// Wait for the end of an executor that serves this node.
    pub stand_by: bool,
    /// What to lock before anything else.
    pub pod_lease: Option<PathBuf>,
}

impl From<&Arguments> for Config {
    fn from(arguments: &Arguments) -> Self {
        let run = RunDir::new(&arguments.run_dir);
        let state = arguments
            .state_dir
            .clone()
            .unwrap_or_else(|| arguments.run_dir.join("state"));
        Self {
            peers: Peers {
                plugin: PeerPolicy::uids(arguments.plugin_uids.clone()),
                broker: PeerPolicy::uids([0, arguments.broker_uid]),
                opener: PeerPolicy::uids(arguments.opener_uids.clone()),
                broker_gid: arguments.broker_gid,
            },
            settings: Settings {
                state,
                tombstones: run.tombstones(),
                agent: arguments.pod_name.clone(),
                deadlines: DEADLINES,
                drift: Duration::from_millis(arguments.drift_interval_ms),
                full_drift: Duration::from_millis(arguments.full_drift_interval_ms),
                recovery: Duration::from_millis(arguments.recovery_interval_ms),
                give_up: Duration::from_mins(1),
                // The opener makes sockets for each look; DEL, a vanished interface and the broker mostly come first.
                unused: Duration::from_millis(arguments.full_drift_interval_ms.saturating_mul(20)),
                pod_gone: Duration::from_secs(30),
                self_test: Duration::from_mins(1),
                stuck: Duration::from_secs(10),
                host: HostOptions {
                    ipv6: !arguments.no_ipv6,
                    probe_ipv4: arguments.probe_ipv4,
                    probe_ipv6: arguments.probe_ipv6,
                },
            },
            run,
            linger: Duration::from_secs(arguments.linger_seconds),
            no_opener: arguments.no_opener,
            stand_by: arguments.stand_by,
            pod_lease: arguments.pod_lease.clone(),
        }
    }
}

impl Arguments {
    /// Reads the command line; ends the process with a message if it is wrong.
    pub fn read() -> Self {
        Self::parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_the_contract() {
        let config = Config::from(&Arguments::try_parse_from(["netns-executor"]).unwrap());
        assert_eq!(config.run.root(), std::path::Path::new(RUN_DIR));
        assert_eq!(config.settings.state.join("sandboxes"), config.run.sandboxes());
        assert_eq!(config.peers.plugin.uids, [0]);
        assert_eq!(config.peers.broker.uids, [0, BROKER_UID]);
    }

    #[test]
    fn a_wrong_value_names_what_is_allowed() {
        let error = Arguments::try_parse_from(["netns-executor", "--drift-interval-ms", "5"]).unwrap_err();
        assert!(error.to_string().contains("100..=600000"), "{error}");
    }
}

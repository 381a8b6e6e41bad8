//! What the operator sets: flags (each also an environment variable), and a YAML file for the selection.

use std::path::{Path, PathBuf};
use std::time::Duration;

use caps::Capability;
use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use sluice_proto::paths::{BROKER_UID, RUN_DIR, RunDir};
use sluice_selection::{SelectionConfig, SelectionFileError, parse_selection_file};

use crate::entry::{Entry, LogLevel, StaticPods};

/// Every file that is ours alone in the network configuration directory ends in one of these; ownership is told by the name.
pub const OWNED_SUFFIX: &str = "-sluice.conflist";
/// The same for a network of our own.
pub const STAND_ALONE_SUFFIX: &str = "-sluice.conf";
/// The file in stand-alone mode. It sorts last, so that nobody takes it for the primary network by its place.
pub const STAND_ALONE_FILE: &str = "zz-sluice.conf";

/// Keeps the CNI plugin, its entry in the node's network configuration and its credentials in place.
#[derive(Debug, Parser)]
#[command(name = "installer", version, disable_help_subcommand = true)]
pub struct Cli {
    /// Settings of all commands.
    #[command(flatten)]
    pub flags: Flags,
    /// What to do; `run` if nothing is named.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// What to do.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Install, and keep what was installed in place until told to stop.
    Run,
    /// Print what `run` would change, as a diff, and change nothing.
    Plan,
    /// Remove the entry, the kubeconfig, and the plugin but for a stand-in that answers DEL.
    Uninstall {
        /// Remove the stand-in as well, as `purge` does.
        #[arg(long)]
        purge: bool,
        /// See `purge`.
        #[command(flatten)]
        options: PurgeOptions,
    },
    /// Remove the stand-in that `uninstall` leaves behind.
    Purge(PurgeOptions),
    /// Ask the running installer whether all is in place; exit status 0 if so, else the reason is printed.
    Healthcheck {
        /// Only ask whether it answers.
        #[arg(long)]
        alive: bool,
    },
    /// Make the run directories as `run` does with `--broker-gid`, and end.
    Prepare,
}

/// Settings of `purge`.
#[derive(Debug, Clone, Args)]
pub struct PurgeOptions {
    /// Where the runtime keeps results of ADDs (`/var/lib/cni` on most hosts), as this process sees it. While one of
    /// them names our plugin, a DEL through it is still to come.
    #[arg(long, env = "SLUICE_CNI_CACHE_DIR")]
    pub cni_cache_dir: Option<PathBuf>,
    /// Where the host's root directory is mounted, in a debug container. Links in directories below it are followed as the
    /// host would.
    #[arg(long, env = "SLUICE_HOST_ROOT", default_value = "/host")]
    pub host_root: PathBuf,
    /// Purge although a DEL is still to come, or a network configuration names the plugin.
    #[arg(long)]
    pub force: bool,
}

/// Groups and places of the run directories.
#[derive(Debug, Clone, Args)]
pub struct RunDirFlags {
    /// Group of the broker. Before anything else, `run` makes the directories of its own and of the broker's sockets, and gives
    /// those to this group, of which it has to be a member; without this setting they have to be there.
    #[arg(long, global = true, env = "SLUICE_BROKER_GID")]
    pub broker_gid: Option<u32>,
    /// Directory of the ZDS socket; not made if not named.
    #[arg(long, global = true, env = "SLUICE_ZTUNNEL_DIR")]
    pub ztunnel_dir: Option<PathBuf>,
    /// Group of that directory and of the socket in it: ztunnel's.
    #[arg(long, global = true, env = "SLUICE_ZTUNNEL_GID", default_value_t = 1337)]
    pub ztunnel_gid: u32,
}

impl RunDirFlags {
    pub(crate) fn broker(&self) -> u32 {
        self.broker_gid.unwrap_or(BROKER_UID)
    }
}

/// Settings of all commands.
#[derive(Debug, Clone, Args)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a switch of the command line"
)]
pub struct Flags {
    /// Run directory; all sockets are below it.
    #[arg(long, global = true, env = "SLUICE_RUN_DIR", default_value = RUN_DIR)]
    pub run_dir: PathBuf,
    #[command(flatten)]
    pub run_dirs: RunDirFlags,
    /// Directory of the node's network configurations, as this process sees it.
    #[arg(
        long,
        global = true,
        env = "SLUICE_CNI_NET_DIR",
        default_value = "/host/etc/cni/net.d"
    )]
    pub cni_net_dir: PathBuf,
    /// Directories of the node's CNI plugins, as this process sees them.
    #[arg(
        long,
        global = true,
        env = "SLUICE_CNI_BIN_DIR",
        value_delimiter = ',',
        default_value = "/host/opt/cni/bin"
    )]
    pub cni_bin_dir: Vec<PathBuf>,
    /// The network configuration directory as the host sees it, for messages.
    #[arg(
        long,
        global = true,
        env = "SLUICE_HOST_CNI_NET_DIR",
        default_value = "/etc/cni/net.d"
    )]
    pub host_cni_net_dir: PathBuf,
    /// The plugin directories as the host sees them, for messages.
    #[arg(
        long,
        global = true,
        env = "SLUICE_HOST_CNI_BIN_DIR",
        value_delimiter = ',',
        default_value = "/opt/cni/bin"
    )]
    pub host_cni_bin_dir: Vec<PathBuf>,
    /// Where the plugin to be installed is.
    #[arg(
        long,
        global = true,
        env = "SLUICE_SOURCE_DIR",
        default_value = "/opt/sluice/bin"
    )]
    pub source_dir: PathBuf,
    /// Whether the entry goes into a file of our own, into the primary network's file, or makes a network of its own.
    #[arg(long, global = true, env = "SLUICE_CNI_MODE", value_enum, default_value_t = Mode::Owned)]
    pub mode: Mode,
    /// Name of our own file; default 02-sluice.conflist, with --take-over 01-sluice.conflist.
    #[arg(long, global = true, env = "SLUICE_OWNED_NAME", value_parser = owned_name)]
    pub owned_name: Option<String>,
    /// The primary network's file; default: the first valid one.
    #[arg(long, global = true, env = "SLUICE_PRIMARY", value_parser = file_name)]
    pub primary: Option<String>,
    /// Files of ours have mode 0640 instead of 0600.
    #[arg(long, global = true, env = "SLUICE_CONF_GROUP_READ")]
    pub group_read: bool,
    /// Take the place of Istio's node agent: its entry is replaced by ours.
    #[arg(long, global = true, env = "SLUICE_TAKE_OVER")]
    pub take_over: bool,
    /// What to do about a file that the runtime prefers to ours.
    #[arg(long, global = true, env = "SLUICE_WHEN_PREEMPTED", value_enum, default_value_t = WhenPreempted::Report)]
    pub when_preempted: WhenPreempted,
    /// What to do if the primary network's plugin is not where ours is installed.
    #[arg(long, global = true, env = "SLUICE_BIN_DIR_CHECK", value_enum, default_value_t = BinDirCheck::Require)]
    pub bin_dir_check: BinDirCheck,
    /// Configuration files of container runtimes, as this process sees them (containerd's config.toml, crio.conf), which say
    /// where plugins and network configurations are looked for. Those that are not there are passed over.
    #[arg(long, global = true, env = "SLUICE_RUNTIME_CONFIG", value_delimiter = ',')]
    pub runtime_config: Vec<PathBuf>,
    /// YAML file with the selection, the same as the broker's.
    #[arg(long, global = true, env = "SLUICE_SELECTION")]
    pub selection: Option<PathBuf>,
    /// How much the plugin logs.
    #[arg(long, global = true, env = "SLUICE_PLUGIN_LOG_LEVEL", value_enum, default_value_t = LogLevel::Warn)]
    pub plugin_log_level: LogLevel,
    /// Whether static pods may start while nobody can say if they belong to the mesh.
    #[arg(long, global = true, env = "SLUICE_STATIC_PODS", value_enum, default_value_t = StaticPods::Pass)]
    pub static_pods: StaticPods,
    /// The plugin's STATUS may fail, which makes the node NotReady. Only for an agent on the host's network.
    #[arg(long, global = true, env = "SLUICE_GATE_NODE")]
    pub gate_node: bool,
    /// The interface of a pod that is redirected, if it is not eth0.
    #[arg(long, global = true, env = "SLUICE_IFNAME")]
    pub ifname: Option<sluice_proto::id::InterfaceName>,
    /// Where the plugin's credentials go; the same path on the host. Default: plugin/kubeconfig below the run directory.
    #[arg(long, global = true, env = "SLUICE_KUBECONFIG", value_parser = absolute)]
    pub kubeconfig: Option<PathBuf>,
    /// Not ready without credentials for the plugin. `false` where there is no API server.
    #[arg(long, global = true, env = "SLUICE_REQUIRE_KUBECONFIG", action = ArgAction::Set, default_value_t = true)]
    pub require_kubeconfig: bool,
    /// How long the broker may take, at SIGTERM, to find out whether we are to stay on the node.
    #[arg(long, global = true, env = "SLUICE_SHUTDOWN_SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=600))]
    pub shutdown_seconds: u32,
    /// Our own file is removed when the primary network's file has been gone for so long.
    #[arg(long, global = true, env = "SLUICE_PRIMARY_GRACE_SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(0..=86_400))]
    pub primary_grace_seconds: u32,
    /// Serve `/log` in this directory for a plugin of istio-cni that is still called (usually /var/run/istio-cni).
    #[arg(long, global = true, env = "SLUICE_ISTIO_RUN_DIR")]
    pub istio_run_dir: Option<PathBuf>,
    /// Keep CAP_DAC_OVERRIDE: the CNI directories belong to another user than root.
    #[arg(long, global = true, env = "SLUICE_DAC_OVERRIDE")]
    pub dac_override: bool,
    /// Look every two seconds instead of being told of changes.
    #[arg(long, global = true, env = "SLUICE_POLL")]
    pub poll: bool,
    /// If another installer serves this node, wait for its end, as an upgrade does that starts the new agent before the old one
    /// ends. Otherwise that is an error.
    #[arg(long, global = true, env = "SLUICE_STAND_BY")]
    pub stand_by: bool,
    /// Name of the agent's pod, by which our own broker is told from the next agent's.
    #[arg(long, global = true, env = "POD_NAME", default_value = "")]
    pub pod_name: String,
    /// The run directory need not be a tmpfs. For tests.
    #[arg(long, global = true, env = "SLUICE_ALLOW_DISK")]
    pub allow_disk: bool,
}

/// Where our entry goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Into a copy of the primary network's configuration that sorts before it.
    Owned,
    /// Into the primary network's own file.
    Chained,
    /// Into a file of our own that is a network by itself, for a plugin such as Multus that calls it for pods that name it.
    StandAlone,
}

impl Mode {
    /// As reports name it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Owned => "owned",
            Self::Chained => "chained",
            Self::StandAlone => "stand-alone",
        }
    }
}

/// What to do about a file that the runtime prefers to ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WhenPreempted {
    /// Be not ready and name it.
    Report,
    /// Put our entry into it as well.
    Chain,
}

/// What to do if the primary network's plugin is not where ours is installed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BinDirCheck {
    /// Install no entry: the runtime seems to search elsewhere, and would find our plugin for no pod.
    Require,
    /// Log it.
    Warn,
    /// Do not look.
    Off,
}

impl Flags {
    /// The run directory.
    pub fn run(&self) -> RunDir {
        RunDir::new(&self.run_dir)
    }

    /// Name of our own file.
    pub fn owned_name(&self) -> &str {
        match &self.owned_name {
            Some(name) => name,
            // Before the name that Istio's agent gives its own file.
            None if self.take_over => "01-sluice.conflist",
            None => "02-sluice.conflist",
        }
    }

    /// Where the plugin's credentials go.
    pub fn kubeconfig(&self) -> PathBuf {
        self.kubeconfig.clone().unwrap_or_else(|| self.run().kubeconfig())
    }

    /// How long the broker may take at the end.
    pub fn shutdown(&self) -> Duration {
        Duration::from_secs(self.shutdown_seconds.into())
    }

    /// How long the primary may be gone.
    pub fn primary_grace(&self) -> Duration {
        Duration::from_secs(self.primary_grace_seconds.into())
    }

    /// What is kept of the capabilities that the process is given.
    pub fn capabilities(&self) -> &'static [Capability] {
        if self.dac_override {
            &[Capability::CAP_DAC_OVERRIDE]
        } else {
            &[]
        }
    }

    /// Mode of files that are ours alone.
    pub fn owned_mode(&self) -> u32 {
        if self.group_read { 0o640 } else { 0o600 }
    }

    /// Our entry in the list, from the settings and the selection file.
    pub fn entry(&self) -> Result<Entry, SelectionFileError> {
        Ok(Entry {
            run_dir: self.run_dir.clone(),
            log_level: self.plugin_log_level,
            selection: self.selection.as_deref().map(read_selection).transpose()?,
            gate_node: self.gate_node,
            static_pods: self.static_pods,
            ifname: self.ifname.clone(),
            kubeconfig: self.kubeconfig.clone(),
            stand_alone: self.mode == Mode::StandAlone,
        })
    }
}

/// The selection as the file at `path` has it now.
pub(crate) fn read_selection(path: &Path) -> Result<SelectionConfig, SelectionFileError> {
    parse_selection_file(path, std::fs::read_to_string(path))
}

/// The suffix makes it a list for every runtime and ours for every later installer.
fn owned_name(text: &str) -> Result<String, String> {
    let name = file_name(text)?;
    if name.ends_with(OWNED_SUFFIX) && name.len() > OWNED_SUFFIX.len() {
        Ok(name)
    } else {
        Err(format!("a file name that ends in {OWNED_SUFFIX}"))
    }
}

fn file_name(text: &str) -> Result<String, String> {
    let plain = !text.is_empty()
        && text.len() <= 200
        && !text.starts_with('.')
        && text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/');
    if plain {
        Ok(text.to_owned())
    } else {
        Err(
            "the name of a file in the network configuration directory: 1 to 200 visible ASCII characters, \
             no '/', no leading '.'"
                .to_owned(),
        )
    }
}

fn absolute(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if path.is_absolute() {
        Ok(path)
    } else {
        Err("an absolute path".to_owned())
    }
}

#[cfg(test)]
mod tests;

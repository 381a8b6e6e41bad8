//! The command line.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use sluice_proto::id::{Namespace, PodName};
use sluice_proto::paths::RUN_DIR;

use crate::bug_report::BugReport;

const EXIT_STATUS: &str = "Exit status: 0 all is well; 1 the question could not be answered; \
2 mistake on the command line; 3 the node or the pod is broken.";

/// Shows what Sluice does on this node, and why.
#[derive(Debug, Parser)]
#[command(name = "sluicectl", version, after_help = EXIT_STATUS, disable_help_subcommand = true)]
pub struct Cli {
    /// How to print
    #[arg(short, long, global = true, value_enum, default_value_t = Output::Table)]
    pub output: Output,

    /// Directory of the node's sockets
    #[arg(long, global = true, env = "SLUICE_RUN_DIR", default_value = RUN_DIR, value_name = "DIR")]
    pub run_dir: PathBuf,

    /// Ask the agent of this node, through kubectl
    #[arg(long, global = true, value_name = "NODE", value_parser = node_name)]
    pub node: Option<String>,

    /// kubectl's context
    #[arg(long, global = true, value_name = "CONTEXT")]
    pub context: Option<String>,

    /// kubectl's kubeconfig
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<String>,

    /// Whether we are called as a kubectl plugin
    #[arg(skip)]
    pub is_plugin: bool,

    /// What to show
    #[command(subcommand)]
    pub question: Question,
}

/// Form of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people
    Table,
    /// For programs
    Json,
}

/// What to show.
#[derive(Debug, Subcommand)]
pub enum Question {
    /// The node and every pod on it, or one pod in full
    Status {
        /// Only this pod, read back from the kernel
        #[arg(long, value_name = "NAMESPACE/NAME")]
        pod: Option<PodArgument>,
    },
    /// Why a pod is in the mesh or not, and what to do about it
    Explain {
        /// The pod
        #[arg(value_name = "[NAMESPACE/]NAME")]
        pod: PodArgument,
        /// Its namespace, where NAME stands alone
        #[arg(short, long, default_value = "default")]
        namespace: String,
    },
    /// Every change of every pod, until interrupted
    Watch,
    /// Whether this node's kernel has what is needed
    Preflight,
    /// Everything about the node in one archive, without secrets
    BugReport(BugReport),
    /// A completion script
    Completion {
        /// For which shell
        shell: clap_complete::Shell,
    },
}

/// A pod as people write it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodArgument {
    /// Part before the '/'.
    pub namespace: Option<String>,
    /// Part after it.
    pub name: String,
}

impl std::str::FromStr for PodArgument {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (namespace, name) = match text.split_once('/') {
            Some((namespace, name)) => (Some(namespace), name),
            None => (None, text),
        };
        let namespace = namespace
            .map(|namespace| Namespace::parse(namespace).map(String::from))
            .transpose()
            .map_err(|error| error.to_string())?;
        let name = PodName::parse(name)
            .map(String::from)
            .map_err(|error| error.to_string())?;
        Ok(Self { namespace, name })
    }
}

impl Cli {
    /// Reads a command line, the program's name first.
    pub fn read(arguments: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        let mut arguments = arguments.into_iter().peekable();
        let name = arguments
            .peek()
            .map_or("sluicectl", |program| called_as(Path::new(program)));
        let matches = command(name).try_get_matches_from(arguments)?;
        let mut cli = Self::from_arg_matches(&matches)?;
        cli.is_plugin = name == PLUGIN;
        Ok(cli)
    }
}

/// The command, as it is to call itself in help and completion.
pub(crate) fn command(name: &'static str) -> Command {
    let command = Cli::command().bin_name(name);
    if name == "sluicectl" {
        command
    } else {
        command.name(name)
    }
}

/// The name of a node is an RFC 1123 subdomain, as a pod's is.
fn node_name(name: &str) -> Result<String, String> {
    PodName::parse(name)
        .map(String::from)
        .map_err(|_| format!("a node's name: {}", PodName::ALLOWED))
}

/// What a kubectl plugin calls itself.
const PLUGIN: &str = "kubectl sluice";

/// kubectl runs `kubectl-sluice` for `kubectl sluice`.
fn called_as(program: &Path) -> &'static str {
    match program.file_name().and_then(|name| name.to_str()) {
        Some("kubectl-sluice") => PLUGIN,
        _ => "sluicectl",
    }
}

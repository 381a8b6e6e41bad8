//! Everything that is known about a node, in one archive that may be shown to others: what the broker answers, the node's
//! files, and no secret.
//!
//! Collecting is best effort: what cannot be had is noted in `NOTES.txt`, because a report is wanted most when much is broken.

mod answers;
mod archive;
mod cluster;
mod files;
mod kubeconfig;
mod redact;

use std::io::Write;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::cli::Cli;
use crate::client::AskError;
use crate::kubectl::{Agent, Kubectl};
use redact::Redactor;

/// Where to look, and for what.
#[derive(Debug, Clone, Args)]
pub struct BugReport {
    /// The archive, which must not exist yet; '-' is the standard output [default: sluice-bug-report-TIME.tar]
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Directories of network configurations
    #[arg(
        long,
        value_name = "DIR",
        value_delimiter = ',',
        default_value = "/etc/cni/net.d,/host/etc/cni/net.d"
    )]
    pub cni_net_dir: Vec<PathBuf>,
    /// Directories of CNI plugins
    #[arg(
        long,
        value_name = "DIR",
        value_delimiter = ',',
        default_value = "/opt/cni/bin,/host/opt/cni/bin"
    )]
    pub cni_bin_dir: Vec<PathBuf>,
    /// Where the kubelet keeps the logs of pods
    #[arg(long, value_name = "DIR", default_value = "/var/log/pods")]
    pub log_dir: PathBuf,
    /// The plugin's credentials, of which no secret is taken
    #[arg(long, value_name = "FILE", default_value = "/var/lib/sluice/kubeconfig")]
    pub credentials: PathBuf,
    /// Only what this part of the node can tell
    #[arg(long, value_enum, default_value_t = Part::All, hide = true)]
    pub part: Part,
}

/// What to collect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Everything
    All,
    /// What the broker answers
    Answers,
    /// What is in the node's files
    Files,
}

/// What was collected so far.
#[derive(Debug, Default)]
pub(crate) struct Collection {
    entries: Vec<(String, Vec<u8>)>,
    notes: Vec<String>,
    redactor: Redactor,
}

impl Collection {
    /// Adds a file. `name` is its path in the archive.
    fn add(&mut self, name: impl Into<String>, content: impl Into<Vec<u8>>) {
        self.entries.push((name.into(), content.into()));
    }

    /// Something could not be had.
    fn note(&mut self, what: impl std::fmt::Display) {
        self.notes.push(what.to_string());
    }

    /// The files, without secrets. Only now, because a token that was found last may stand in what was found first.
    fn finish(mut self) -> Vec<(String, String)> {
        if !self.notes.is_empty() {
            let notes = self.notes.join("\n") + "\n";
            self.add("NOTES.txt", notes);
        }
        let redactor = self.redactor;
        self.entries
            .into_iter()
            .map(|(name, content)| (name, redactor.apply(&content)))
            .collect()
    }
}

/// On the node itself, or in one of the agent's containers.
pub(crate) async fn on_node(cli: &Cli, options: &BugReport, out: &mut impl Write) -> Result<(), AskError> {
    let mut collection = Collection::default();
    if options.part != Part::Files {
        answers::collect(&mut collection, &cli.run_dir).await;
    }
    if options.part != Part::Answers {
        files::collect(&mut collection, &cli.run_dir, options);
    }
    archive::write(options.file.as_deref(), &collection.finish(), out)
}

/// From afar: each container tells what it can see, the API server the rest.
pub(crate) fn of_node(
    kubectl: &Kubectl,
    agent: &Agent,
    options: &BugReport,
    out: &mut impl Write,
) -> Result<(), AskError> {
    let mut collection = Collection::default();
    cluster::collect(&mut collection, kubectl, agent);
    archive::write(options.file.as_deref(), &collection.finish(), out)
}

//! The benchmark: speed and size of the real processes on simulated nodes, each as a ratio to a floor that was measured
//! in the same run, interleaved with the subject. Floors: executing an empty program, `nft -f -` of the same rules in a
//! fresh network namespace, and a bare SOCK_SEQPACKET pair.

mod adds;
mod events;
mod floor;
mod handoff;
mod label;
mod peer;
mod report;
mod rig;
mod size;
mod stats;

use std::path::PathBuf;

use anyhow::Context;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use self::report::Report;
pub use self::size::peak_of;

/// Command line of `sluice-bench`.
#[derive(Debug, Clone, clap::Parser)]
#[command(about = "Measures Sluice against floors taken in the same run; needs root and nft")]
pub struct Options {
    /// Also write the table to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Measure only this: add, concurrent, flat, size, handoff, restart, drift, label.
    #[arg(long, value_name = "SUBJECT")]
    pub only: Option<Subject>,
}

/// A group of measurements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Subject {
    /// One ADD at a time.
    Add,
    /// Many ADDs at the same moment.
    Concurrent,
    /// ADD on an empty and on a full node.
    Flat,
    /// Size and memory.
    Size,
    /// Snapshot and live handoff.
    Handoff,
    /// Restart of executor and broker.
    Restart,
    /// The periodic look at all pods.
    Drift,
    /// Label changes.
    Label,
}

/// Measures; true if every target was met.
pub fn run(options: &Options) -> anyhow::Result<bool> {
    anyhow::ensure!(
        nix::unistd::geteuid().is_root(),
        "the benchmark makes network namespaces: run it as root"
    );
    // A descriptor for each pod's namespace, 500 and more.
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    let wanted = |subjects: &[Subject]| options.only.is_none_or(|only| subjects.contains(&only));
    let mut report = Report::default();
    if wanted(&[Subject::Size]) {
        size::plugin(&mut report).context("plugin size")?;
    }
    if wanted(&[Subject::Add, Subject::Label]) {
        let mut rig = rig::Rig::start(&[])?;
        if wanted(&[Subject::Add]) {
            adds::one_by_one(&mut report, &mut rig).context("ADD")?;
        }
        if wanted(&[Subject::Label]) {
            label::changes(&mut report, &mut rig).context("label changes")?;
        }
    }
    if wanted(&[Subject::Concurrent, Subject::Size, Subject::Drift]) {
        size::full_node(&mut report, &wanted).context("node with 250 pods")?;
    }
    if wanted(&[Subject::Flat, Subject::Handoff, Subject::Restart]) {
        handoff::large_node(&mut report, &wanted).context("node with 500 pods")?;
    }
    report.print_table();
    if let Some(path) = &options.json {
        report.write_json(path)?;
    }
    Ok(report.all_held())
}

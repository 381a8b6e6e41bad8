//! netns-opener: hands the executor sockets made in network namespaces that it may not enter itself.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand};
use sluice_netns_executor::opener::{Keyhole, NETNS_DIRECTORIES, Opener, Options, cage};
use sluice_proto::paths::{RUN_DIR, RunDir};
use sluice_runtime::{limits, telemetry};

/// Opens sockets in network namespaces for the netns-executor. Needs CAP_SYS_ADMIN and CAP_SYS_PTRACE, nothing else.
#[derive(Debug, Parser)]
#[command(name = "netns-opener", version)]
struct Arguments {
    /// Run-time directory; the executor listens below it.
    #[arg(long, env = "SLUICE_RUN_DIR", default_value = RUN_DIR)]
    run_dir: PathBuf,
    /// The host's proc file system.
    #[arg(long, default_value = "/proc")]
    host_proc: PathBuf,
    /// The host's network namespace, if it is not that of the host's process 1.
    #[arg(long)]
    host_netns: Option<PathBuf>,
    /// Directory with mounted network namespaces; may be given several times.
    #[arg(long = "netns-dir", default_values = NETNS_DIRECTORIES)]
    netns_directories: Vec<PathBuf>,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Exit status 0 if an opener is alive and caged; for exec probes.
    Healthcheck,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if matches!(arguments.command, Some(Command::Healthcheck)) {
        return ExitCode::from(u8::from(!caged_opener_runs(Path::new("/proc"))));
    }
    telemetry::init("netns-opener");
    match run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "netns-opener stops");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> anyhow::Result<()> {
    let open_files = limits::raise_open_files().context("cannot raise the limit of open files")?;
    let host_proc = arguments.host_proc;
    let keyhole = Keyhole::start(&host_proc)?;
    let options = Options {
        socket: RunDir::new(arguments.run_dir).opener_socket(),
        host_proc: host_proc.clone(),
        host_netns: arguments.host_netns,
        netns_directories: arguments.netns_directories.clone(),
    };
    let mut opener = Opener::new(options, keyhole)?;
    cage::confine_opener(&host_proc, &arguments.netns_directories).context("cannot confine the opener")?;
    tracing::info!(open_files, "netns-opener is ready and caged");
    Ok(opener.run()?)
}

/// Looks for a process of this name, other than ourselves, under a seccomp filter (proc_pid_status(5)).
fn caged_opener_runs(proc: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(proc) else {
        return false;
    };
    let own = std::process::id().to_string();
    entries
        .flatten()
        .filter(|entry| entry.file_name().to_str() != Some(own.as_str()))
        .filter_map(|entry| std::fs::read_to_string(entry.path().join("status")).ok())
        .any(|status| {
            let has = |line: &str| {
                status
                    .lines()
                    .any(|l| l.split_whitespace().eq(line.split_whitespace()))
            };
            has("Name: netns-opener") && has("Seccomp: 2") && !status.contains("\nState:\tZ")
        })
}

//! Keeps three things in place on a node: the CNI plugin's binary, its entry in the node's network configuration, and the
//! credentials of its decision without an agent. Takes them away when the node is to be left, and takes the plugin's log
//! lines meanwhile.
//!
//! Runs as uid 0, because the directories are root's, without any capability. Its only network is Unix sockets.

mod apply;
mod binary;
mod broker;
mod commands;
pub mod config;
mod edit;
pub mod entry;
mod files;
mod health;
mod host_root;
mod installer;
mod istio_log;
mod kubeconfig;
mod log_socket;
mod network;
mod node;
mod notes;
mod observe;
mod plan;
mod purge;
mod run_dir;
mod runtime_config;
mod service;
mod throttle;
mod watch;

use std::process::ExitCode;

use anyhow::Context;
use config::{Cli, Command, Flags};
use installer::Installer;
use sluice_proto::transport::uds::check_free;
use sluice_runtime::lease::Candidate;
use sluice_runtime::{limits, privileges, seccomp, shutdown};

/// Every system call that a running installer makes.
const SECCOMP: &str = include_str!("../seccomp/installer.json");

/// Carries out a command line.
pub fn execute(cli: Cli) -> anyhow::Result<ExitCode> {
    let flags = cli.flags;
    match cli.command.unwrap_or(Command::Run) {
        Command::Run => run(flags)?,
        Command::Plan => {
            privileges::drop_to(flags.capabilities())?;
            let mut installer = Installer::new(flags.clone(), flags.entry()?);
            event_loop()?.block_on(commands::plan(&mut installer, &mut std::io::stdout().lock()))?;
        }
        Command::Uninstall { purge, options } => {
            privileges::drop_to(flags.capabilities())?;
            let flags = host_root::followed(&flags, &options.host_root)?;
            commands::uninstall(&flags)?;
            if purge {
                purge::purge(&flags, &options)?;
            }
        }
        Command::Purge(options) => {
            privileges::drop_to(flags.capabilities())?;
            purge::purge(&host_root::followed(&flags, &options.host_root)?, &options)?;
        }
        Command::Healthcheck { alive } => {
            let healthy = health::check(&flags.run(), alive, &mut std::io::stdout().lock())?;
            return Ok(if healthy {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            });
        }
        Command::Prepare => prepare(&flags)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn run(flags: Flags) -> anyhow::Result<()> {
    limits::use_one_heap();
    limits::raise_open_files().context("cannot raise the open-files limit")?;
    let entry = flags.entry()?;
    if flags.run_dirs.broker_gid.is_some() {
        make_directories(&flags)?;
    }
    run_dir::check(&flags.run(), flags.allow_disk).context("the run directory cannot be used")?;
    commands::warn_without_stand_in(&flags);
    privileges::drop_to(flags.capabilities())?;
    let versions = binary::probe(&flags.source_dir.join(entry::PLUGIN)).context("nothing is installed")?;
    // All that can fail has been tried by now. Two would undo each other's work.
    let lease = Candidate::at(&flags.run().installer_lease())?;
    let _lease = if flags.stand_by {
        lease.wait()?
    } else {
        check_free(&health::socket(&flags.run()))?;
        lease.take_now()?
    };
    seccomp::install(SECCOMP)?;
    tracing::info!(
        versions = versions.join(", "),
        mode = flags.mode.as_str(),
        "starting"
    );
    let installer = Installer::new(flags, entry);
    installer.sweep();
    event_loop()?.block_on(async { Ok(service::run(installer, shutdown::signalled()?).await?) })
}

fn prepare(flags: &Flags) -> anyhow::Result<()> {
    let chown = caps::has_cap(None, caps::CapSet::Permitted, caps::Capability::CAP_CHOWN)?;
    let keep: &[caps::Capability] = if chown {
        &[caps::Capability::CAP_CHOWN]
    } else {
        &[]
    };
    privileges::drop_to(keep)?;
    make_directories(flags)
}

fn make_directories(flags: &Flags) -> anyhow::Result<()> {
    let istio = flags.istio_run_dir.as_deref();
    run_dir::prepare(&flags.run(), &flags.run_dirs, istio, flags.allow_disk)
        .context("the run directories cannot be made")
}

/// One thread for everything that waits; a second one only while the node is looked at.
fn event_loop() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(1)
        .build()
}

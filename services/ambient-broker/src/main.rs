//! Start-up order: settings, user, limits, privileges, seccomp; only then a thread, a socket or a request.

use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use sluice_ambient_broker::config::Args;
use sluice_ambient_broker::service::run;
use sluice_ambient_broker::{directories, standby};
use sluice_runtime::{init, lease, limits, privileges, seccomp, shutdown, telemetry};

const SECCOMP: &str = include_str!("../seccomp/ambient-broker.json");

fn main() -> ExitCode {
    telemetry::init("ambient-broker");
    let args = Args::parse();
    let work = || exit_code(start(&args));
    // What is done once is not done again by itself.
    if args.retire.is_some() {
        work()
    } else {
        init::run(work)
    }
}

fn exit_code(outcome: anyhow::Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(
                error = telemetry::chain(error.as_ref()),
                "ambient-broker cannot run"
            );
            ExitCode::FAILURE
        }
    }
}

fn start(args: &Args) -> anyhow::Result<()> {
    args.check_user()?;
    let mut config = args.service()?;
    limits::use_one_heap();
    let open_files = limits::raise_open_files().context("cannot raise the open-files limit")?;
    privileges::drop_to(&[])?;
    if args.stand_by {
        directories::wait(&config, args.manifests.is_none())?;
    }
    seccomp::install(SECCOMP)?;
    let _pod_lease = lease::of_pod(args.pod_lease.as_deref())?;
    tracing::info!(open_files, selection = config.selection.hash(), "starting");
    // One thread: every step is short, and a hand-over between threads costs more than the step.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let lease = runtime.block_on(async {
        if let Some(seconds) = args.retire {
            args.retire(seconds).await?;
            return Ok(None);
        }
        let stop = shutdown::signalled()?;
        let source = args.source().await?;
        let lease = if args.stand_by {
            standby::take(&config.run, config.listen, &*source.pods, &stop).await?
        } else {
            Some(standby::take_now(&config.run)?)
        };
        if lease.is_some() {
            config.node = source.node;
            run(config, source.pods, source.status, stop).await?;
        }
        anyhow::Ok(lease)
    })?;
    // Nobody else serves before the last task has ended.
    drop(runtime);
    drop(lease);
    Ok(())
}

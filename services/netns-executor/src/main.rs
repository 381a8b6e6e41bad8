//! `netns-executor`: programs redirection rules in pod network namespaces, with CAP_NET_ADMIN and nothing else.

use std::process::ExitCode;

use anyhow::Context;
use caps::Capability;
use sluice_netns_executor::config::{Arguments, Command, Config};
use sluice_netns_executor::start;
use sluice_runtime::{init, lease, limits, privileges, seccomp, telemetry};

fn main() -> ExitCode {
    let arguments = Arguments::read();
    telemetry::init("netns-executor");
    let config = Config::from(&arguments);
    match arguments.command {
        Some(Command::Healthcheck) => exit_code(start::healthcheck(&config.run)),
        None => init::run(|| exit_code(serve(config))),
    }
}

fn exit_code(outcome: anyhow::Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "cannot go on");
            ExitCode::FAILURE
        }
    }
}

fn serve(config: Config) -> anyhow::Result<()> {
    let _pod_lease = lease::of_pod(config.pod_lease.as_deref())?;
    limits::use_one_heap();
    let descriptors = limits::raise_open_files().context("cannot raise the open-files limit")?;
    tracing::info!(descriptors, "open-files limit");
    start::make_directories(&config)?;
    let _lease = start::take_lease(&config)?;
    privileges::drop_to(&[Capability::CAP_NET_ADMIN]).context("cannot drop privileges")?;
    seccomp::install_compiled(sluice_netns_executor::seccomp::EXECUTOR)
        .context("cannot install the seccomp filter")?;
    start::run(config)
}

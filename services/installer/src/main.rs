//! `installer`: keeps the plugin, its entry in the node's network configuration and its credentials in place.

use std::process::ExitCode;

use clap::Parser;
use sluice_installer::config::{Cli, Command};
use sluice_runtime::{init, telemetry};

fn main() -> ExitCode {
    telemetry::init("installer");
    let cli = Cli::parse();
    // Everything else is done once, and not again by itself.
    if matches!(cli.command, None | Some(Command::Run)) {
        init::run(|| exit_code(sluice_installer::execute(cli)))
    } else {
        exit_code(sluice_installer::execute(cli))
    }
}

fn exit_code(outcome: anyhow::Result<ExitCode>) -> ExitCode {
    match outcome {
        Ok(status) => status,
        Err(error) => {
            tracing::error!(error = telemetry::chain(error.as_ref()), "installer cannot go on");
            ExitCode::FAILURE
        }
    }
}

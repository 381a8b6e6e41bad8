//! `installer`: keeps the plugin, its entry in the node's network configuration and its credentials in place.

use std::process::ExitCode;

use clap::Parser;
use sluice_installer::config::Cli;
use sluice_runtime::telemetry;

fn main() -> ExitCode {
    telemetry::init("installer");
    match sluice_installer::execute(Cli::parse()) {
        Ok(status) => status,
        Err(error) => {
            tracing::error!(error = telemetry::chain(error.as_ref()), "installer cannot go on");
            ExitCode::FAILURE
        }
    }
}

//! `make bench`.

use std::process::ExitCode;

use clap::Parser;
use sluice_integration::bench;

fn main() -> ExitCode {
    match bench::run(&bench::Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("sluice-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

//! `make demo`.

use std::process::ExitCode;

use clap::Parser;
use sluice_integration::demo;

fn main() -> ExitCode {
    match demo::run(&demo::Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("sluice-demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

//! Executes a program with its own stdin and environment and tells on stderr, in KiB, the peak of its resident memory.
//! Small itself, because the kernel counts the memory of whoever executes a program as the program's.

use std::process::ExitCode;

use sluice_integration::bench;

fn main() -> ExitCode {
    let Some(program) = std::env::args_os().nth(1) else {
        eprintln!("usage: peak-memory PROGRAM");
        return ExitCode::FAILURE;
    };
    match bench::peak_of(program.as_ref()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("peak-memory: {error:#}");
            ExitCode::FAILURE
        }
    }
}

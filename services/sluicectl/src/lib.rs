//! The operator's command. It asks the node's broker, which reads back from the kernel, and shows what it answers:
//! readable tables, or the same facts as JSON. It changes nothing and needs no privilege but access to the socket; from
//! afar, what kubectl has.

mod bug_report;
mod cli;
mod client;
mod command;
mod kubectl;
mod render;
mod view;

use std::ffi::OsString;
use std::io::Write;

pub use cli::{Cli, Output};

/// Exit status: all is well.
pub const HEALTHY: u8 = 0;
/// Exit status: the question could not be answered.
pub const FAILED: u8 = 1;
/// Exit status: the answer is that something is broken. (2 is a mistake on the command line.)
pub const BROKEN: u8 = 3;

/// Carries out a command line and gives the exit status.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let cli = match Cli::read(arguments) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are no mistakes; clap knows where each belongs.
            let _ = error.print();
            return u8::try_from(error.exit_code()).unwrap_or(FAILED);
        }
    };
    match command::execute(&cli, &mut std::io::stdout().lock()) {
        Ok(status) => status,
        // Whoever read our output has seen enough.
        Err(error) if error.is_broken_pipe() => HEALTHY,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "sluicectl: {}", error.explain());
            FAILED
        }
    }
}

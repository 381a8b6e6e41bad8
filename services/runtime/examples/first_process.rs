//! A service that only says what happens to it, for the tests of `init`. An argument is the exit status that it ends with
//! at once, or `unready`: it does not handle signals yet.

use std::process::ExitCode;

use nix::sys::signal::{SigSet, Signal};

#[expect(clippy::print_stdout, reason = "the test reads it")]
fn main() -> ExitCode {
    sluice_runtime::telemetry::init("first-process");
    sluice_runtime::init::run(|| {
        let argument = std::env::args().nth(1);
        if argument.as_deref() == Some("unready") {
            println!("serving");
            loop {
                std::thread::park();
            }
        }
        let mut stop = SigSet::empty();
        stop.add(Signal::SIGTERM);
        if stop.thread_block().is_err() {
            return ExitCode::FAILURE;
        }
        println!("serving");
        if let Some(status) = argument {
            return ExitCode::from(status.parse::<u8>().unwrap_or(1));
        }
        let asked = stop.wait().is_ok();
        println!("stopping");
        ExitCode::from(u8::from(!asked))
    })
}

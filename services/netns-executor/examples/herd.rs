//! Processes that do nothing, for tests of looks at many: as many children as the argument says, which end with it.
#![expect(unsafe_code, reason = "fork has no safe form")]

use anyhow::Context;
use nix::sys::signal::Signal;
use nix::unistd::{ForkResult, Pid, fork, getppid, pause};

fn main() -> anyhow::Result<()> {
    let count: u32 = std::env::args().nth(1).context("how many?")?.parse()?;
    let parent = Pid::this();
    for _ in 0..count {
        // SAFETY: this process has one thread.
        if let ForkResult::Child = unsafe { fork() }? {
            nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
            if getppid() != parent {
                return Ok(());
            }
            break;
        }
    }
    loop {
        pause();
    }
}

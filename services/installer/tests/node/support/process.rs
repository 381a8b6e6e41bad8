//! The installer as a process.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, ExitStatus};
use std::time::Duration;

use super::wait_for;

/// The installer as a process; killed when dropped.
#[derive(Debug)]
pub(crate) struct Installer {
    pub(super) child: Child,
    pub(super) log: PathBuf,
}

impl Installer {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn terminate(&self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    }

    pub(crate) fn wait(&mut self, within: Duration) -> ExitStatus {
        let log = self.log.clone();
        wait_for(
            &format!("end\n{}", fs::read_to_string(log).unwrap_or_default()),
            within,
            || self.child.try_wait().unwrap(),
        )
    }
}

impl Drop for Installer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Processor time that a process has used (proc(5), fields 14 and 15 of stat).
pub(crate) fn cpu_time(pid: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    let per_second = rustix::param::clock_ticks_per_second();
    Duration::from_millis(ticks * 1000 / per_second)
}

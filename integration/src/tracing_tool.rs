//! Watching system calls with strace(1): of running processes, from now on, until asked.

use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;
use sluice_testkit::process::status::ProcStatus;
use sluice_testkit::process::{Process, Spawn};

use crate::mesh::SOON;

/// Where strace is.
pub const STRACE: &str = "/usr/bin/strace";

/// strace attached to processes.
#[derive(Debug)]
pub struct Strace {
    process: Process,
    log: PathBuf,
}

impl Strace {
    /// Attaches to every thread of these processes; `calls` is the argument of `-e trace=`.
    pub fn attach(pids: &[u32], calls: &str, log: &Path) -> anyhow::Result<Self> {
        let mut spawn = Spawn::program("strace", STRACE)
            .args(["-f", "-qq", "-e", "signal=none", "-e"])
            .arg(format!("trace={calls}"))
            .arg("-o")
            .arg(log);
        for pid in pids {
            spawn = spawn.arg("-p").arg(pid.to_string());
        }
        let process = spawn.start()?;
        process.wait_ready(SOON, || pids.iter().all(|pid| is_traced(*pid)))?;
        Ok(Self {
            process,
            log: log.to_owned(),
        })
    }

    /// Detaches and gives what was seen, a call a line.
    pub fn stop(self) -> anyhow::Result<Vec<String>> {
        self.process.signal(Signal::SIGINT)?;
        self.process.wait(SOON)?;
        let text = std::fs::read_to_string(&self.log)?;
        Ok(text
            .lines()
            .filter(|line| !line.contains("+++ exited"))
            .map(String::from)
            .collect())
    }
}

fn is_traced(pid: u32) -> bool {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return false;
    };
    tasks.flatten().all(|task| {
        let tid = task.file_name().to_str().and_then(|tid| tid.parse().ok());
        // A thread that has ended meanwhile needs no tracer.
        tid.and_then(|tid| ProcStatus::read(tid).ok())
            .is_none_or(|status| status.field("TracerPid") != "0")
    })
}

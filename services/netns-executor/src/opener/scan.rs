//! Finding the namespaces of running pods: one pass over the host's processes.
//!
//! What a scan says is a suggestion. A process may sit in a pod's control group and in another pod's or the host's
//! network; the executor takes a candidate only after it found one of the pod's addresses in it.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, fstat};
use sluice_proto::id::PodUid;
use sluice_proto::transport::descriptors::MAX_DESCRIPTORS;

use super::cgroup;
use super::enter::errno_of;
use super::keyhole::{Keyhole, KeyholeError};

/// A pod that makes namespaces without end cannot fill our memory: the oldest ones count.
const MAX_CANDIDATES: usize = 16;

/// Device and inode on nsfs: names a namespace among those that are alive at the same time.
pub(super) type NetnsId = (u64, u64);

/// A process that is in a namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Process {
    /// Clock ticks since boot (field 22 of /proc/PID/stat).
    started: u64,
    pid: u32,
}

/// One namespace that processes of a pod live in, and the oldest of them.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    process: Process,
    netns: NetnsId,
}

/// What the last scan found.
#[derive(Debug, Default)]
pub(super) struct Scan {
    candidates: HashMap<PodUid, Vec<Candidate>>,
    /// Processes looked at.
    pub(super) scanned: u32,
}

impl Scan {
    /// Looks once at every process below `proc`. Processes that vanish or cannot be read are left out; `host` is
    /// never a candidate.
    pub(super) fn run(
        proc: &Path,
        keyhole: &Keyhole,
        host: NetnsId,
    ) -> Result<Result<Self, Errno>, KeyholeError> {
        let (directory, entries) = match open_directory(proc) {
            Ok(opened) => opened,
            Err(error) => return Ok(Err(errno_of(&error))),
        };
        let mut scan = Self::default();
        let mut processes = Processes::new(directory);
        let mut found = Vec::new();
        for entry in entries.flatten() {
            if let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) {
                scan.scanned += 1;
                found.extend(processes.pod_process(pid));
            }
        }
        for batch in found.chunks(MAX_DESCRIPTORS) {
            let pids: Vec<u32> = batch.iter().map(|(_, process)| process.pid).collect();
            for ((uid, process), netns) in batch.iter().zip(keyhole.netns_of_each(&pids)?) {
                let Ok(netns) = netns.and_then(id_of) else {
                    continue;
                };
                let candidates = scan.candidates.entry(uid.clone()).or_default();
                let is_new = !candidates.iter().any(|known| known.netns == netns);
                // The process may have ended, and its pid be another's, since its control group was read.
                if netns != host && (!is_new || processes.started(process.pid) == Some(process.started)) {
                    remember(
                        candidates,
                        Candidate {
                            process: *process,
                            netns,
                        },
                    );
                }
            }
        }
        Ok(Ok(scan))
    }

    /// Opens the `index`-th namespace of a pod. ENOENT: there is none; ESRCH: it is no longer what the scan saw.
    pub(super) fn open(
        &self,
        keyhole: &Keyhole,
        uid: &PodUid,
        index: u32,
    ) -> Result<Result<OwnedFd, Errno>, KeyholeError> {
        let found = self.candidates.get(uid).and_then(|all| all.get(index as usize));
        let Some(candidate) = found else {
            return Ok(Err(Errno::ENOENT));
        };
        Ok(keyhole.netns_of(candidate.process.pid)?.and_then(|netns| {
            if id_of(&netns)? == candidate.netns {
                Ok(netns)
            } else {
                Err(Errno::ESRCH)
            }
        }))
    }
}

/// Device and inode behind a descriptor.
pub(super) fn id_of(netns: impl AsFd) -> Result<NetnsId, Errno> {
    fstat(netns).map(|stat| (stat.st_dev, stat.st_ino))
}

/// Keeps one entry a namespace, with its oldest process, oldest first.
fn remember(candidates: &mut Vec<Candidate>, new: Candidate) {
    match candidates.iter_mut().find(|known| known.netns == new.netns) {
        Some(known) => known.process = known.process.min(new.process),
        None => candidates.push(new),
    }
    candidates.sort_by_key(|candidate| candidate.process);
    candidates.truncate(MAX_CANDIDATES);
}

fn open_directory(proc: &Path) -> std::io::Result<(File, std::fs::ReadDir)> {
    Ok((File::open(proc)?, std::fs::read_dir(proc)?))
}

/// Reads small files about processes: a scan reads thousands, so path and content have one buffer each.
struct Processes {
    directory: File,
    path: String,
    content: Vec<u8>,
}

impl Processes {
    fn new(directory: File) -> Self {
        Self {
            directory,
            path: String::with_capacity(32),
            content: vec![0; 16 * 1024],
        }
    }

    /// One read(2) gives the whole of such a file.
    fn read(&mut self, pid: u32, name: &str) -> Option<&str> {
        self.path.clear();
        let _ = write!(self.path, "{pid}/{name}");
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
        let file = openat(&self.directory, self.path.as_str(), flags, Mode::empty()).ok()?;
        let length = File::from(file).read(&mut self.content).ok()?;
        std::str::from_utf8(&self.content[..length]).ok()
    }

    fn pod_process(&mut self, pid: u32) -> Option<(PodUid, Process)> {
        // Most processes of a node are in no pod; that is cheaper to see than to parse.
        let groups = self.read(pid, "cgroup").filter(|groups| groups.contains("pod"))?;
        let member = cgroup::parse(groups)?;
        let uid = PodUid::parse(member.uid).ok()?;
        let started = self.started(pid)?;
        Some((uid, Process { started, pid }))
    }

    /// The command name, in parentheses, may contain anything; so fields are counted from the last one.
    fn started(&mut self, pid: u32) -> Option<u64> {
        let fields = self.read(pid, "stat")?.rsplit_once(')')?.1;
        fields.split_whitespace().nth(19)?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_process_comes_first_and_stands_for_its_namespace() {
        let mut all = Vec::new();
        let mut add = |started, pid, inode| {
            remember(
                &mut all,
                Candidate {
                    process: Process { started, pid },
                    netns: (4, inode),
                },
            );
        };
        add(50, 10, 1);
        add(20, 900, 2);
        add(70, 3, 2);
        add(10, 800, 1);
        let order: Vec<_> = all.iter().map(|c| (c.netns.1, c.process.pid)).collect();
        assert_eq!(order, [(1, 800), (2, 900)]);
    }

    #[test]
    fn a_pod_cannot_fill_the_memory() {
        let mut all = Vec::new();
        for inode in 0..100 {
            let process = Process {
                started: 1000 - inode,
                pid: 1,
            };
            remember(
                &mut all,
                Candidate {
                    process,
                    netns: (4, inode),
                },
            );
        }
        assert_eq!(all.len(), MAX_CANDIDATES);
        assert_eq!(all[0].netns.1, 99);
    }

    #[test]
    fn the_start_time_is_found_behind_any_command_name() {
        let directory = tempfile::tempdir().unwrap();
        let stat = "7 (a) b ) S 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 12345 1 1 18446744073709551615\n";
        std::fs::create_dir(directory.path().join("7")).unwrap();
        std::fs::write(directory.path().join("7/stat"), stat).unwrap();
        let mut processes = Processes::new(File::open(directory.path()).unwrap());
        assert_eq!(processes.started(7), Some(12345));
    }
}

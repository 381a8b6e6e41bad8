//! What `/proc/PID` says about a process (proc_pid_status(5)).

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Context;
use caps::Capability;

/// Parsed `/proc/PID/status`.
#[derive(Debug, Clone)]
pub struct ProcStatus {
    pid: u32,
    fields: BTreeMap<String, String>,
}

impl ProcStatus {
    /// Reads the status of a process.
    pub fn read(pid: u32) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/status"))
            .with_context(|| format!("status of {pid}"))?;
        let fields = text
            .lines()
            .filter_map(|line| line.split_once(':'))
            .map(|(key, value)| (key.to_owned(), value.trim().to_owned()))
            .collect();
        Ok(Self { pid, fields })
    }

    /// A field's text; empty if there is none.
    pub fn field(&self, name: &str) -> &str {
        self.fields.get(name).map_or("", String::as_str)
    }

    fn number(&self, name: &str) -> u64 {
        self.field(name)
            .split_whitespace()
            .next()
            .and_then(|word| word.parse().ok())
            .unwrap_or(0)
    }

    fn capabilities(&self, name: &str) -> Vec<Capability> {
        let mask = u64::from_str_radix(self.field(name), 16).unwrap_or(u64::MAX);
        let mut list: Vec<Capability> = caps::all()
            .into_iter()
            .filter(|c| mask & c.bitmask() != 0)
            .collect();
        list.sort_by_key(Capability::index);
        list
    }

    /// Effective capabilities, by number.
    pub fn effective(&self) -> Vec<Capability> {
        self.capabilities("CapEff")
    }

    /// Permitted capabilities, by number.
    pub fn permitted(&self) -> Vec<Capability> {
        self.capabilities("CapPrm")
    }

    /// Bounding set, by number.
    pub fn bounding(&self) -> Vec<Capability> {
        self.capabilities("CapBnd")
    }

    /// Real, effective, saved and file system user id.
    pub fn uids(&self) -> Vec<u32> {
        self.field("Uid")
            .split_whitespace()
            .filter_map(|word| word.parse().ok())
            .collect()
    }

    /// Whether NoNewPrivs is set.
    pub fn no_new_privs(&self) -> bool {
        self.number("NoNewPrivs") == 1
    }

    /// Whether a seccomp filter is loaded (mode 2).
    pub fn has_seccomp_filter(&self) -> bool {
        self.number("Seccomp") == 2
    }

    /// Resident memory in bytes (`VmRSS`).
    pub fn rss(&self) -> u64 {
        self.number("VmRSS") * 1024
    }

    /// Highest resident memory in bytes (`VmHWM`).
    pub fn peak_rss(&self) -> u64 {
        self.number("VmHWM") * 1024
    }

    /// Number of threads.
    pub fn threads(&self) -> u64 {
        self.number("Threads")
    }

    /// Netns inode of each thread, by thread id.
    pub fn thread_netns(&self) -> anyhow::Result<BTreeMap<u32, u64>> {
        let mut found = BTreeMap::new();
        for entry in std::fs::read_dir(format!("/proc/{}/task", self.pid))? {
            let path = entry?.path();
            // A thread may end while we look.
            let Ok(link) = std::fs::read_link(path.join("ns/net")) else {
                continue;
            };
            let tid = path
                .file_name()
                .and_then(|n| n.to_str())
                .and_then(|n| n.parse().ok());
            if let (Some(tid), Some(inode)) = (tid, bracketed(&link.to_string_lossy())) {
                found.insert(tid, inode);
            }
        }
        Ok(found)
    }

    /// What each open descriptor points to.
    pub fn descriptors(&self) -> anyhow::Result<BTreeMap<u32, PathBuf>> {
        let mut found = BTreeMap::new();
        for entry in std::fs::read_dir(format!("/proc/{}/fd", self.pid))? {
            let path = entry?.path();
            let number = path
                .file_name()
                .and_then(|n| n.to_str())
                .and_then(|n| n.parse().ok());
            if let (Some(number), Ok(target)) = (number, std::fs::read_link(&path)) {
                found.insert(number, target);
            }
        }
        Ok(found)
    }
}

/// The number in `net:[4026531840]`.
fn bracketed(link: &str) -> Option<u64> {
    link.split_once('[')?.1.strip_suffix(']')?.parse().ok()
}

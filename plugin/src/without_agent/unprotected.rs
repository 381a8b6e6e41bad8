//! A record of each static pod that was let pass undecided. The agent is away just then, so that a log line alone would
//! be lost; the record is there until the next boot, also for `sluicectl bug-report`.

use std::fs;
use std::io;

use serde::Serialize;
use sluice_proto::id::{ContainerId, PodRef};
use sluice_proto::paths::RunDir;

use crate::log::unix_ms;

#[derive(Serialize)]
struct Record<'a> {
    pod: String,
    container_id: &'a str,
    unix_ms: u64,
    error: &'a str,
}

/// Leaves the record, one a pod. Nothing is made for it but its own directory: without the run directory (after a
/// reboot) there is nobody to find it.
pub(crate) fn record(
    run_dir: &RunDir,
    pod: &PodRef,
    container_id: &ContainerId,
    error: &str,
) -> io::Result<()> {
    let directory = run_dir.unprotected();
    match fs::create_dir(&directory) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => made?,
    }
    let record = Record {
        pod: pod.to_string(),
        container_id: container_id.as_str(),
        unix_ms: unix_ms(),
        error,
    };
    let text = serde_json::to_vec(&record)?;
    let temporary = directory.join(format!(".{}.{}", pod.uid, std::process::id()));
    fs::write(&temporary, text)?;
    fs::rename(&temporary, directory.join(format!("{}.json", pod.uid)))
}

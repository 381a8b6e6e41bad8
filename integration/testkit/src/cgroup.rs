//! A cgroup named like one that the kubelet makes for a pod's container.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// `<hierarchy>/kubepods/burstable/pod<uid>/<container id>`; removed when dropped.
#[derive(Debug)]
pub struct PodCgroup {
    path: PathBuf,
}

impl PodCgroup {
    /// Makes the cgroup in the `pids` hierarchy of cgroup v1, or in the unified one.
    pub fn create(pod_uid: &str, container_id: &str) -> io::Result<Self> {
        let v1 = Path::new("/sys/fs/cgroup/pids");
        let root = if v1.is_dir() {
            v1
        } else {
            Path::new("/sys/fs/cgroup")
        };
        let path = root
            .join("kubepods/burstable")
            .join(format!("pod{pod_uid}"))
            .join(container_id);
        // Another test may be removing the shared parents at this moment.
        let mut attempts = 0;
        loop {
            match std::fs::create_dir_all(&path) {
                Ok(()) => return Ok(Self { path }),
                Err(error) if error.kind() == io::ErrorKind::NotFound && attempts < 20 => attempts += 1,
                Err(error) => return Err(error),
            }
        }
    }

    /// Directory of the cgroup.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file that takes the pids that shall enter.
    pub(crate) fn procs(&self) -> io::Result<File> {
        File::options().write(true).open(self.path.join("cgroup.procs"))
    }
}

impl Drop for PodCgroup {
    fn drop(&mut self) {
        // rmdir(2) refuses while a process that was just killed is not reaped; the shared parents stay while used.
        let gone = || match std::fs::remove_dir(&self.path) {
            Ok(()) => true,
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        };
        let removed = crate::wait::poll_true("cgroup is empty", std::time::Duration::from_secs(2), gone);
        // Where a test fails anyway, this would hide why.
        assert!(
            removed.is_ok() || std::thread::panicking(),
            "{} is left behind: end its processes first",
            self.path.display()
        );
        for parent in self.path.ancestors().skip(1).take(3) {
            if std::fs::remove_dir(parent).is_err() {
                break;
            }
        }
    }
}

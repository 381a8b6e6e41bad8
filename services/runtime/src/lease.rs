//! The right to serve a node. During an upgrade two agents are on one node; of each service one process serves, and the
//! next begins when that one has ended, however it ended.
//!
//! Invariant: whoever serves holds an exclusive lock (flock(2)) on a directory that only processes of its service have
//! mounted; the broker's the installer as well, which makes it. The kernel releases it with the process, so that no crash
//! leaves it behind, and no process waits for a dead one.

use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

/// The right to serve; given up when dropped.
#[derive(Debug)]
#[must_use = "another process serves as soon as it is dropped"]
pub struct Lease(#[expect(dead_code, reason = "held for its lock")] File);

/// The right cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// Somebody has it, and we are not to wait.
    #[error("another process has {}: only one may serve a node; with --stand-by it is waited for", directory.display())]
    Taken {
        /// What is locked.
        directory: PathBuf,
    },
    /// The directory cannot be opened or locked.
    #[error("cannot lock {}", directory.display())]
    Lock {
        /// Which.
        directory: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// A process that wants to serve.
#[derive(Debug)]
pub struct Candidate {
    directory: PathBuf,
    file: File,
}

/// Whether a [`Candidate`] may serve now.
#[derive(Debug)]
pub enum Turn {
    /// It may.
    Ours(Lease),
    /// Another process serves.
    Theirs(Candidate),
}

impl Candidate {
    /// Opens the directory that stands for the service. Reading it is enough.
    pub fn at(directory: &Path) -> Result<Self, LeaseError> {
        match File::open(directory) {
            Ok(file) => Ok(Self {
                directory: directory.to_owned(),
                file,
            }),
            Err(source) => Err(LeaseError::Lock {
                directory: directory.to_owned(),
                source,
            }),
        }
    }

    /// Takes the lease if nobody has it.
    pub fn try_take(self) -> Result<Turn, LeaseError> {
        match self.file.try_lock() {
            Ok(()) => Ok(Turn::Ours(Lease(self.file))),
            Err(TryLockError::WouldBlock) => Ok(Turn::Theirs(self)),
            Err(TryLockError::Error(source)) => Err(LeaseError::Lock {
                directory: self.directory,
                source,
            }),
        }
    }

    /// Takes the lease, or fails if somebody has it.
    pub fn take_now(self) -> Result<Lease, LeaseError> {
        match self.try_take()? {
            Turn::Ours(lease) => Ok(lease),
            Turn::Theirs(Self { directory, .. }) => Err(LeaseError::Taken { directory }),
        }
    }

    /// Waits, for as long as it takes, until whoever has the lease has ended. Blocks the thread; a signal that is not handled
    /// ends the process as ever.
    pub fn wait(self) -> Result<Lease, LeaseError> {
        let candidate = match self.try_take()? {
            Turn::Ours(lease) => return Ok(lease),
            Turn::Theirs(candidate) => candidate,
        };
        candidate.tell_waiting();
        loop {
            match candidate.file.lock() {
                Ok(()) => return Ok(Lease(candidate.file)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => {
                    return Err(LeaseError::Lock {
                        directory: candidate.directory,
                        source,
                    });
                }
            }
        }
    }

    /// Says that another process serves.
    pub fn tell_waiting(&self) {
        tracing::info!(lease = %self.directory.display(), "standing by: another process has the lease");
    }
}

/// Waits until no other container of our pod holds `directory`, if one is named. The lease of the node comes after it, so that
/// of one pod one process at a time wants that, and has the pod's ports.
pub fn of_pod(directory: Option<&Path>) -> Result<Option<Lease>, LeaseError> {
    directory
        .map(|directory| Candidate::at(directory)?.wait())
        .transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(directory: &tempfile::TempDir) -> Candidate {
        Candidate::at(directory.path()).unwrap()
    }

    #[test]
    fn one_has_it_the_next_is_told_and_waits_for_its_end() {
        let directory = tempfile::tempdir().unwrap();
        let first = candidate(&directory).take_now().unwrap();
        let error = candidate(&directory).take_now().unwrap_err();
        assert!(matches!(error, LeaseError::Taken { .. }), "{error}");
        assert!(matches!(
            candidate(&directory).try_take().unwrap(),
            Turn::Theirs(_)
        ));

        let waits = candidate(&directory);
        let waiting = std::thread::spawn(move || waits.wait().unwrap());
        drop(first);
        let second = waiting.join().unwrap();
        assert!(matches!(
            candidate(&directory).try_take().unwrap(),
            Turn::Theirs(_)
        ));
        drop(second);
        assert!(matches!(candidate(&directory).try_take().unwrap(), Turn::Ours(_)));
    }

    #[test]
    fn a_directory_that_is_not_there_is_named() {
        let error = Candidate::at(Path::new("/nowhere/at/all")).unwrap_err();
        assert_eq!(error.to_string(), "cannot lock /nowhere/at/all");
    }
}

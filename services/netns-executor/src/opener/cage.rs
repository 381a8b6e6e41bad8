//! What the opener's two processes can still do once they serve: capabilities, Landlock, seccomp.
//!
//! CAP_SYS_PTRACE with a view of the host's `/proc` is root on the node (`/proc/PID/root`), and CAP_SYS_ADMIN is
//! more than one wants to lose. Each process therefore keeps one of them, and only the calls its job consists of.

use std::path::{Path, PathBuf};

use caps::Capability;
use landlock::{
    ABI, Access, AccessFs, AccessNet, PathBeneath, PathFd, PathFdError, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};
use sluice_runtime::privileges::{self, PrivilegeError};
use sluice_runtime::seccomp::{SeccompError, install_compiled};
use sluice_runtime::telemetry::chain;

/// Newest Landlock interface that this cage was tested with; older kernels enforce what they know.
const LANDLOCK: ABI = ABI::V6;

/// The cage could not be closed.
#[derive(Debug, thiserror::Error)]
pub enum CageError {
    /// Capabilities.
    #[error(transparent)]
    Privileges(#[from] PrivilegeError),
    /// Landlock (Linux 5.13, CONFIG_SECURITY_LANDLOCK).
    #[error("cannot set up Landlock")]
    Landlock(#[from] RulesetError),
    /// The directory to be read.
    #[error("cannot open the proc directory")]
    Proc(#[from] PathFdError),
    /// seccomp.
    #[error(transparent)]
    Seccomp(#[from] SeccompError),
}

/// Confines the calling thread, and all it will start, to what the opener proper does: read below `proc` and the
/// netns directories, dial Unix sockets, enter and make network namespaces, open netlink and datagram sockets there.
///
/// A netns directory that does not exist yet stays out of reach for this process's life.
pub fn confine_opener(proc: &Path, netns_directories: &[PathBuf]) -> Result<(), CageError> {
    privileges::drop_to(&[Capability::CAP_SYS_ADMIN])?;
    let existing = netns_directories.iter().filter_map(|directory| match PathFd::new(directory) {
        Ok(descriptor) => Some(Ok::<_, RulesetError>(PathBeneath::new(descriptor, AccessFs::ReadFile))),
        Err(error) => {
            tracing::warn!(directory = %directory.display(), error = chain(&error), "no namespaces from here");
            None
        }
    });
    let status = Ruleset::default()
        .handle_access(AccessFs::from_all(LANDLOCK))?
        .handle_access(AccessNet::from_all(LANDLOCK))?
        .scope(Scope::from_all(LANDLOCK))?
        .create()?
        .add_rule(PathBeneath::new(
            PathFd::new(proc)?,
            AccessFs::ReadFile | AccessFs::ReadDir,
        ))?
        .add_rules(existing)?
        .restrict_self()?;
    if status.ruleset == RulesetStatus::NotEnforced {
        tracing::warn!("this kernel has no Landlock: seccomp and capabilities alone confine the opener");
    }
    install_compiled(crate::seccomp::OPENER)?;
    Ok(())
}

/// Confines the calling thread to what the helper does: open files for reading, and pass them on unread.
pub fn confine_keyhole() -> Result<(), CageError> {
    privileges::drop_to(&[Capability::CAP_SYS_PTRACE])?;
    install_compiled(crate::seccomp::KEYHOLE)?;
    Ok(())
}

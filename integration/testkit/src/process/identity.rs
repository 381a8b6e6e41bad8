//! What a process runs as, and how it comes to be that.

use std::io;

use caps::Capability;
use nix::unistd::{Gid, Uid};

/// What a process runs as.
#[derive(Debug, Clone)]
pub struct Identity {
    /// User and group id.
    pub uid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Bounding, permitted and effective set; a non-root user gets an empty permitted set whatever is listed here.
    pub capabilities: Vec<Capability>,
}

impl Identity {
    /// uid 0 with exactly these capabilities, as a container has them.
    pub fn root_with(capabilities: &[Capability]) -> Self {
        Self {
            uid: 0,
            groups: Vec::new(),
            capabilities: capabilities.to_vec(),
        }
    }

    /// A user other than root, without capabilities.
    pub fn user(uid: u32) -> Self {
        Self {
            uid,
            groups: Vec::new(),
            capabilities: Vec::new(),
        }
    }

    /// The same, also a member of these groups.
    #[must_use]
    pub fn in_groups(mut self, groups: &[u32]) -> Self {
        self.groups = groups.to_vec();
        self
    }
}

/// An [`Identity`] worked out before the fork.
#[derive(Debug)]
pub(super) struct Descent {
    uid: u32,
    groups: Vec<Gid>,
    dropped: Vec<Capability>,
}

impl Descent {
    pub(super) fn plan(identity: &Identity) -> Self {
        Self {
            uid: identity.uid,
            groups: identity.groups.iter().copied().map(Gid::from_raw).collect(),
            dropped: caps::all()
                .into_iter()
                .filter(|c| !identity.capabilities.contains(c))
                .collect(),
        }
    }

    /// As container runtimes do: bounding set, groups, user, NoNewPrivs. At exec, uid 0 gets the bounding set as
    /// permitted and effective set, another user gets nothing (capabilities(7)).
    pub(super) fn descend(&self) -> io::Result<()> {
        for capability in &self.dropped {
            // A capability the running kernel does not know is not there to be dropped.
            let _ = caps::drop(None, caps::CapSet::Bounding, *capability);
        }
        nix::unistd::setgroups(&self.groups)?;
        nix::unistd::setresgid(
            Gid::from_raw(self.uid),
            Gid::from_raw(self.uid),
            Gid::from_raw(self.uid),
        )?;
        nix::unistd::setresuid(
            Uid::from_raw(self.uid),
            Uid::from_raw(self.uid),
            Uid::from_raw(self.uid),
        )?;
        nix::sys::prctl::set_no_new_privs()?;
        Ok(())
    }
}

//! Dropping to exactly the capabilities a service declares, for good.

use caps::{CapSet, Capability, CapsHashSet};

/// Privileges could not be dropped, or are not what was asked for afterwards.
#[derive(Debug, thiserror::Error)]
pub enum PrivilegeError {
    /// A capability set could not be read or written.
    #[error("cannot {action} the {set:?} capability set")]
    Capabilities {
        /// read or set.
        action: &'static str,
        /// Which set.
        set: CapSet,
        /// Why.
        #[source]
        source: caps::errors::CapsError,
    },
    /// A capability that the service cannot work without is not there to keep.
    #[error("{missing:?} missing: start the process with exactly {needed:?}")]
    Missing {
        /// What is missing.
        missing: Vec<Capability>,
        /// What is needed.
        needed: Vec<Capability>,
    },
    /// `PR_SET_NO_NEW_PRIVS` failed (prctl(2)).
    #[error("cannot set no_new_privs")]
    NoNewPrivs(#[source] std::io::Error),
    /// A set holds something else than what was asked for.
    #[error("{set:?} capability set is {actual:?} after the drop")]
    NotDropped {
        /// Which set.
        set: CapSet,
        /// What it holds.
        actual: CapsHashSet,
    },
}

/// Drops to exactly `keep` in every capability set (ambient and inheritable: nothing) and sets no_new_privs.
///
/// Per thread: call it before any other thread exists. The result is read back from the kernel.
pub fn drop_to(keep: &[Capability]) -> Result<(), PrivilegeError> {
    let wanted: CapsHashSet = keep.iter().copied().collect();
    let permitted = read(CapSet::Permitted)?;
    let missing: Vec<_> = keep
        .iter()
        .copied()
        .filter(|cap| !permitted.contains(cap))
        .collect();
    if !missing.is_empty() {
        return Err(PrivilegeError::Missing {
            missing,
            needed: keep.to_vec(),
        });
    }
    nix::sys::prctl::set_no_new_privs().map_err(|errno| PrivilegeError::NoNewPrivs(errno.into()))?;
    // Leaving the bounding set needs CAP_SETPCAP; without it the set's creator (the container runtime) decides.
    if permitted.contains(&Capability::CAP_SETPCAP) {
        for surplus in read(CapSet::Bounding)?.difference(&wanted) {
            caps::drop(None, CapSet::Bounding, *surplus).map_err(|source| PrivilegeError::Capabilities {
                action: "set",
                set: CapSet::Bounding,
                source,
            })?;
        }
    }
    let empty = CapsHashSet::new();
    for (set, value) in [
        (CapSet::Ambient, &empty),
        (CapSet::Inheritable, &empty),
        (CapSet::Effective, &wanted),
        (CapSet::Permitted, &wanted),
    ] {
        caps::set(None, set, value).map_err(|source| PrivilegeError::Capabilities {
            action: "set",
            set,
            source,
        })?;
        let actual = read(set)?;
        if actual != *value {
            return Err(PrivilegeError::NotDropped { set, actual });
        }
    }
    Ok(())
}

fn read(set: CapSet) -> Result<CapsHashSet, PrivilegeError> {
    caps::read(None, set).map_err(|source| PrivilegeError::Capabilities {
        action: "read",
        set,
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Capabilities are per thread, so a test can lose its own and the test runner keeps its.
    #[test]
    fn nothing_but_the_declared_set_is_left() {
        std::thread::spawn(|| {
            drop_to(&[Capability::CAP_NET_ADMIN]).unwrap();
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            let field = |name: &str| {
                let line = status.lines().find(|line| line.starts_with(name)).unwrap();
                line.split_whitespace().nth(1).unwrap().to_owned()
            };
            let net_admin = format!("{:016x}", 1_u64 << 12);
            for set in ["CapPrm:", "CapEff:", "CapBnd:"] {
                assert_eq!(field(set), net_admin, "{set}");
            }
            for set in ["CapInh:", "CapAmb:"] {
                assert_eq!(field(set), format!("{:016x}", 0), "{set}");
            }
            assert_eq!(field("NoNewPrivs:"), "1");
            let refused = drop_to(&[Capability::CAP_SYS_ADMIN]).unwrap_err().to_string();
            assert!(refused.starts_with("[CAP_SYS_ADMIN] missing"), "{refused}");
        })
        .join()
        .unwrap();
    }
}

//! The one place that enters network namespaces: on a thread that opens sockets there and ends.
#![expect(clippy::disallowed_methods, reason = "the one netns module of netns-opener")]

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use nix::sys::statfs::{FsType, fstatfs};
use sluice_proto::opener::LegacyTables;

/// `NSFS_MAGIC` (include/uapi/linux/magic.h).
const NSFS_MAGIC: FsType = FsType(0x6e73_6673);

/// What the executor gets: the namespace and sockets made in it.
#[derive(Debug)]
pub(super) struct Opened {
    netns: OwnedFd,
    netfilter: OwnedFd,
    route: OwnedFd,
    inet: Option<OwnedFd>,
    inet6: Option<OwnedFd>,
}

impl Opened {
    /// The descriptors in the order of the protocol.
    pub(super) fn into_descriptors(self) -> Vec<OwnedFd> {
        [
            Some(self.netns),
            Some(self.netfilter),
            Some(self.route),
            self.inet,
            self.inet6,
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// Which of the optional ones there are.
    pub(super) fn legacy(&self) -> LegacyTables {
        LegacyTables {
            ipv4: self.inet.is_some(),
            ipv6: self.inet6.is_some(),
        }
    }
}

/// Refuses whatever is not a descriptor of a namespace. That it is one of the network kind is checked by setns(2).
pub(super) fn require_nsfs(descriptor: &OwnedFd) -> Result<(), Errno> {
    if fstatfs(descriptor)?.filesystem_type() == NSFS_MAGIC {
        Ok(())
    } else {
        Err(Errno::EINVAL)
    }
}

/// Opens sockets in `netns`. `proc` is a proc file system that shows this process.
pub(super) fn open_in(netns: OwnedFd, proc: &Path) -> Result<Opened, Errno> {
    require_nsfs(&netns)?;
    on_thread(proc, move |proc| {
        setns(&netns, CloneFlags::CLONE_NEWNET)?;
        open_sockets(netns, proc)
    })
}

/// Opens sockets in a new, empty namespace. `lo` is down there: this process may not change that.
pub(super) fn open_scratch(proc: &Path) -> Result<Opened, Errno> {
    on_thread(proc, |proc| {
        unshare(CloneFlags::CLONE_NEWNET)?;
        let netns = File::open(proc.join("thread-self/ns/net")).map_err(|error| errno_of(&error))?;
        open_sockets(netns.into(), proc)
    })
}

/// Opens a socket in `netns` that lists the sockets there.
pub(super) fn open_diagnostics(netns: OwnedFd, proc: &Path) -> Result<OwnedFd, Errno> {
    require_nsfs(&netns)?;
    on_thread(proc, move |_| {
        setns(&netns, CloneFlags::CLONE_NEWNET)?;
        netlink(SockProtocol::NetlinkSockDiag)
    })
}

/// The error number of an I/O error; EIO if it has none.
pub(super) fn errno_of(error: &std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

fn netlink(protocol: SockProtocol) -> Result<OwnedFd, Errno> {
    socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        protocol,
    )
}

fn open_sockets(netns: OwnedFd, proc: &Path) -> Result<Opened, Errno> {
    let legacy = |names: &str, family| {
        // Only asking a legacy table about its content makes the kernel create it in this namespace, with its hooks:
        // so nothing is opened, and later asked, where this list is empty. It is unreadable in a pod with a user
        // namespace of its own, which then counts as without.
        let names = std::fs::read(proc.join("thread-self/net").join(names)).unwrap_or_default();
        if names.is_empty() {
            return Ok(None);
        }
        socket(family, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None).map(Some)
    };
    Ok(Opened {
        netfilter: netlink(SockProtocol::NetlinkNetFilter)?,
        route: netlink(SockProtocol::NetlinkRoute)?,
        inet: legacy("ip_tables_names", AddressFamily::Inet)?,
        inet6: legacy("ip6_tables_names", AddressFamily::Inet6)?,
        netns,
    })
}

fn on_thread<T, F>(proc: &Path, work: F) -> Result<T, Errno>
where
    T: Send + 'static,
    F: FnOnce(&Path) -> Result<T, Errno> + Send + 'static,
{
    let proc: PathBuf = proc.to_owned();
    std::thread::Builder::new()
        .stack_size(64 * 1024)
        .spawn(move || work(&proc))
        .map_err(|error| errno_of(&error))?
        .join()
        .unwrap_or(Err(Errno::EIO))
}

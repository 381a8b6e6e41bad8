//! The one place that enters a network namespace. It does so for good, on the main thread, which is the only one:
//! the process ends soon, and Unix sockets with a path do not depend on the namespace.
#![expect(clippy::disallowed_methods, reason = "the one netns module of the plugin")]

use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use nix::sys::stat::{Mode, fstat, stat};
use sluice_proto::id::NetnsPath;

use crate::log::{Level, line};

/// The pod's network namespace could not be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NetnsError {
    #[error("cannot open {path}")]
    Open {
        path: NetnsPath,
        #[source]
        source: Errno,
    },
    #[error("{path} (inode {inode}) is the host's own network namespace (inode {own}), not a pod's")]
    Host { path: NetnsPath, inode: u64, own: u64 },
    #[error("cannot tell {path} from the host's network namespace")]
    Compare {
        path: NetnsPath,
        #[source]
        source: Errno,
    },
    #[error("{path} is not a network namespace that can be entered")]
    Enter {
        path: NetnsPath,
        #[source]
        source: Errno,
    },
    #[error("cannot open a {kind} socket in {path}")]
    Socket {
        kind: &'static str,
        path: NetnsPath,
        #[source]
        source: Errno,
    },
}

/// Enters the namespace and opens what the executor needs to work in it, in the order it expects: the namespace
/// itself, NETLINK_NETFILTER, NETLINK_ROUTE twice (requests, and link notifications that are never mixed with
/// replies), then for each family with legacy iptables tables a datagram socket through which those can be read and
/// replaced (`IPT_SO_GET_INFO`, linux/netfilter_ipv4/ip_tables.h). The last are never bound or sent on.
pub(crate) fn open_sockets(path: &NetnsPath) -> Result<Vec<OwnedFd>, NetnsError> {
    let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
    let netns = open(path.as_str(), flags, Mode::empty()).map_err(|source| NetnsError::Open {
        path: path.clone(),
        source,
    })?;
    refuse_own(path, &netns)?;
    setns(netns.as_fd(), CloneFlags::CLONE_NEWNET).map_err(|source| NetnsError::Enter {
        path: path.clone(),
        source,
    })?;
    let netlink = |kind, protocol| {
        let family = AddressFamily::Netlink;
        new_socket(path, kind, family, SockType::Raw, Some(protocol))
    };
    let mut descriptors = Vec::with_capacity(6);
    descriptors.push(netns);
    descriptors.push(netlink("NETLINK_NETFILTER", SockProtocol::NetlinkNetFilter)?);
    descriptors.push(netlink("NETLINK_ROUTE", SockProtocol::NetlinkRoute)?);
    descriptors.push(netlink("NETLINK_ROUTE", SockProtocol::NetlinkRoute)?);
    for (kind, family, names) in [
        (
            "AF_INET",
            AddressFamily::Inet,
            "/proc/thread-self/net/ip_tables_names",
        ),
        (
            "AF_INET6",
            AddressFamily::Inet6,
            "/proc/thread-self/net/ip6_tables_names",
        ),
    ] {
        if has_tables(names) {
            descriptors.push(new_socket(path, kind, family, SockType::Datagram, None)?);
        }
    }
    Ok(descriptors)
}

/// The plugin runs in the host's namespace; rules for a pod there would redirect the whole node. Without `/proc`
/// nobody here can tell; the executor, which knows the host's namespace from its opener, refuses it too.
fn refuse_own(path: &NetnsPath, netns: &OwnedFd) -> Result<(), NetnsError> {
    let of = |stat: nix::Result<nix::sys::stat::FileStat>| {
        stat.map_err(|source| NetnsError::Compare {
            path: path.clone(),
            source,
        })
    };
    let own = match stat("/proc/self/ns/net") {
        Err(Errno::ENOENT) => return Ok(()),
        own => of(own)?,
    };
    let theirs = of(fstat(netns))?;
    if (theirs.st_dev, theirs.st_ino) == (own.st_dev, own.st_ino) {
        return Err(NetnsError::Host {
            path: path.clone(),
            inode: theirs.st_ino,
            own: own.st_ino,
        });
    }
    Ok(())
}

fn new_socket(
    path: &NetnsPath,
    kind: &'static str,
    family: AddressFamily,
    socket_type: SockType,
    protocol: Option<SockProtocol>,
) -> Result<OwnedFd, NetnsError> {
    socket(family, socket_type, SockFlag::SOCK_CLOEXEC, protocol).map_err(|source| NetnsError::Socket {
        kind,
        path: path.clone(),
        source,
    })
}

/// Whether the namespace has legacy tables of a family. When it cannot be told, as if it had: a socket too many costs
/// nothing, rules of an older agent that stay behind do harm.
fn has_tables(names: &str) -> bool {
    match std::fs::read(names) {
        Ok(names) => !names.is_empty(),
        // The kernel has no legacy iptables, or the module was never loaded; or there is no /proc to ask.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => false,
        Err(error) => {
            let error = error.to_string();
            line(
                Level::Warn,
                "cannot tell whether the pod has legacy iptables rules",
                &[("file", names), ("error", &error)],
            );
            true
        }
    }
}

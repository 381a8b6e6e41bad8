//! The one place that enters a network namespace. The main thread does so for good: the process ends soon, and Unix
//! sockets with a path do not depend on the namespace. What needs the host's network afterwards runs on a thread of its own.
#![expect(clippy::disallowed_methods, reason = "the one netns module of the plugin")]

use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use nix::sys::stat::{FileStat, Mode, fstat};
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
    #[error("{path} is another network namespace by now")]
    Replaced { path: NetnsPath },
    #[error("cannot return to the host's network namespace: there is no /proc")]
    NoWayBack,
    #[error("cannot return to the host's network namespace")]
    Return(#[source] Errno),
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
    #[error("cannot open a {kind} socket in {path}")]
    Socket {
        kind: &'static str,
        path: NetnsPath,
        #[source]
        source: Errno,
    },
}

/// The namespace that the main thread is in from now on.
#[derive(Debug)]
pub(crate) struct PodNetns {
    path: NetnsPath,
    /// Device and inode. They name this namespace alone while the process is in it.
    identity: (u64, u64),
    /// Not yet handed over.
    descriptor: Option<OwnedFd>,
    /// Where the process came from; `None` without `/proc`.
    host: Option<OwnedFd>,
}

impl PodNetns {
    /// Enters the namespace at `path`, unless it is the host's.
    pub(crate) fn enter(path: &NetnsPath) -> Result<Self, NetnsError> {
        let netns = open_path(path)?;
        let (host, identity) = refuse_own(path, &netns)?;
        setns(netns.as_fd(), CloneFlags::CLONE_NEWNET).map_err(|source| NetnsError::Enter {
            path: path.clone(),
            source,
        })?;
        Ok(Self {
            path: path.clone(),
            identity,
            descriptor: Some(netns),
            host,
        })
    }

    /// Opens what the executor needs to work in the namespace, in the order it expects: the namespace itself,
    /// NETLINK_NETFILTER, NETLINK_ROUTE twice (requests, and link notifications that are never mixed with replies), then
    /// for each family with legacy iptables tables a datagram socket through which those can be read and replaced
    /// (`IPT_SO_GET_INFO`, linux/netfilter_ipv4/ip_tables.h). The last are never bound or sent on.
    pub(crate) fn open_sockets(&mut self) -> Result<Vec<OwnedFd>, NetnsError> {
        let netlink = |kind, protocol| {
            let family = AddressFamily::Netlink;
            new_socket(&self.path, kind, family, SockType::Raw, Some(protocol))
        };
        let mut descriptors = Vec::with_capacity(6);
        descriptors.push(match self.descriptor.take() {
            Some(netns) => netns,
            None => self.reopen()?,
        });
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
                descriptors.push(new_socket(&self.path, kind, family, SockType::Datagram, None)?);
            }
        }
        Ok(descriptors)
    }

    /// The same sockets in another namespace, made on a thread of its own.
    pub(crate) fn open_elsewhere(path: &NetnsPath) -> Result<Vec<OwnedFd>, NetnsError> {
        std::thread::scope(|scope| {
            let thread =
                std::thread::Builder::new().spawn_scoped(scope, || Self::enter(path)?.open_sockets());
            let done = thread.map_err(NetnsError::Thread)?.join();
            // A panic has ended the process by now.
            done.unwrap_or(Err(NetnsError::NoWayBack))
        })
    }

    /// For another try: the same namespace, or an error if the path leads to another one by now.
    fn reopen(&self) -> Result<OwnedFd, NetnsError> {
        let netns = open_path(&self.path)?;
        if identity(&self.path, fstat(&netns))? != self.identity {
            return Err(NetnsError::Replaced {
                path: self.path.clone(),
            });
        }
        Ok(netns)
    }

    /// Does `work` on a thread in the host's network namespace, and waits for it.
    pub(crate) fn outside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, NetnsError> {
        let host = self.host.as_ref().ok_or(NetnsError::NoWayBack)?;
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().spawn_scoped(scope, || {
                setns(host.as_fd(), CloneFlags::CLONE_NEWNET)
                    .map(|()| work())
                    .map_err(NetnsError::Return)
            });
            let done = thread.map_err(NetnsError::Thread)?.join();
            // A panic has ended the process by now.
            done.unwrap_or(Err(NetnsError::NoWayBack))
        })
    }
}

/// The namespace that the process is in, with the netlink sockets that the executor needs of the host's.
pub(crate) fn open_own() -> Result<Vec<OwnedFd>, NetnsError> {
    let path = NetnsPath::parse("/proc/self/ns/net").map_err(|_| NetnsError::NoWayBack)?;
    let netlink = |kind, protocol| {
        let family = AddressFamily::Netlink;
        new_socket(&path, kind, family, SockType::Raw, Some(protocol))
    };
    Ok(vec![
        open_path(&path)?,
        netlink("NETLINK_NETFILTER", SockProtocol::NetlinkNetFilter)?,
        netlink("NETLINK_ROUTE", SockProtocol::NetlinkRoute)?,
    ])
}

fn open_path(path: &NetnsPath) -> Result<OwnedFd, NetnsError> {
    let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
    open(path.as_str(), flags, Mode::empty()).map_err(|source| NetnsError::Open {
        path: path.clone(),
        source,
    })
}

fn identity(path: &NetnsPath, stat: nix::Result<FileStat>) -> Result<(u64, u64), NetnsError> {
    let stat = stat.map_err(|source| NetnsError::Compare {
        path: path.clone(),
        source,
    })?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Gives the namespace the process is in, and the identity of the other one.
///
/// The plugin runs in the host's namespace; rules for a pod there would redirect the whole node. Without `/proc`
/// nobody here can tell; the executor, which knows the host's namespace from its opener, refuses it too.
fn refuse_own(path: &NetnsPath, netns: &OwnedFd) -> Result<(Option<OwnedFd>, (u64, u64)), NetnsError> {
    let theirs = identity(path, fstat(netns))?;
    let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
    let host = match open("/proc/self/ns/net", flags, Mode::empty()) {
        Err(Errno::ENOENT) => return Ok((None, theirs)),
        host => host.map_err(|source| NetnsError::Compare {
            path: path.clone(),
            source,
        })?,
    };
    let own = identity(path, fstat(&host))?;
    if theirs == own {
        return Err(NetnsError::Host {
            path: path.clone(),
            inode: theirs.1,
            own: own.1,
        });
    }
    Ok((Some(host), theirs))
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

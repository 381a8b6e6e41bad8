//! Handed-over descriptors: recognised by what they are, never by their position, and refused by name.
//!
//! A namespace comes as its nsfs descriptor, a netfilter and a route socket made inside it, optionally a second
//! route socket (for link notifications) and plain AF_INET and AF_INET6 datagram sockets (for legacy tables).

use std::os::fd::{AsFd, OwnedFd};

use nix::sys::socket::{SockType, getsockopt, sockopt};
use nix::sys::stat::fstat;
use nix::sys::statfs::{FsType, fstatfs};
use sluice_proto::code::ErrorCode;
use sluice_proto::sandbox::{Failure, NetnsIdentity};

use crate::pool::COMPONENT;
use crate::sys;

/// One namespace never needs more: netns, netfilter, two route sockets, two legacy sockets.
pub const MAX_FOR_NETNS: usize = 6;

/// `NSFS_MAGIC` (linux/magic.h).
const NSFS_MAGIC: FsType = FsType(0x6e73_6673);

/// Why descriptors were refused.
#[derive(Debug, thiserror::Error)]
pub enum DescriptorRefusal {
    /// Nothing came.
    #[error("no descriptors came with the call")]
    None,
    /// More than a namespace has.
    #[error("{0} descriptors; a namespace comes with at most {MAX_FOR_NETNS}")]
    TooMany(usize),
    /// Two of a kind that comes once.
    #[error("two descriptors of kind {0}")]
    Duplicate(&'static str),
    /// A kind that must come is missing.
    #[error("no descriptor of kind {0}")]
    Missing(&'static str),
    /// A file that is no namespace.
    #[error("a descriptor is neither a network namespace nor a socket, but {0}")]
    NotNetns(&'static str),
    /// A socket that nobody asked for.
    #[error("a socket of family {family} and protocol {protocol} is not expected")]
    Socket {
        /// `SO_DOMAIN`.
        family: i32,
        /// `SO_PROTOCOL`.
        protocol: i32,
    },
    /// The host's own namespace.
    #[error("inode {inode} is the host's network namespace (inode {host})")]
    Host {
        /// Inode of what came.
        inode: u64,
        /// Inode of the host's namespace.
        host: u64,
    },
    /// Another namespace than the one known as the host's.
    #[error("inode {inode} is given as the host's network namespace, which is known to be inode {known}")]
    HostChanged {
        /// Inode of what came.
        inode: u64,
        /// Inode of the host's namespace.
        known: u64,
    },
    /// The executor's own namespace.
    #[error("inode {0} is the executor's own network namespace")]
    Own(u64),
    /// A socket of one namespace beside the descriptor of another.
    #[error("the {kind} socket belongs to namespace inode {socket}, the descriptor is inode {netns}")]
    Mixed {
        /// Which socket.
        kind: &'static str,
        /// Inode of the socket's namespace.
        socket: u64,
        /// Inode of the descriptor.
        netns: u64,
    },
    /// Another sandbox has this namespace.
    #[error("inode {inode} belongs to sandbox {owner}")]
    Claimed {
        /// Inode of what came.
        inode: u64,
        /// Whose it is.
        owner: String,
    },
    /// The kernel could not say what a descriptor is.
    #[error("{call} on a handed-over descriptor failed: {errno}")]
    Call {
        /// Which system call.
        call: &'static str,
        /// Why.
        errno: nix::errno::Errno,
    },
}

impl DescriptorRefusal {
    /// As a failure of `stage`.
    pub fn failure(&self, stage: &str) -> Failure {
        Failure::new(ErrorCode::DescriptorRefused, COMPONENT, stage, self.to_string())
    }

    /// Label of the counter.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::None => "none",
            Self::TooMany(_) => "too-many",
            Self::Duplicate(_) => "duplicate",
            Self::Missing(_) => "missing",
            Self::NotNetns(_) => "not-a-netns",
            Self::Socket { .. } => "unexpected-socket",
            Self::Host { .. } => "host-netns",
            Self::HostChanged { .. } => "host-changed",
            Self::Own(_) => "own-netns",
            Self::Mixed { .. } => "mixed-netns",
            Self::Claimed { .. } => "other-sandbox",
            Self::Call { .. } => "unreadable",
        }
    }
}

/// The descriptors of one namespace, sorted by kind; all of the same namespace.
#[derive(Debug)]
pub struct NetnsDescriptors {
    /// The namespace itself, as its sockets tell it: what was handed over may be open on a mount (`/run/netns/NAME`),
    /// and whoever holds that keeps the runtime from unmounting it.
    pub netns: OwnedFd,
    /// NETLINK_NETFILTER.
    pub netfilter: OwnedFd,
    /// NETLINK_ROUTE.
    pub route: OwnedFd,
    /// A second NETLINK_ROUTE.
    pub notifications: Option<OwnedFd>,
    /// AF_INET and AF_INET6 datagram sockets, for legacy tables only: never bound, connected or sent on.
    pub legacy: Vec<OwnedFd>,
    /// Which namespace it is.
    pub identity: NetnsIdentity,
}

/// (device, inode) of an open namespace descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NetnsInode {
    /// Device of nsfs.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
}

impl NetnsInode {
    /// Reads it from a descriptor.
    pub fn of(descriptor: impl AsFd) -> Result<Self, DescriptorRefusal> {
        let stat = fstat(descriptor).map_err(|errno| DescriptorRefusal::Call { call: "fstat", errno })?;
        Ok(Self {
            device: stat.st_dev,
            inode: stat.st_ino,
        })
    }
}

/// What is not accepted although it is a namespace.
#[derive(Debug, Clone, Copy)]
pub struct Forbidden {
    /// The host's, once known.
    pub host: Option<NetnsInode>,
    /// Ours.
    pub own: NetnsInode,
}

enum Kind {
    Netns,
    Netfilter,
    Route,
    LegacyIpv4,
    LegacyIpv6,
}

/// Sorts and checks what came. `forbidden`: None for the host's own sockets, which the opener hands over.
pub fn sort(
    descriptors: Vec<OwnedFd>,
    forbidden: Option<Forbidden>,
    boot_id: &str,
) -> Result<NetnsDescriptors, DescriptorRefusal> {
    if descriptors.is_empty() {
        return Err(DescriptorRefusal::None);
    }
    if descriptors.len() > MAX_FOR_NETNS {
        return Err(DescriptorRefusal::TooMany(descriptors.len()));
    }
    let (mut netns, mut netfilter, mut route, mut notifications) = (None, None, None, None);
    let (mut legacy_ipv4, mut legacy_ipv6) = (None, None);
    for descriptor in descriptors {
        let (slot, name) = match kind_of(&descriptor)? {
            Kind::Netns => (&mut netns, "netns"),
            Kind::Netfilter => (&mut netfilter, "netfilter socket"),
            Kind::Route if route.is_none() => (&mut route, "route socket"),
            Kind::Route => (&mut notifications, "route socket for notifications"),
            Kind::LegacyIpv4 => (&mut legacy_ipv4, "AF_INET socket"),
            Kind::LegacyIpv6 => (&mut legacy_ipv6, "AF_INET6 socket"),
        };
        if slot.replace(descriptor).is_some() {
            return Err(DescriptorRefusal::Duplicate(name));
        }
    }
    let netns = netns.ok_or(DescriptorRefusal::Missing("netns"))?;
    let inode = NetnsInode::of(&netns)?;
    if let Some(forbidden) = forbidden {
        refuse_forbidden(inode, forbidden)?;
    }
    let netfilter = netfilter.ok_or(DescriptorRefusal::Missing("netfilter socket"))?;
    let route = route.ok_or(DescriptorRefusal::Missing("route socket"))?;
    let cookie = cookie_of(&netfilter)?;
    let netns = same_netns("netfilter", &netfilter, inode)?;
    for (kind, socket) in [
        ("route", Some(&route)),
        ("notification", notifications.as_ref()),
        ("AF_INET", legacy_ipv4.as_ref()),
        ("AF_INET6", legacy_ipv6.as_ref()),
    ] {
        // The cookie says the same as the inode, and is had without a descriptor.
        if let Some(socket) = socket
            && cookie_of(socket)? != cookie
        {
            same_netns(kind, socket, inode)?;
        }
    }
    let identity = NetnsIdentity {
        cookie,
        device: inode.device,
        inode: inode.inode,
        boot_id: boot_id.to_owned(),
    };
    Ok(NetnsDescriptors {
        netns,
        netfilter,
        route,
        notifications,
        legacy: legacy_ipv4.into_iter().chain(legacy_ipv6).collect(),
        identity,
    })
}

fn refuse_forbidden(inode: NetnsInode, forbidden: Forbidden) -> Result<(), DescriptorRefusal> {
    if let Some(host) = forbidden.host.filter(|host| *host == inode) {
        return Err(DescriptorRefusal::Host {
            inode: inode.inode,
            host: host.inode,
        });
    }
    if inode == forbidden.own {
        return Err(DescriptorRefusal::Own(inode.inode));
    }
    Ok(())
}

fn cookie_of(socket: &OwnedFd) -> Result<u64, DescriptorRefusal> {
    sys::netns_cookie(socket).map_err(|errno| DescriptorRefusal::Call {
        call: "getsockopt(SO_NETNS_COOKIE)",
        errno,
    })
}

/// The socket's namespace, if it is the one of inode `netns`.
fn same_netns(kind: &'static str, socket: &OwnedFd, netns: NetnsInode) -> Result<OwnedFd, DescriptorRefusal> {
    let of_socket = sys::netns_of_socket(socket).map_err(|errno| DescriptorRefusal::Call {
        call: "ioctl(SIOCGSKNS)",
        errno,
    })?;
    let inode = NetnsInode::of(&of_socket)?;
    if inode == netns {
        return Ok(of_socket);
    }
    Err(DescriptorRefusal::Mixed {
        kind,
        socket: inode.inode,
        netns: netns.inode,
    })
}

fn kind_of(descriptor: &OwnedFd) -> Result<Kind, DescriptorRefusal> {
    let call = |call| move |errno| DescriptorRefusal::Call { call, errno };
    let stat = fstat(descriptor).map_err(call("fstat"))?;
    match stat.st_mode & libc::S_IFMT {
        libc::S_IFSOCK => {}
        libc::S_IFREG if is_netns(descriptor)? => return Ok(Kind::Netns),
        libc::S_IFREG => return Err(DescriptorRefusal::NotNetns("a regular file")),
        libc::S_IFDIR => return Err(DescriptorRefusal::NotNetns("a directory")),
        libc::S_IFCHR | libc::S_IFBLK => return Err(DescriptorRefusal::NotNetns("a device")),
        libc::S_IFIFO => return Err(DescriptorRefusal::NotNetns("a pipe")),
        _ => return Err(DescriptorRefusal::NotNetns("an anonymous file")),
    }
    let (family, protocol) = sys::family_and_protocol(descriptor).map_err(call("getsockopt"))?;
    let kind = getsockopt(descriptor, sockopt::SockType).map_err(call("getsockopt(SO_TYPE)"))?;
    match (family, protocol) {
        (libc::AF_NETLINK, libc::NETLINK_NETFILTER) => Ok(Kind::Netfilter),
        (libc::AF_NETLINK, libc::NETLINK_ROUTE) => Ok(Kind::Route),
        (libc::AF_INET, _) if kind == SockType::Datagram => Ok(Kind::LegacyIpv4),
        (libc::AF_INET6, _) if kind == SockType::Datagram => Ok(Kind::LegacyIpv6),
        _ => Err(DescriptorRefusal::Socket { family, protocol }),
    }
}

fn is_netns(descriptor: &OwnedFd) -> Result<bool, DescriptorRefusal> {
    let call = |call| move |errno| DescriptorRefusal::Call { call, errno };
    if fstatfs(descriptor).map_err(call("fstatfs"))?.filesystem_type() != NSFS_MAGIC {
        return Ok(false);
    }
    // nsfs holds every kind of namespace.
    let kind = sys::namespace_type(descriptor).map_err(call("ioctl(NS_GET_NSTYPE)"))?;
    Ok(kind == libc::CLONE_NEWNET)
}

//! The running kernel, through handed-over sockets.

use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use sluice_proto::ambient::Desired;
use sluice_proto::code::ErrorCode;
use sluice_proto::id::InterfaceName;
use sluice_proto::pb::executor::Feature;
use sluice_proto::sandbox::Failure;

use super::{Applied, HostNetns, Kernel, Netns, Opened, links};
use crate::descriptors::{self, DescriptorRefusal, Forbidden, NetnsDescriptors, NetnsInode};
use crate::netlink::{self, ApplyError, NetfilterSocket, NetlinkError, PodSockets, RouteSocket};
use crate::pool::COMPONENT;

/// The kernel this process runs on.
#[derive(Debug)]
pub struct RealKernel {
    boot_id: String,
    own: NetnsInode,
    /// Held open, so that the inode is nobody else's.
    _own: File,
    host: Mutex<Option<NetnsInode>>,
}

impl RealKernel {
    /// Reads which namespace and boot this process is in.
    pub fn new() -> io::Result<Self> {
        let own = File::open("/proc/self/ns/net")?;
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        Ok(Self {
            boot_id: boot_id.trim().to_owned(),
            own: NetnsInode::of(&own).map_err(io::Error::other)?,
            _own: own,
            host: Mutex::new(None),
        })
    }

    fn host(&self) -> std::sync::MutexGuard<'_, Option<NetnsInode>> {
        self.host.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failed(code: ErrorCode, stage: &str, error: &(dyn std::error::Error + 'static)) -> Failure {
    Failure::new(code, COMPONENT, stage, sluice_runtime::telemetry::chain(error))
}

fn sockets(netfilter: OwnedFd, route: OwnedFd) -> Result<PodSockets, NetlinkError> {
    Ok(PodSockets {
        netfilter: NetfilterSocket::from_fd(netfilter)?,
        route: RouteSocket::from_fd(route)?,
    })
}

fn not_usable(error: &NetlinkError) -> DescriptorRefusal {
    DescriptorRefusal::Call {
        call: "setsockopt",
        errno: error.errno().map_or(nix::errno::Errno::EINVAL, nix::errno::Errno::from_raw),
    }
}

impl Kernel for RealKernel {
    fn open(&self, received: Vec<OwnedFd>) -> Result<Opened, DescriptorRefusal> {
        let forbidden = Forbidden {
            host: *self.host(),
            own: self.own,
        };
        let NetnsDescriptors {
            netns,
            netfilter,
            route,
            notifications,
            legacy_ipv4,
            legacy_ipv6,
            identity,
        } = descriptors::sort(received, Some(forbidden), &self.boot_id)?;
        let sockets = sockets(netfilter, route).map_err(|error| not_usable(&error))?;
        Ok(Opened {
            identity,
            descriptor: Arc::new(netns),
            notifications,
            netns: Box::new(PodNetns {
                sockets,
                legacy_ipv4,
                legacy_ipv6,
                generation: None,
            }),
        })
    }

    fn open_host(&self, received: Vec<OwnedFd>) -> Result<Box<dyn HostNetns>, DescriptorRefusal> {
        let received = descriptors::sort(received, None, &self.boot_id)?;
        *self.host() = Some(NetnsInode {
            device: received.identity.device,
            inode: received.identity.inode,
        });
        let sockets = sockets(received.netfilter, received.route).map_err(|error| not_usable(&error))?;
        Ok(Box::new(super::host::Host::new(received.netns, sockets)))
    }

    fn preflight(&self, _: Option<Vec<OwnedFd>>, _: bool) -> Result<Vec<Feature>, Failure> {
        Ok(Vec::new())
    }

    fn boot_id(&self) -> &str {
        &self.boot_id
    }
}

struct PodNetns {
    sockets: PodSockets,
    legacy_ipv4: Option<OwnedFd>,
    legacy_ipv6: Option<OwnedFd>,
    /// The nftables generation when everything was last seen to be right.
    generation: Option<u32>,
}

fn apply_failed(error: &ApplyError) -> Failure {
    match error {
        ApplyError::Rules(_) => failed(ErrorCode::Rules, "program rules", error),
        ApplyError::Routing(_) => failed(ErrorCode::Routes, "program rules", error),
        ApplyError::Read(_) => failed(ErrorCode::Rules, "read back", error),
    }
}

impl Netns for PodNetns {
    fn apply(&mut self, desired: &Desired) -> Result<Applied, Failure> {
        self.generation = None;
        let outcome = netlink::apply(&self.sockets, desired).map_err(|error| apply_failed(&error))?;
        self.generation = outcome.generation;
        let _ = (&self.legacy_ipv4, &self.legacy_ipv6);
        Ok(Applied {
            fingerprint: outcome.fingerprint.to_string(),
            changed: outcome.changed,
            taken_over: Vec::new(),
        })
    }

    fn moved(&mut self) -> Result<bool, Failure> {
        let now = netlink::generation(&self.sockets).map_err(|error| apply_failed(&error))?;
        Ok(self.generation != Some(now))
    }

    fn differences(&mut self, desired: &Desired) -> Result<Vec<String>, Failure> {
        let before = netlink::generation(&self.sockets).map_err(|error| apply_failed(&error))?;
        let differences =
            netlink::read_back(&self.sockets, desired).map_err(|error| apply_failed(&error))?;
        self.generation = differences.is_empty().then_some(before);
        Ok(differences)
    }

    fn redirected_connections(&mut self) -> Result<u32, Failure> {
        Ok(0)
    }

    fn has_interface(&mut self, name: &InterfaceName) -> Result<bool, Failure> {
        links::has_interface(&self.sockets.route, name)
            .map_err(|error| failed(ErrorCode::SandboxGone, "look for interface", &error))
    }

    fn addresses(&mut self) -> Result<Vec<(String, IpAddr)>, Failure> {
        links::addresses(&self.sockets.route)
            .map_err(|error| failed(ErrorCode::SandboxGone, "read addresses", &error))
    }

    fn raise_loopback(&mut self) -> Result<(), Failure> {
        links::raise_loopback(&self.sockets.route)
            .map_err(|error| failed(ErrorCode::Routes, "set lo up", &error))
    }
}

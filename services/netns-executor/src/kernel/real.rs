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

use super::host::Host;
use super::{Applied, HostNetns, Kernel, Netns, Opened, Tracked};
use crate::descriptors::{self, DescriptorRefusal, Forbidden, NetnsDescriptors, NetnsInode};
use crate::netlink::{
    self, ApplyError, DiagnosticSocket, NetfilterSocket, NetlinkError, PodSockets, RouteSocket, conntrack,
    diagnostics, link, track,
};
use crate::pool::COMPONENT;
use crate::preflight::preflight;
use crate::rules::HostOptions;
use crate::takeover::{self, LegacySockets, Scope};

/// Generation id of a namespace in which nobody has committed anything (net/netfilter/nf_tables_api.c).
const FIRST_GENERATION: u32 = 1;
/// Every so often all rules and routes are read, although marked packets are routed as they should be.
const THOROUGH: u32 = 10;

/// The kernel this process runs on.
#[derive(Debug)]
pub struct RealKernel {
    boot_id: String,
    own: NetnsInode,
    /// Held open, so that the inode is nobody else's.
    _own: File,
    host: Mutex<Option<NetnsInode>>,
    options: HostOptions,
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
            options: HostOptions::default(),
        })
    }

    /// With other host rules than the default ones.
    #[must_use]
    pub fn with_host_options(self, options: HostOptions) -> Self {
        Self { options, ..self }
    }

    fn host(&self) -> std::sync::MutexGuard<'_, Option<NetnsInode>> {
        self.host.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sort(&self, received: Vec<OwnedFd>) -> Result<NetnsDescriptors, DescriptorRefusal> {
        let forbidden = Forbidden {
            host: *self.host(),
            own: self.own,
        };
        descriptors::sort(received, Some(forbidden), &self.boot_id)
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

fn legacy_sockets(descriptors: Vec<OwnedFd>) -> Result<LegacySockets, DescriptorRefusal> {
    // Their family and type were checked already.
    LegacySockets::from_fds(descriptors).map_err(|_| DescriptorRefusal::Call {
        call: "getsockopt",
        errno: nix::errno::Errno::EINVAL,
    })
}

fn not_usable(error: &NetlinkError) -> DescriptorRefusal {
    DescriptorRefusal::Call {
        call: "setsockopt",
        errno: error
            .errno()
            .map_or(nix::errno::Errno::EINVAL, nix::errno::Errno::from_raw),
    }
}

impl Kernel for RealKernel {
    fn open(&self, received: Vec<OwnedFd>) -> Result<Opened, DescriptorRefusal> {
        let NetnsDescriptors {
            netns,
            netfilter,
            route,
            notifications,
            legacy,
            identity,
        } = self.sort(received)?;
        let sockets = sockets(netfilter, route).map_err(|error| not_usable(&error))?;
        let legacy = legacy_sockets(legacy)?;
        Ok(Opened {
            identity,
            descriptor: Arc::new(netns),
            notifications,
            netns: Box::new(PodNetns {
                sockets,
                legacy,
                taken_over: false,
                generation: None,
                desired: None,
                looks: 0,
            }),
        })
    }

    fn open_host(&self, received: Vec<OwnedFd>) -> Result<Box<dyn HostNetns>, DescriptorRefusal> {
        let received = descriptors::sort(received, None, &self.boot_id)?;
        let inode = NetnsInode {
            device: received.identity.device,
            inode: received.identity.inode,
        };
        // A machine's own namespace never changes, and our descriptor keeps its number from being anybody else's.
        let known = *self.host().get_or_insert(inode);
        if known != inode {
            return Err(DescriptorRefusal::HostChanged {
                inode: inode.inode,
                known: known.inode,
            });
        }
        let sockets = sockets(received.netfilter, received.route).map_err(|error| not_usable(&error))?;
        let legacy = legacy_sockets(received.legacy)?;
        Ok(Box::new(Host::new(
            received.netns,
            sockets.into(),
            legacy,
            self.options.clone(),
        )))
    }

    fn preflight(&self, scratch: Option<Vec<OwnedFd>>, ipv6: bool) -> Result<Vec<Feature>, Failure> {
        const STAGE: &str = "preflight";
        let sockets = match scratch {
            Some(received) => {
                let received = self.sort(received).map_err(|refusal| refusal.failure(STAGE))?;
                sockets(received.netfilter, received.route)
            }
            None => PodSockets::open(),
        };
        let sockets = sockets.map_err(|error| failed(ErrorCode::KernelFeature, STAGE, &error))?;
        Ok(preflight(&sockets, ipv6).into_iter().map(Into::into).collect())
    }

    fn boot_id(&self) -> &str {
        &self.boot_id
    }
}

struct PodNetns {
    sockets: PodSockets,
    legacy: LegacySockets,
    /// Rules of another agent have been looked for and removed.
    taken_over: bool,
    /// The nftables generation when everything was last seen to be right.
    generation: Option<u32>,
    /// What was asked for last.
    desired: Option<Desired>,
    /// How often the routing was looked at.
    looks: u32,
}

fn apply_failed(error: &ApplyError) -> Failure {
    match error {
        ApplyError::Rules(_) => failed(ErrorCode::Rules, "program rules", error),
        ApplyError::Routing(_) => failed(ErrorCode::Routes, "program rules", error),
        ApplyError::Read(_) => failed(ErrorCode::Rules, "read back", error),
    }
}

impl PodNetns {
    /// Nobody has ever written an nftables rule here, and there are no legacy tables: the usual new pod.
    fn is_untouched(&self) -> bool {
        let untouched =
            netlink::generation(&self.sockets).is_ok_and(|generation| generation == FIRST_GENERATION);
        untouched && self.legacy.ipv4.is_none() && self.legacy.ipv6.is_none()
    }

    /// Removes the rules of Istio's own agent, now that ours are in force.
    fn take_over(&mut self) -> Result<Vec<String>, Failure> {
        let found = takeover::remove(&self.sockets.netfilter, &self.legacy, Scope::Pod)
            .map_err(|error| failed(ErrorCode::Rules, "take over from Istio's agent", &error))?;
        for line in &found.foreign {
            tracing::warn!(line, "a foreign rule in a chain of Istio's agent stays");
        }
        if !found.istio.is_empty() {
            // The removal was a commit of its own.
            self.generation = None;
        }
        Ok(found.istio)
    }
}

impl Netns for PodNetns {
    fn apply(&mut self, desired: &Desired) -> Result<Applied, Failure> {
        self.generation = None;
        self.desired = Some(desired.clone());
        let untouched = !self.taken_over && self.is_untouched();
        let outcome = netlink::apply(&self.sockets, desired).map_err(|error| apply_failed(&error))?;
        self.generation = outcome.generation;
        let mut taken_over = Vec::new();
        // Not before ours redirect: what captures the pod's traffic until then is theirs.
        if matches!(desired, Desired::Ambient(_)) && !self.taken_over {
            // Ours precede them: what cannot be removed does no harm and is tried again next time.
            match if untouched {
                Ok(Vec::new())
            } else {
                self.take_over()
            } {
                Ok(lines) => {
                    taken_over = lines;
                    self.taken_over = true;
                }
                Err(failure) => tracing::warn!(error = %failure, "rules of Istio's agent stay for now"),
            }
        }
        Ok(Applied {
            fingerprint: outcome.fingerprint.to_string(),
            changed: outcome.changed || !taken_over.is_empty(),
            taken_over,
        })
    }

    fn moved(&mut self) -> Result<bool, Failure> {
        if matches!(self.desired, Some(Desired::Joining(_))) {
            // Right as it is, but not where it is going.
            return Ok(true);
        }
        let now = netlink::generation(&self.sockets).map_err(|error| apply_failed(&error))?;
        Ok(self.generation != Some(now))
    }

    fn differences(&mut self, desired: &Desired) -> Result<Vec<String>, Failure> {
        self.desired = Some(desired.clone());
        let before = netlink::generation(&self.sockets).map_err(|error| apply_failed(&error))?;
        let differences = netlink::read_back(&self.sockets, desired).map_err(|error| apply_failed(&error))?;
        self.generation = differences.is_empty().then_some(before);
        Ok(differences)
    }

    fn routing_lacks(&mut self, thorough: bool) -> Result<bool, Failure> {
        let Some(desired) = &self.desired else {
            return Ok(true);
        };
        self.looks = self.looks.wrapping_add(1);
        if !(thorough || self.looks.is_multiple_of(THOROUGH))
            && netlink::routing_works(&self.sockets, desired).map_err(|error| apply_failed(&error))?
        {
            return Ok(false);
        }
        let lines = netlink::read_back_routing(&self.sockets, desired);
        lines
            .map(|lines| !lines.is_empty())
            .map_err(|error| apply_failed(&error))
    }

    fn redirected_connections(&mut self, own: &[IpAddr]) -> Result<u32, Failure> {
        conntrack::redirected_connections(&self.sockets.netfilter, own)
            .map_err(|error| failed(ErrorCode::Rules, "count connections", &error))
    }

    fn track_connections(&mut self, received: Vec<OwnedFd>) -> Result<Tracked, Failure> {
        const STAGE: &str = "list connections";
        let refused = |cause: &str| Failure::new(ErrorCode::DescriptorRefused, COMPONENT, STAGE, cause);
        let [descriptor] = <[OwnedFd; 1]>::try_from(received)
            .map_err(|received| refused(&format!("{} descriptors came instead of one", received.len())))?;
        let failed = |error: NetlinkError| failed(ErrorCode::KernelFeature, STAGE, &error);
        let socket = DiagnosticSocket::from_fd(descriptor).map_err(failed)?;
        if socket.cookie().map_err(failed)? != self.sockets.netfilter.cookie().map_err(failed)? {
            return Err(refused("the socket belongs to another namespace"));
        }
        let connections = diagnostics::connections(&socket).map_err(failed)?;
        Ok(track::track(&self.sockets.netfilter, &connections))
    }

    fn has_interface(&mut self, name: &InterfaceName) -> Result<bool, Failure> {
        link::link_exists(&self.sockets.route, name.as_str())
            .map_err(|error| failed(ErrorCode::SandboxGone, "look for interface", &error))
    }

    fn addresses(&mut self) -> Result<Vec<(String, IpAddr)>, Failure> {
        link::addresses(&self.sockets.route)
            .map_err(|error| failed(ErrorCode::SandboxGone, "read addresses", &error))
    }

    fn raise_loopback(&mut self) -> Result<(), Failure> {
        link::set_loopback_up(&self.sockets.route)
            .map_err(|error| failed(ErrorCode::Routes, "set lo up", &error))
    }
}

//! The host's network namespace: the rules that give probes a source address pods know, and the address sets.
//!
//! Our chain sits in front of the standard source nat priority, so a masquerading rule of a primary CNI or kube-proxy
//! never sees the connection, whenever it was inserted.

pub mod probe_set;

use crate::netlink::error::NetlinkError;
use crate::netlink::table::{self, Difference, EncodedRuleSet};
use crate::netlink::{NetfilterSocket, PodSockets, RouteSocket};
use crate::rules::{HostOptions, RuleSet};

/// The two sockets of the host's namespace: a type of its own, so that a pod's request can never reach them.
#[derive(Debug)]
pub struct HostSockets {
    /// For rules and sets.
    pub netfilter: NetfilterSocket,
    /// For interfaces.
    pub route: RouteSocket,
}

impl From<PodSockets> for HostSockets {
    fn from(sockets: PodSockets) -> Self {
        Self {
            netfilter: sockets.netfilter,
            route: sockets.route,
        }
    }
}

/// What [`ensure`] found and did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Outcome {
    /// Whether anything was changed.
    pub changed: bool,
    /// What was not as it should be.
    pub found: Difference,
}

/// Makes the host's table what it should be; sets of the right type keep their elements, and what is right already is
/// not touched.
///
/// A table that was missing altogether comes back with empty sets: [`probe_set::sync`] fills them.
pub fn ensure(host: &HostSockets, options: &HostOptions) -> Result<Outcome, NetlinkError> {
    let wanted = EncodedRuleSet::new(RuleSet::host(options));
    let found = table::difference(&host.netfilter, &wanted)?;
    let changed = found.damage.is_some() && table::converge(&host.netfilter, &wanted)?;
    Ok(Outcome { changed, found })
}

/// Removes the host's table and all in it; false if there was none.
pub fn remove(host: &HostSockets) -> Result<bool, NetlinkError> {
    table::delete(&host.netfilter, crate::rules::HOST_TABLE)
}

/// The host's nftables generation: moves with every change by anyone, a few microseconds.
pub fn generation(host: &HostSockets) -> Result<u32, NetlinkError> {
    table::generation(&host.netfilter)
}

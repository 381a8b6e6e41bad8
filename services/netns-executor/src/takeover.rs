//! Rules that Istio's own agent left in a namespace: found, and removed once ours are in force.
//!
//! Three forms: its nftables tables, its `ISTIO_*` chains written by iptables-nft, and the same written by
//! iptables-legacy, which no netlink socket shows. Policy routing has the numbers of ours and stays. Call [`remove`]
//! right after our rules were applied: until then the old ones redirect, and ours come first while both are there.
//! Rules of others are never touched.

mod ipset;
pub mod legacy;
mod nft;

use std::os::fd::OwnedFd;

use crate::netlink::NetfilterSocket;
use crate::netlink::error::NetlinkError;
use crate::rules::Family;
use legacy::{LegacyError, LegacySocket};

/// Whose namespace it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// A pod's: all `ISTIO_*` chains and all its tables.
    Pod,
    /// The host's: the chain and the address sets of its probe rules.
    Host,
}

/// Sockets that reach iptables-legacy; none where a family has no such tables.
#[derive(Debug, Default)]
pub struct LegacySockets {
    /// `AF_INET`.
    pub ipv4: Option<LegacySocket>,
    /// `AF_INET6`.
    pub ipv6: Option<LegacySocket>,
}

impl LegacySockets {
    /// Sorts handed-over descriptors by their family; anything else is refused.
    pub fn from_fds(descriptors: impl IntoIterator<Item = OwnedFd>) -> Result<Self, LegacyError> {
        let mut sockets = Self::default();
        for descriptor in descriptors {
            let socket = LegacySocket::from_fd(descriptor)?;
            match socket.family() {
                Family::V4 => sockets.ipv4 = Some(socket),
                Family::V6 => sockets.ipv6 = Some(socket),
            }
        }
        Ok(sockets)
    }

    fn each(&self) -> impl Iterator<Item = &LegacySocket> {
        self.ipv4.iter().chain(&self.ipv6)
    }
}

/// What [`find`] found, or [`remove`] removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Findings {
    /// Istio's, one line each.
    pub istio: Vec<String>,
    /// Rules of others inside Istio's chains, which therefore stay, one line each.
    pub foreign: Vec<String>,
}

impl Findings {
    /// Nothing of Istio's is there.
    pub fn is_empty(&self) -> bool {
        self.istio.is_empty()
    }
}

/// Old rules could not be read or removed.
#[derive(Debug, thiserror::Error)]
pub enum TakeoverError {
    /// Over netlink.
    #[error("rules of Istio's agent in nftables or ipset")]
    Netlink(#[from] NetlinkError),
    /// iptables-legacy.
    #[error("rules of Istio's agent in iptables-legacy")]
    Legacy(#[from] LegacyError),
}

/// Looks for rules of Istio's agent.
///
/// Asking for a legacy `nat` table makes it exist, hence only a namespace that has legacy tables is asked.
pub fn find(
    netfilter: &NetfilterSocket,
    legacy: &LegacySockets,
    scope: Scope,
) -> Result<Findings, TakeoverError> {
    let mut findings = nft::plan(netfilter, scope)?.findings;
    for socket in legacy.each() {
        for plan in legacy::plan(socket, scope)? {
            plan.describe(&mut findings);
        }
    }
    if scope == Scope::Host {
        findings.istio.extend(ipset::present(netfilter));
    }
    Ok(findings)
}

/// Removes them, everything in nftables in one transaction, and each legacy table in one step. Idempotent.
pub fn remove(
    netfilter: &NetfilterSocket,
    legacy: &LegacySockets,
    scope: Scope,
) -> Result<Findings, TakeoverError> {
    let mut findings = nft::remove(netfilter, scope)?;
    for socket in legacy.each() {
        for plan in legacy::plan(socket, scope)? {
            plan.execute(socket)?;
            plan.describe(&mut findings);
        }
    }
    if scope == Scope::Host {
        // Last: the kernel refuses to destroy a set that a rule refers to.
        findings.istio.extend(ipset::destroy(netfilter)?);
    }
    Ok(findings)
}

/// Whether a chain is Istio's, by its name.
fn is_istio_chain(name: &str, scope: Scope) -> bool {
    match scope {
        Scope::Pod => name.starts_with("ISTIO_"),
        Scope::Host => name == "ISTIO_POSTRT",
    }
}

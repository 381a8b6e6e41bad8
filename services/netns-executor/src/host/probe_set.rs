//! The addresses of pods whose probes get a recognisable source: elements of the host table's two sets.
//!
//! Addresses of a family that is switched off have no set and are passed over.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::HostSockets;
use crate::netlink::Batch;
use crate::netlink::error::NetlinkError;
use crate::netlink::table::read_elements;
use crate::rules::{Family, HOST_TABLE, HostOptions, PROBES_V4, PROBES_V6};

/// What [`sync`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Synced {
    /// Addresses that were not there.
    pub added: usize,
    /// Addresses that are gone.
    pub removed: usize,
}

/// Adds addresses, all or none; one that is there already is no error.
pub fn add(host: &HostSockets, options: &HostOptions, addresses: &[IpAddr]) -> Result<(), NetlinkError> {
    let mut batch = Batch::new();
    for (set, members) in by_set(options, addresses) {
        batch.add_elements(HOST_TABLE, set, &members);
    }
    batch.commit(&host.netfilter)
}

/// Removes addresses; one that is not there is no error, nor is a missing set.
pub fn remove(host: &HostSockets, options: &HostOptions, addresses: &[IpAddr]) -> Result<(), NetlinkError> {
    let delete = |addresses: &[IpAddr]| {
        let mut batch = Batch::new();
        for (set, members) in by_set(options, addresses) {
            batch.delete_elements(HOST_TABLE, set, &members);
        }
        batch.commit(&host.netfilter)
    };
    match delete(addresses) {
        // One missing element fails them all; which one it was is cheaper to ask only now.
        Err(error) if error.errno() == Some(libc::ENOENT) => {
            let present: BTreeSet<_> = list(host, options)?.into_iter().collect();
            let there: Vec<_> = addresses
                .iter()
                .copied()
                .filter(|address| present.contains(address))
                .collect();
            delete(&there)
        }
        outcome => outcome,
    }
}

/// The addresses in the sets; none where a set is missing.
pub fn list(host: &HostSockets, options: &HostOptions) -> Result<Vec<IpAddr>, NetlinkError> {
    let mut addresses = Vec::new();
    for (set, _) in sets(options) {
        match read_elements(&host.netfilter, HOST_TABLE, set) {
            Ok(found) => addresses.extend(found),
            Err(error) if error.errno() == Some(libc::ENOENT) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(addresses)
}

/// Makes the sets hold exactly `wanted`, in one transaction.
pub fn sync(host: &HostSockets, options: &HostOptions, wanted: &[IpAddr]) -> Result<Synced, NetlinkError> {
    let present: BTreeSet<_> = list(host, options)?.into_iter().collect();
    let wanted: BTreeSet<_> = by_set(options, wanted)
        .into_iter()
        .flat_map(|(_, members)| members)
        .collect();
    let new: Vec<_> = wanted.difference(&present).copied().collect();
    let old: Vec<_> = present.difference(&wanted).copied().collect();
    let mut batch = Batch::new();
    for (set, members) in by_set(options, &new) {
        batch.add_elements(HOST_TABLE, set, &members);
    }
    for (set, members) in by_set(options, &old) {
        batch.delete_elements(HOST_TABLE, set, &members);
    }
    batch.commit(&host.netfilter)?;
    Ok(Synced {
        added: new.len(),
        removed: old.len(),
    })
}

fn sets(options: &HostOptions) -> Vec<(&'static str, Family)> {
    let both = [(PROBES_V4, Family::V4), (PROBES_V6, Family::V6)];
    both.into_iter()
        .filter(|(_, family)| *family == Family::V4 || options.ipv6)
        .collect()
}

/// IPv4-mapped IPv6 addresses count as IPv4.
fn by_set(options: &HostOptions, addresses: &[IpAddr]) -> Vec<(&'static str, Vec<IpAddr>)> {
    let canonical: BTreeSet<_> = addresses.iter().map(IpAddr::to_canonical).collect();
    let members = |family| {
        canonical
            .iter()
            .copied()
            .filter(|address| Family::of(*address) == family)
            .collect()
    };
    let each = sets(options)
        .into_iter()
        .map(|(set, family)| (set, members(family)));
    each.filter(|(_, members): &(_, Vec<IpAddr>)| !members.is_empty())
        .collect()
}

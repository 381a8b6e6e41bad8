//! The host's probe rules and address sets.

use std::net::IpAddr;
use std::os::fd::OwnedFd;

use sluice_proto::code::ErrorCode;
use sluice_proto::sandbox::Failure;

use super::HostNetns;
use crate::netlink::table::{self, EncodedRuleSet, read_elements};
use crate::netlink::{Batch, NetlinkError, PodSockets};
use crate::pool::COMPONENT;
use crate::rules::{Family, HostOptions, RuleSet};

pub(super) struct Host {
    _netns: OwnedFd,
    sockets: PodSockets,
    wanted: EncodedRuleSet,
    generation: Option<u32>,
}

fn failed(error: &NetlinkError) -> Failure {
    Failure::new(
        ErrorCode::ProbeSet,
        COMPONENT,
        "host probe rules",
        sluice_runtime::telemetry::chain(error),
    )
}

impl Host {
    pub(super) fn new(netns: OwnedFd, sockets: PodSockets) -> Self {
        Self {
            _netns: netns,
            sockets,
            wanted: EncodedRuleSet::new(RuleSet::host(&HostOptions::default())),
            generation: None,
        }
    }

    fn change(&mut self, addresses: &[IpAddr], add: bool) -> Result<(), NetlinkError> {
        if addresses.is_empty() {
            return Ok(());
        }
        let mut batch = Batch::new();
        let table = self.wanted.rule_set.table;
        for set in &self.wanted.rule_set.sets {
            let of_family = || addresses.iter().filter(|address| Family::of(**address) == set.family);
            if of_family().next().is_none() {
                continue;
            }
            if add {
                batch.add_elements(table, set.name, of_family());
            } else {
                batch.delete_elements(table, set.name, of_family());
            }
        }
        let known = self.generation;
        batch.commit(&self.sockets.netfilter)?;
        let now = table::generation(&self.sockets.netfilter)?;
        self.generation = known.filter(|known| known.checked_add(1).unwrap_or(1) == now).map(|_| now);
        Ok(())
    }
}

impl HostNetns for Host {
    fn ensure(&mut self, probes: &[IpAddr]) -> Result<Vec<String>, Failure> {
        let before = table::generation(&self.sockets.netfilter).map_err(|error| failed(&error))?;
        let mut mended =
            table::difference(&self.sockets.netfilter, &self.wanted).map_err(|error| failed(&error))?;
        if !mended.is_empty() {
            table::converge(&self.sockets.netfilter, &self.wanted).map_err(|error| failed(&error))?;
        }
        let members = self.members()?;
        let missing: Vec<_> = probes.iter().copied().filter(|probe| !members.contains(probe)).collect();
        self.change(&missing, true).map_err(|error| failed(&error))?;
        mended.extend(missing.iter().map(|address| format!("probe address {address} is missing")));
        self.generation = mended.is_empty().then_some(before);
        Ok(mended)
    }

    fn moved(&mut self) -> Result<bool, Failure> {
        let now = table::generation(&self.sockets.netfilter).map_err(|error| failed(&error))?;
        Ok(self.generation != Some(now))
    }

    fn add(&mut self, addresses: &[IpAddr]) -> Result<(), Failure> {
        self.change(addresses, true).map_err(|error| failed(&error))
    }

    fn remove(&mut self, addresses: &[IpAddr]) -> Result<(), Failure> {
        let members = self.members()?;
        let there: Vec<_> = addresses.iter().copied().filter(|address| members.contains(address)).collect();
        self.change(&there, false).map_err(|error| failed(&error))
    }

    fn members(&mut self) -> Result<Vec<IpAddr>, Failure> {
        let mut members = Vec::new();
        for set in &self.wanted.rule_set.sets {
            let elements = read_elements(&self.sockets.netfilter, self.wanted.rule_set.table, set.name);
            match elements {
                Ok(elements) => members.extend(elements),
                Err(error) if error.errno() == Some(libc::ENOENT) => {}
                Err(error) => return Err(failed(&error)),
            }
        }
        Ok(members)
    }
}

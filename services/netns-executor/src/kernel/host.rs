//! The host's namespace as the probe set uses it: rules, address sets, and what Istio's agent left.

use std::net::IpAddr;
use std::os::fd::OwnedFd;

use sluice_proto::code::ErrorCode;
use sluice_proto::sandbox::Failure;

use super::{HostDamage, HostNetns, Mended};
use crate::host::{self, HostSockets, probe_set};
use crate::netlink::table::TableDamage;
use crate::pool::COMPONENT;
use crate::rules::HostOptions;
use crate::takeover::{self, LegacySockets, Scope};

pub(super) struct Host {
    _netns: OwnedFd,
    sockets: HostSockets,
    legacy: LegacySockets,
    options: HostOptions,
    /// What Istio's agent had was removed.
    taken_over: bool,
    /// The nftables generation when everything was last seen to be right.
    generation: Option<u32>,
}

fn failed(error: impl std::error::Error + 'static) -> Failure {
    let cause = sluice_runtime::telemetry::chain(&error);
    Failure::new(ErrorCode::ProbeSet, COMPONENT, "host probe rules", cause)
}

impl From<TableDamage> for HostDamage {
    fn from(damage: TableDamage) -> Self {
        match damage {
            TableDamage::Missing => Self::TableMissing,
            TableDamage::Changed => Self::TableChanged,
            TableDamage::Rules => Self::RulesChanged,
        }
    }
}

impl Host {
    pub(super) fn new(
        netns: OwnedFd,
        sockets: HostSockets,
        legacy: LegacySockets,
        options: HostOptions,
    ) -> Self {
        Self {
            _netns: netns,
            sockets,
            legacy,
            options,
            taken_over: false,
            generation: None,
        }
    }

    /// Runs a change of ours, which moves the generation by at most one step; more was somebody else.
    fn change(
        &mut self,
        change: impl FnOnce(&HostSockets, &HostOptions) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        change(&self.sockets, &self.options)?;
        if let Some(known) = self.generation {
            let now = host::generation(&self.sockets).map_err(failed)?;
            let ours = now == known || now == known.checked_add(1).unwrap_or(1);
            self.generation = ours.then_some(now);
        }
        Ok(())
    }

    fn take_over(&mut self) -> Result<impl Iterator<Item = String> + use<>, Failure> {
        let found = takeover::remove(&self.sockets.netfilter, &self.legacy, Scope::Host).map_err(failed)?;
        for line in &found.foreign {
            tracing::warn!(line, "a foreign rule in a chain of Istio's agent stays");
        }
        self.taken_over = true;
        Ok(found.istio.into_iter().map(|line| format!("taken over: {line}")))
    }
}

impl HostNetns for Host {
    fn ensure(&mut self, probes: &[IpAddr]) -> Result<Mended, Failure> {
        self.generation = None;
        let before = host::generation(&self.sockets).map_err(failed)?;
        let found = host::ensure(&self.sockets, &self.options).map_err(failed)?.found;
        let mut mended = Mended::default();
        if let Some(damage) = found.damage {
            mended.add(damage.into(), found.lines);
        }
        let members = self.members()?;
        let missing: Vec<_> = probes
            .iter()
            .copied()
            .filter(|probe| (probe.is_ipv4() || self.options.ipv6) && !members.contains(probe))
            .collect();
        if !missing.is_empty() {
            self.add(&missing)?;
            let lines = missing
                .iter()
                .map(|address| format!("probe address {address} is missing"));
            mended.add(HostDamage::AddressesMissing, lines);
        }
        if !self.taken_over {
            // Only now: until here the old rules served the probes.
            mended.add(HostDamage::Leftovers, self.take_over()?);
        }
        self.generation = mended.worst.is_none().then_some(before);
        Ok(mended)
    }

    fn moved(&mut self) -> Result<bool, Failure> {
        let now = host::generation(&self.sockets).map_err(failed)?;
        Ok(self.generation != Some(now))
    }

    fn add(&mut self, addresses: &[IpAddr]) -> Result<(), Failure> {
        self.change(|sockets, options| probe_set::add(sockets, options, addresses).map_err(failed))
    }

    fn remove(&mut self, addresses: &[IpAddr]) -> Result<(), Failure> {
        if addresses.is_empty() {
            return Ok(());
        }
        self.change(|sockets, options| probe_set::remove(sockets, options, addresses).map_err(failed))
    }

    fn members(&mut self) -> Result<Vec<IpAddr>, Failure> {
        probe_set::list(&self.sockets, &self.options).map_err(failed)
    }

    fn dismantle(&mut self) -> Result<(), Failure> {
        self.generation = None;
        host::remove(&self.sockets).map(drop).map_err(failed)
    }
}

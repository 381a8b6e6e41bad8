//! The host's probe address sets: who owns each address, and the host's namespace itself while it is at hand.
//!
//! Addresses come from prevResult and the broker, never from an API status that may be empty after a restart, and
//! leave only when their owner goes or another pod proves to have them.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use sluice_proto::code::ErrorCode;
use sluice_proto::id::PodUid;
use sluice_proto::pb::executor::ProbeAddress;
use sluice_proto::sandbox::Failure;

use tokio::sync::watch;

use crate::kernel::{HostNetns, Mended};
use crate::pool::{self, COMPONENT};
use crate::reaper::Reaper;
use crate::table::TableError;
use crate::table::probes::ProbeOwners;

const STAGE: &str = "host probe set";

struct Inner {
    host: Option<Box<dyn HostNetns>>,
    owners: ProbeOwners,
    differences: Vec<String>,
    /// Left while the host was not at hand; taken out of the kernel's sets once it is.
    forgotten: BTreeSet<IpAddr>,
    /// The agent leaves the node: rules and sets are gone and stay so.
    retired: bool,
}

/// The sets; clones share them.
#[derive(Clone)]
pub struct ProbeSet {
    inner: Arc<Mutex<Inner>>,
    reaper: Reaper,
    /// The host's namespace has been at hand.
    at_hand: watch::Sender<bool>,
}

impl std::fmt::Debug for ProbeSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProbeSet").finish_non_exhaustive()
    }
}

/// What [`ProbeSet::status`] tells.
#[derive(Debug, Default)]
pub struct ProbeStatus {
    /// The host's namespace is at hand.
    pub reachable: bool,
    /// What the last pass found and could not mend.
    pub differences: Vec<String>,
    /// Addresses and owners.
    pub addresses: Vec<ProbeAddress>,
}

/// What [`ProbeSet::sync`] did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Synced {
    /// Addresses that were not there.
    pub added: u32,
    /// Addresses that are gone.
    pub removed: u32,
}

impl ProbeSet {
    /// The sets with the owners of an earlier life.
    pub fn new(owners: ProbeOwners, reaper: Reaper) -> Self {
        Self {
            inner: Arc::new(Mutex::new(Inner {
                host: None,
                owners,
                differences: Vec::new(),
                forgotten: BTreeSet::new(),
                retired: false,
            })),
            reaper,
            at_hand: watch::Sender::new(false),
        }
    }

    /// Waits until the host's namespace is at hand. Cancel-safe.
    pub async fn host_at_hand(&self) {
        // The sender lives as long as we do.
        let _ = self.at_hand.subscribe().wait_for(|at_hand| *at_hand).await;
    }

    /// Whether the host's namespace is at hand.
    pub fn is_host_at_hand(&self) -> bool {
        *self.at_hand.borrow()
    }

    async fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Inner) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let inner = Arc::clone(&self.inner);
        pool::run(STAGE, move || {
            // A panic between owners and kernel is mended by the next pass.
            work(&mut inner.lock().unwrap_or_else(PoisonError::into_inner))
        })
        .await
    }

    /// The host's namespace is at hand: makes rules and sets right. Returns what was mended.
    pub async fn attach(&self, host: Box<dyn HostNetns>) -> Result<Mended, Failure> {
        let reaper = self.reaper.clone();
        let attached = self
            .with(move |inner| {
                if let Some(old) = inner.host.replace(host) {
                    reaper.close(old);
                }
                inner.ensure()
            })
            .await;
        self.at_hand.send_replace(true);
        attached
    }

    /// Puts a pod's addresses into the sets; an entry of another owner is replaced.
    pub async fn add(&self, addresses: Vec<IpAddr>, owner: PodUid) -> Result<(), Failure> {
        self.with(move |inner| inner.add(&addresses, &owner))
            .await
            .map(drop)
    }

    /// Takes a pod's addresses out, as far as they are its own.
    pub async fn remove(&self, addresses: Vec<IpAddr>, owner: PodUid) -> Result<u32, Failure> {
        self.with(move |inner| inner.remove(&addresses, &owner)).await
    }

    /// Adds `wanted`, removes `unwanted` as far as it belongs to the owner named, and with `prune` everything else.
    pub async fn sync(
        &self,
        wanted: Vec<(IpAddr, PodUid)>,
        unwanted: Vec<(IpAddr, PodUid)>,
        prune: bool,
    ) -> Result<Synced, Failure> {
        self.with(move |inner| inner.sync(&wanted, &unwanted, prune))
            .await
    }

    /// Which of a pod's addresses are missing, in the kernel or by owner.
    pub async fn missing(&self, addresses: Vec<IpAddr>, owner: PodUid) -> Result<Vec<IpAddr>, Failure> {
        self.with(move |inner| {
            let members: BTreeSet<_> = inner.host()?.members()?.into_iter().collect();
            Ok(addresses
                .into_iter()
                .filter(|address| inner.owners.owner(*address) != Some(&owner) || !members.contains(address))
                .collect())
        })
        .await
    }

    /// Looks whether the host's rules moved, and mends them. `full`: even if they did not. Returns what was mended.
    pub async fn examine(&self, full: bool) -> Result<Mended, Failure> {
        self.with(move |inner| {
            let Some(host) = inner.host.as_mut() else {
                return Ok(Mended::default());
            };
            if full || !inner.differences.is_empty() || !inner.forgotten.is_empty() || host.moved()? {
                inner.ensure()
            } else {
                Ok(Mended::default())
            }
        })
        .await
    }

    /// Removes rules and sets; nothing brings them back in this life.
    pub async fn retire(&self) -> Result<(), Failure> {
        self.with(|inner| {
            inner.retired = true;
            inner.host()?.dismantle()
        })
        .await
    }

    /// Facts for `NodeStatus` and `Inspect`.
    pub async fn status(&self) -> Result<ProbeStatus, Failure> {
        self.with(|inner| {
            Ok(ProbeStatus {
                reachable: inner.host.is_some(),
                differences: inner.differences.clone(),
                addresses: inner
                    .owners
                    .iter()
                    .map(|(address, owner)| ProbeAddress {
                        address: address.to_string(),
                        owner_uid: owner.to_string(),
                    })
                    .collect(),
            })
        })
        .await
    }

    /// The addresses that belong to a pod.
    pub async fn addresses_of(&self, owner: PodUid) -> Result<Vec<String>, Failure> {
        self.with(move |inner| {
            let own = inner.owners.iter().filter(|(_, o)| **o == owner);
            Ok(own.map(|(address, _)| address.to_string()).collect())
        })
        .await
    }
}

impl Inner {
    fn host(&mut self) -> Result<&mut Box<dyn HostNetns>, Failure> {
        self.host.as_mut().ok_or_else(|| {
            Failure::new(
                ErrorCode::HostUnreachable,
                COMPONENT,
                STAGE,
                "the host's network namespace is not at hand: no opener has connected",
            )
        })
    }

    fn ensure(&mut self) -> Result<Mended, Failure> {
        if self.retired {
            return Ok(Mended::default());
        }
        let addresses: Vec<_> = self.owners.iter().map(|(address, _)| address).collect();
        let mut outcome = self.host()?.ensure(&addresses);
        if outcome.is_ok()
            && let Err(failure) = self.remove_forgotten()
        {
            outcome = Err(failure);
        }
        self.differences = match &outcome {
            Ok(_) => Vec::new(),
            Err(failure) => vec![failure.to_string()],
        };
        outcome
    }

    /// They stay on the list until the kernel has let go of them.
    fn remove_forgotten(&mut self) -> Result<(), Failure> {
        let owners = &self.owners;
        self.forgotten.retain(|address| owners.owner(*address).is_none());
        let forgotten: Vec<_> = self.forgotten.iter().copied().collect();
        if !forgotten.is_empty() {
            self.host()?.remove(&forgotten)?;
            self.forgotten.clear();
        }
        Ok(())
    }

    /// The owner is recorded first: an element in the kernel's sets that nobody owns would stay for ever.
    fn add(&mut self, addresses: &[IpAddr], owner: &PodUid) -> Result<u32, Failure> {
        self.host()?;
        let new: Vec<_> = addresses
            .iter()
            .copied()
            .filter(|address| self.owners.owner(*address) != Some(owner))
            .collect();
        let mut done = Vec::new();
        for address in &new {
            let earlier = self.owners.set(*address, owner).map_err(not_written)?;
            if let Some(earlier) = &earlier {
                tracing::warn!(%address, %earlier, %owner, "probe address changed its owner");
            }
            done.push((*address, earlier));
        }
        if let Err(failure) = self.host()?.add(addresses) {
            for (address, earlier) in done {
                let undone = match earlier {
                    Some(earlier) => self.owners.set(address, &earlier).map(drop),
                    None => self.owners.remove(address),
                };
                if let Err(error) = undone {
                    tracing::warn!(%address, error = %not_written(error), "probe owner stays on record");
                }
            }
            return Err(failure);
        }
        if !new.is_empty() {
            tracing::info!(target: "audit", ?addresses, %owner, "probe addresses added");
        }
        Ok(u32::try_from(new.len()).unwrap_or(u32::MAX))
    }

    fn remove(&mut self, addresses: &[IpAddr], owner: &PodUid) -> Result<u32, Failure> {
        let own: Vec<_> = addresses
            .iter()
            .copied()
            .filter(|address| self.owners.owner(*address) == Some(owner))
            .collect();
        if own.is_empty() {
            return Ok(0);
        }
        for address in &own {
            self.owners.remove(*address).map_err(not_written)?;
        }
        tracing::info!(target: "audit", addresses = ?own, %owner, "probe addresses removed");
        let removed = match self.host.as_mut() {
            Some(host) => host.remove(&own),
            None => Ok(()),
        };
        if self.host.is_none() || removed.is_err() {
            self.forgotten.extend(&own);
        }
        removed?;
        Ok(u32::try_from(own.len()).unwrap_or(u32::MAX))
    }

    fn sync(
        &mut self,
        wanted: &[(IpAddr, PodUid)],
        unwanted: &[(IpAddr, PodUid)],
        prune: bool,
    ) -> Result<Synced, Failure> {
        let mut synced = Synced::default();
        for (address, owner) in unwanted {
            synced.removed += self.remove(&[*address], owner)?;
        }
        for (address, owner) in wanted {
            synced.added += self.add(&[*address], owner)?;
        }
        if prune {
            let keep: BTreeSet<_> = wanted.iter().map(|(address, _)| *address).collect();
            let surplus: Vec<_> = self
                .owners
                .iter()
                .filter(|(address, _)| !keep.contains(address))
                .map(|(address, owner)| (address, owner.clone()))
                .collect();
            for (address, owner) in surplus {
                synced.removed += self.remove(&[address], &owner)?;
            }
            let foreign: Vec<_> = self
                .host()?
                .members()?
                .into_iter()
                .filter(|a| !keep.contains(a))
                .collect();
            synced.removed += u32::try_from(foreign.len()).unwrap_or(u32::MAX);
            self.host()?.remove(&foreign)?;
        }
        Ok(synced)
    }
}

#[expect(clippy::needless_pass_by_value, reason = "used as a function in map_err")]
fn not_written(error: TableError) -> Failure {
    Failure::new(
        ErrorCode::StateFile,
        COMPONENT,
        STAGE,
        sluice_runtime::telemetry::chain(&error),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Kernel as _;
    use crate::kernel::fake::FakeKernel;

    fn owners_on_disk(directory: &std::path::Path) -> usize {
        ProbeOwners::open(directory).unwrap().0.iter().count()
    }

    #[tokio::test]
    async fn what_fails_half_way_leaves_neither_owner_nor_element() {
        let (directory, kernel) = (tempfile::tempdir().unwrap(), FakeKernel::default());
        let (owners, _) = ProbeOwners::open(directory.path()).unwrap();
        let set = ProbeSet::new(owners, Reaper::start().unwrap());
        let (address, owner) = ("10.0.0.5".parse().unwrap(), PodUid::parse("u-1").unwrap());
        set.attach(kernel.open_host(Vec::new()).unwrap()).await.unwrap();
        kernel.state().failing.insert("add");
        set.add(vec![address], owner.clone()).await.unwrap_err();
        assert_eq!(owners_on_disk(directory.path()), 0);
        kernel.state().failing.clear();
        set.add(vec![address], owner.clone()).await.unwrap();
        // What the kernel does not let go of is taken out as soon as it does.
        kernel.state().failing.extend(["remove", "ensure"]);
        set.remove(vec![address], owner).await.unwrap_err();
        set.attach(kernel.open_host(Vec::new()).unwrap())
            .await
            .unwrap_err();
        assert_eq!(kernel.state().probes.len(), 1);
        kernel.state().failing.clear();
        set.examine(false).await.unwrap();
        assert_eq!(kernel.state().probes.len(), 0);
    }
}

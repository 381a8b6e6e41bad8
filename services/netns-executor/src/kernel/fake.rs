//! A kernel that remembers: namespaces are ordinary files, told apart by inode. For tests of everything above it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use sluice_proto::ambient::Desired;
use sluice_proto::code::ErrorCode;
use sluice_proto::id::InterfaceName;
use sluice_proto::pb::executor::Feature;
use sluice_proto::sandbox::{Failure, NetnsIdentity};

use super::{Applied, HostDamage, HostNetns, Kernel, Mended, Netns, Opened, Tracked};
use crate::descriptors::{DescriptorRefusal, NetnsInode};

/// One namespace as the fake sees it.
#[derive(Debug, Clone)]
pub struct FakeNetns {
    /// What is programmed.
    pub programmed: Desired,
    /// Somebody else changed it.
    pub damaged: bool,
    /// Interfaces and their addresses.
    pub interfaces: BTreeMap<String, Vec<IpAddr>>,
    /// Namespaces that are open.
    pub open: usize,
    /// How often something was applied that changed something.
    pub changes: usize,
    /// What was programmed each time that connections were made known.
    pub tracked_under: Vec<Desired>,
}

impl Default for FakeNetns {
    fn default() -> Self {
        Self {
            programmed: Desired::None,
            damaged: false,
            interfaces: BTreeMap::from([("eth0".to_owned(), vec![IpAddr::from([10, 0, 0, 5])])]),
            open: 0,
            changes: 0,
            tracked_under: Vec::new(),
        }
    }
}

/// Everything the fake remembers.
#[derive(Debug, Default)]
pub struct FakeState {
    /// By inode.
    pub netns: BTreeMap<u64, FakeNetns>,
    /// The host's sets.
    pub probes: BTreeSet<IpAddr>,
    /// The host's rules were damaged.
    pub host_damaged: bool,
    /// Inode of the host's namespace.
    pub host: Option<u64>,
    /// The next calls of these names fail.
    pub failing: BTreeSet<&'static str>,
    /// `apply` waits until this is false again.
    pub held: bool,
}

/// The fake; clones share the state.
#[derive(Debug, Clone, Default)]
pub struct FakeKernel(Arc<(Mutex<FakeState>, Condvar)>);

impl FakeKernel {
    /// Looks at the state, or changes it.
    pub fn state(&self) -> MutexGuard<'_, FakeState> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets calls of `apply` wait, or go on.
    pub fn hold(&self, held: bool) {
        self.state().held = held;
        self.0.1.notify_all();
    }

    /// A copy of one namespace.
    pub fn netns(&self, inode: u64) -> FakeNetns {
        self.state().netns.get(&inode).cloned().unwrap_or_default()
    }
}

struct Handle {
    kernel: FakeKernel,
    inode: u64,
}

impl Drop for Handle {
    fn drop(&mut self) {
        if let Some(netns) = self.kernel.state().netns.get_mut(&self.inode) {
            netns.open -= 1;
        }
    }
}

fn failing(state: &FakeState, call: &'static str) -> Result<(), Failure> {
    if state.failing.contains(call) {
        return Err(Failure::new(
            ErrorCode::Rules,
            "netns-executor",
            call,
            "EINVAL: made to fail",
        ));
    }
    Ok(())
}

impl Netns for Handle {
    fn apply(&mut self, desired: &Desired) -> Result<Applied, Failure> {
        let mut state = self.kernel.state();
        while state.held {
            state = self
                .kernel
                .0
                .1
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        failing(
            &state,
            if *desired == Desired::None {
                "take-back"
            } else {
                "apply"
            },
        )?;
        if matches!(desired, Desired::Ambient(_)) {
            failing(&state, "redirect")?;
        }
        let netns = state.netns.entry(self.inode).or_default();
        let changed = netns.damaged || netns.programmed != *desired;
        netns.damaged = false;
        netns.programmed = desired.clone();
        netns.changes += usize::from(changed);
        if *desired != Desired::None {
            // As the kernel does when only the read-back after a commit fails.
            failing(&state, "apply-late")?;
        }
        Ok(Applied {
            fingerprint: format!("{desired:?}").len().to_string(),
            changed,
            taken_over: Vec::new(),
        })
    }

    fn moved(&mut self) -> Result<bool, Failure> {
        let netns = self.kernel.netns(self.inode);
        Ok(netns.damaged || matches!(netns.programmed, Desired::Joining(_)))
    }

    fn differences(&mut self, desired: &Desired) -> Result<Vec<String>, Failure> {
        let netns = self.kernel.netns(self.inode);
        let mut lines = Vec::new();
        if netns.damaged || netns.programmed != *desired {
            lines.push("rule is missing".to_owned());
        }
        Ok(lines)
    }

    fn routing_lacks(&mut self, _: bool) -> Result<bool, Failure> {
        Ok(false)
    }

    fn redirected_connections(&mut self, _: &[IpAddr]) -> Result<u32, Failure> {
        Ok(0)
    }

    fn track_connections(&mut self, diagnostics: Vec<OwnedFd>) -> Result<Tracked, Failure> {
        let mut state = self.kernel.state();
        failing(&state, "track")?;
        let netns = state.netns.entry(self.inode).or_default();
        netns.tracked_under.push(netns.programmed.clone());
        Ok(Tracked {
            made: u32::from(!diagnostics.is_empty()),
            ..Tracked::default()
        })
    }

    fn has_interface(&mut self, name: &InterfaceName) -> Result<bool, Failure> {
        Ok(self
            .kernel
            .netns(self.inode)
            .interfaces
            .contains_key(name.as_str()))
    }

    fn addresses(&mut self) -> Result<Vec<(String, IpAddr)>, Failure> {
        let interfaces = self.kernel.netns(self.inode).interfaces;
        let flat = |(name, addresses): (String, Vec<IpAddr>)| {
            addresses.into_iter().map(move |address| (name.clone(), address))
        };
        Ok(interfaces.into_iter().flat_map(flat).collect())
    }

    fn raise_loopback(&mut self) -> Result<(), Failure> {
        Ok(())
    }
}

struct HostHandle(FakeKernel);

impl HostNetns for HostHandle {
    fn ensure(&mut self, probes: &[IpAddr]) -> Result<Mended, Failure> {
        let mut state = self.0.state();
        failing(&state, "ensure")?;
        let mut mended = Mended::default();
        if std::mem::take(&mut state.host_damaged) {
            mended.add(HostDamage::TableMissing, ["table is missing".to_owned()]);
        }
        state.probes.extend(probes);
        Ok(mended)
    }

    fn moved(&mut self) -> Result<bool, Failure> {
        Ok(self.0.state().host_damaged)
    }

    fn add(&mut self, addresses: &[IpAddr]) -> Result<(), Failure> {
        let mut state = self.0.state();
        failing(&state, "add")?;
        state.probes.extend(addresses);
        Ok(())
    }

    fn remove(&mut self, addresses: &[IpAddr]) -> Result<(), Failure> {
        let mut state = self.0.state();
        failing(&state, "remove")?;
        for address in addresses {
            state.probes.remove(address);
        }
        Ok(())
    }

    fn members(&mut self) -> Result<Vec<IpAddr>, Failure> {
        Ok(self.0.state().probes.iter().copied().collect())
    }

    fn dismantle(&mut self) -> Result<(), Failure> {
        let mut state = self.0.state();
        failing(&state, "dismantle")?;
        state.probes.clear();
        state.host_damaged = true;
        Ok(())
    }
}

impl Kernel for FakeKernel {
    fn open(&self, mut descriptors: Vec<OwnedFd>) -> Result<Opened, DescriptorRefusal> {
        let descriptor = descriptors.pop().ok_or(DescriptorRefusal::None)?;
        let NetnsInode { device, inode } = NetnsInode::of(&descriptor)?;
        let mut state = self.state();
        if state.host == Some(inode) {
            return Err(DescriptorRefusal::Host { inode, host: inode });
        }
        state.netns.entry(inode).or_default().open += 1;
        Ok(Opened {
            identity: NetnsIdentity {
                cookie: inode,
                device,
                inode,
                boot_id: self.boot_id().to_owned(),
            },
            descriptor: Arc::new(descriptor),
            notifications: None,
            netns: Box::new(Handle {
                kernel: self.clone(),
                inode,
            }),
        })
    }

    fn open_host(&self, descriptors: Vec<OwnedFd>) -> Result<Box<dyn HostNetns>, DescriptorRefusal> {
        if let Some(descriptor) = descriptors.first() {
            let inode = NetnsInode::of(descriptor)?.inode;
            let known = *self.state().host.get_or_insert(inode);
            if known != inode {
                return Err(DescriptorRefusal::HostChanged { inode, known });
            }
        }
        Ok(Box::new(HostHandle(self.clone())))
    }

    fn preflight(&self, _: Option<Vec<OwnedFd>>, _: bool) -> Result<Vec<Feature>, Failure> {
        Ok(Vec::new())
    }

    fn boot_id(&self) -> &'static str {
        "boot"
    }
}

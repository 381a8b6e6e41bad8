//! What the executor asks of the kernel, as traits: the server and the sandboxes are tested without root
//! against [`fake::FakeKernel`], and run against [`real::RealKernel`].
//!
//! Every call blocks (about half a millisecond for a rule set) and therefore runs on the blocking pool.

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use sluice_proto::ambient::Desired;
use sluice_proto::id::InterfaceName;
use sluice_proto::pb::executor::Feature;
use sluice_proto::sandbox::{Failure, NetnsIdentity};

use crate::descriptors::DescriptorRefusal;
pub use crate::netlink::Tracked;
use crate::rules::RuleSet;

pub mod fake;
mod host;
pub mod real;

/// What one [`Netns::apply`] did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Applied {
    /// Identifies the rule set that is now there.
    pub fingerprint: String,
    /// False: the namespace was already right and was not touched.
    pub changed: bool,
    /// What was taken over from another agent, one line each.
    pub taken_over: Vec<String>,
}

/// One sandbox's network namespace: its descriptor and its sockets.
pub trait Netns: Send {
    /// Makes the namespace match `desired` in one atomic step.
    fn apply(&mut self, desired: &Desired) -> Result<Applied, Failure>;

    /// Whether anything may have changed since the last [`Netns::apply`] or [`Netns::differences`]; cheap.
    fn moved(&mut self) -> Result<bool, Failure>;

    /// Reads everything back; one line a difference from `desired`.
    fn differences(&mut self, desired: &Desired) -> Result<Vec<String>, Failure>;

    /// Whether policy routing is no longer what the last [`Netns::apply`] or [`Netns::differences`] asked for, which
    /// [`Netns::moved`] does not see. `thorough`: everything is read; otherwise that is done now and then, and mostly the
    /// kernel is asked how it would route.
    fn routing_lacks(&mut self, thorough: bool) -> Result<bool, Failure>;

    /// Connections that are the proxy's: translated to it, or HBONE to one of the pod's `own` addresses.
    fn redirected_connections(&mut self, own: &[IpAddr]) -> Result<u32, Failure>;

    /// Makes conntrack know the TCP connections there are, so that none of them is taken for a new one. They are listed
    /// through `diagnostics`, a socket from the opener, which is closed. Conntrack must see every packet already.
    fn track_connections(&mut self, diagnostics: Vec<OwnedFd>) -> Result<Tracked, Failure>;

    /// Whether an interface of this name exists.
    fn has_interface(&mut self, name: &InterfaceName) -> Result<bool, Failure>;

    /// Every address with its interface's name, loopback left out.
    fn addresses(&mut self) -> Result<Vec<(String, IpAddr)>, Failure>;

    /// Sets `lo` up; the opener's scratch namespace has it down.
    fn raise_loopback(&mut self) -> Result<(), Failure>;
}

/// The rules that belong to `desired`, in the model's own words.
pub fn rules_as_text(desired: &Desired) -> Vec<String> {
    RuleSet::for_desired(desired).lines()
}

/// What was found wrong with the host's rules, worst first. Labels of a metric: the set is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum HostDamage {
    /// Our table is not there.
    TableMissing,
    /// The table is switched off; chains or sets are missing, other than declared or not ours.
    TableChanged,
    /// Rules are missing or not ours.
    RulesChanged,
    /// Addresses of pods are missing in the sets.
    AddressesMissing,
    /// Rules of an earlier agent were still there.
    Leftovers,
}

impl HostDamage {
    /// All there are.
    pub const ALL: [Self; 5] = [
        Self::TableMissing,
        Self::TableChanged,
        Self::RulesChanged,
        Self::AddressesMissing,
        Self::Leftovers,
    ];

    /// As the metric names it.
    pub fn label(self) -> &'static str {
        match self {
            Self::TableMissing => "table-missing",
            Self::TableChanged => "table-changed",
            Self::RulesChanged => "rules-changed",
            Self::AddressesMissing => "addresses-missing",
            Self::Leftovers => "leftovers",
        }
    }
}

/// What was mended in the host's namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mended {
    /// The worst of it; `None`: all was right.
    pub worst: Option<HostDamage>,
    /// One line each.
    pub lines: Vec<String>,
}

impl Mended {
    /// Adds what was found of one kind; no lines: nothing was.
    pub fn add(&mut self, damage: HostDamage, lines: impl IntoIterator<Item = String>) {
        let before = self.lines.len();
        self.lines.extend(lines);
        if self.lines.len() > before {
            self.worst = Some(self.worst.map_or(damage, |worst| worst.min(damage)));
        }
    }
}

/// The host's network namespace: probe rules and probe address sets.
pub trait HostNetns: Send {
    /// Makes rules and address sets right; returns what was mended. Addresses that are in the sets and not in `probes`
    /// stay.
    fn ensure(&mut self, probes: &[IpAddr]) -> Result<Mended, Failure>;

    /// Whether anything may have changed since our last own change; cheap.
    fn moved(&mut self) -> Result<bool, Failure>;

    /// Adds addresses; one that is there already is not an error.
    fn add(&mut self, addresses: &[IpAddr]) -> Result<(), Failure>;

    /// Removes addresses; one that is not there is not an error.
    fn remove(&mut self, addresses: &[IpAddr]) -> Result<(), Failure>;

    /// The addresses in the sets.
    fn members(&mut self) -> Result<Vec<IpAddr>, Failure>;

    /// Removes rules and sets altogether; none being there is not an error.
    fn dismantle(&mut self) -> Result<(), Failure>;
}

/// A namespace that was opened from handed-over descriptors and checked.
pub struct Opened {
    /// Which namespace.
    pub identity: NetnsIdentity,
    /// Its descriptor, for the broker.
    pub descriptor: Arc<OwnedFd>,
    /// A route socket that nobody else uses, for link notifications.
    pub notifications: Option<OwnedFd>,
    /// The rest.
    pub netns: Box<dyn Netns>,
}

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opened")
            .field("identity", &self.identity)
            .finish_non_exhaustive()
    }
}

/// Where namespaces come from.
pub trait Kernel: Send + Sync {
    /// Checks handed-over descriptors and makes a namespace of them. Refused are the host's, our own, sockets of
    /// another namespace, and anything that is not what it should be.
    fn open(&self, descriptors: Vec<OwnedFd>) -> Result<Opened, DescriptorRefusal>;

    /// Makes the host's namespace of descriptors that the opener gave, and remembers which one it is; another one is
    /// refused from then on.
    fn open_host(&self, descriptors: Vec<OwnedFd>) -> Result<Box<dyn HostNetns>, DescriptorRefusal>;

    /// Proves each kernel feature in the scratch namespace of `descriptors`, or without any in our own.
    fn preflight(&self, descriptors: Option<Vec<OwnedFd>>, ipv6: bool) -> Result<Vec<Feature>, Failure>;

    /// Boot id of the running kernel.
    fn boot_id(&self) -> &str;
}

//! What a namespace's redirection looks like, as data.
//!
//! A [`RuleSet`] is one nftables table of the `inet` family: base chains, the rules in them, named sets. It is
//! computed by pure functions from typed options and knows nothing of netlink; [`crate::netlink`] encodes it,
//! [`evaluate`] walks it with a packet, and its `Display` is a file that `nft -f` accepts. [`iptables`] renders
//! the same options as the chains of Istio's own agent.
//!
//! Two choices keep a set small, since a rule costs the kernel about 17 µs and little else does:
//! - Rules sit in the base chains. Istio's `accept` rules in front of a redirection are conditions of the redirection
//!   here: at the end of a base chain of type nat, accepting a packet and not matching it are the same.
//! - A rule serves both IP families wherever it does not look at an address.

mod build;
pub mod evaluate;
pub mod iptables;
mod render;

use std::fmt;
use std::net::IpAddr;

use sluice_proto::ambient::{AmbientOptions, Desired};
use sluice_proto::id::InterfaceName;

/// Version of the rule model: what is made of the same options. Raised whenever that changes, so that people see which
/// pods still have the rules of another executor; such rules are brought up to date by the first look at the namespace,
/// as if they had been damaged. 0 are rules from before it was recorded.
pub const RULE_SCHEMA: u32 = 1;

/// The table in a pod's namespace.
pub const POD_TABLE: &str = "sluice";
/// The table in the host's namespace.
pub const HOST_TABLE: &str = "sluice-host";
/// Set of IPv4 pod addresses whose probes get a recognisable source, in [`HOST_TABLE`].
pub const PROBES_V4: &str = "probes-v4";
/// Set of IPv6 pod addresses whose probes get a recognisable source, in [`HOST_TABLE`].
pub const PROBES_V6: &str = "probes-v6";

/// Where the proxy takes outbound TCP.
pub const PORT_OUTBOUND: u16 = 15001;
/// Where the proxy takes inbound plaintext TCP.
pub const PORT_INBOUND: u16 = 15006;
/// Where the proxy takes HBONE.
pub const PORT_HBONE: u16 = 15008;
/// Where the proxy takes DNS.
pub const PORT_DNS: u16 = 15053;
/// `SO_MARK` of the proxy's own sockets, under [`MARK_MASK`].
pub const MARK_PROXY: u32 = 0x539;
/// Mark of connections the proxy opened with a foreign source address; policy routing keeps their replies local.
pub const MARK_LOCAL_REPLY: u32 = 0x111;
/// The bits of marks that are ours.
pub const MARK_MASK: u32 = 0xfff;
/// Conntrack zone of the proxy's own DNS queries.
pub const ZONE_PROXY_DNS: u16 = 1;

/// An IP family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// The family of an address.
    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }
}

/// Protocol above IP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// Any other, by its IANA number.
    Other(u8),
}

impl Protocol {
    /// IANA protocol number.
    pub fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Other(number) => number,
        }
    }
}

/// Whether a match wants the value or anything but it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Is {
    /// Equal.
    Equal,
    /// Not equal.
    Not,
}

/// One condition of a rule.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Match {
    /// The packet is of this family.
    Family(Family),
    /// The packet's protocol.
    Protocol(Protocol),
    /// Source address. Implies the family, as in nft.
    Source(Is, IpAddr),
    /// Destination address. Implies the family.
    Destination(Is, IpAddr),
    /// Destination address is an element of the named set of that family.
    DestinationIn(Family, &'static str),
    /// TCP or UDP source port. Implies the protocol.
    SourcePort(Protocol, Is, u16),
    /// TCP or UDP destination port. Implies the protocol.
    DestinationPort(Protocol, Is, u16),
    /// Interface the packet came in on.
    InInterface(Is, InterfaceName),
    /// The packet leaves through the loopback interface, or through any other.
    OutLoopback(Is),
    /// Packet mark under [`MARK_MASK`].
    Mark(Is, u32),
    /// Connection mark under [`MARK_MASK`].
    CtMark(Is, u32),
    /// The packet opens a TCP connection: of FIN, SYN, RST and ACK it has SYN alone. Implies the protocol.
    OpensTcp(Is),
    /// A socket of this machine sent the packet (`meta skuid >= 0`, which loads only if there is a socket).
    LocalSocket,
}

/// What a rule does with a packet all of its conditions hold for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Action {
    /// Destination becomes this port of the machine itself.
    Redirect(u16),
    /// Source becomes this address.
    SnatTo(IpAddr),
    /// Bits under [`MARK_MASK`] of the connection mark become this value.
    SetCtMark(u32),
    /// Packet mark becomes the connection mark.
    RestoreMark,
    /// The packet is tracked in this conntrack zone.
    SetZone(u16),
    /// Nothing more in this chain.
    Accept,
}

/// A rule: conditions, then an action.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Rule {
    /// All must hold, tested in this order.
    pub matches: Vec<Match>,
    /// Whether matching packets are counted.
    pub counter: bool,
    /// What then happens.
    pub action: Action,
}

/// Type of a base chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChainKind {
    /// Sees every packet.
    Filter,
    /// Sees every packet; a changed mark is routed anew.
    Route,
    /// Sees the first packet of each connection.
    Nat,
}

/// Where a base chain is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Hook {
    /// Everything that arrives, before routing.
    Prerouting,
    /// Everything a local process sends.
    Output,
    /// Everything that leaves, after routing.
    Postrouting,
}

/// A base chain with policy accept.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Chain {
    /// Name within the table.
    pub name: &'static str,
    /// Type.
    pub kind: ChainKind,
    /// Hook.
    pub hook: Hook,
    /// Lower runs earlier.
    pub priority: i32,
    /// In order.
    pub rules: Vec<Rule>,
}

/// A named set of addresses; its elements are not part of the rule set.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AddressSet {
    /// Name within the table.
    pub name: &'static str,
    /// Family of the elements.
    pub family: Family,
}

/// One `inet` table.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RuleSet {
    /// Table name.
    pub table: &'static str,
    /// Named sets.
    pub sets: Vec<AddressSet>,
    /// Base chains; none at all means that the table should not exist.
    pub chains: Vec<Chain>,
}

/// Options of the host's rule set.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HostOptions {
    /// Handle IPv6 too.
    pub ipv6: bool,
    /// Source address of the host's probes, IPv4.
    pub probe_ipv4: std::net::Ipv4Addr,
    /// Source address of the host's probes, IPv6.
    pub probe_ipv6: std::net::Ipv6Addr,
}

impl Default for HostOptions {
    fn default() -> Self {
        let options = AmbientOptions::default();
        Self {
            ipv6: options.ipv6,
            probe_ipv4: options.probe_ipv4,
            probe_ipv6: options.probe_ipv6,
        }
    }
}

impl RuleSet {
    /// What a pod's namespace should hold; empty for [`Desired::None`].
    pub fn for_desired(desired: &Desired) -> Self {
        let chains = match desired {
            Desired::None => Vec::new(),
            Desired::Ambient(options) => build::ambient(options),
            Desired::Joining(options) => build::joining(options),
            Desired::Draining(options) => build::draining(options),
        };
        Self {
            table: POD_TABLE,
            sets: Vec::new(),
            chains,
        }
    }

    /// What the host's namespace should hold: packets of local processes to an enrolled pod get the probe address as
    /// their source, by which the pod knows them.
    pub fn host(options: &HostOptions) -> Self {
        build::host(options)
    }

    /// Whether the table should not exist.
    pub fn is_empty(&self) -> bool {
        self.chains.is_empty() && self.sets.is_empty()
    }

    /// Number of rules in all chains.
    pub fn rule_count(&self) -> usize {
        self.chains.iter().map(|chain| chain.rules.len()).sum()
    }

    /// Names this rule set in status and events; the same on every machine and in every build of a version.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&self.to_string())
    }
}

/// Policy routing that goes with the marks: replies of connections the proxy opened with a foreign source stay local.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PolicyRouting {
    /// Families it is wanted for.
    pub families: &'static [Family],
}

impl PolicyRouting {
    /// Routing table.
    pub const TABLE: u32 = 100;
    /// Priority of the rule that selects [`Self::TABLE`].
    pub const PRIORITY: u32 = 32764;

    /// What a pod's namespace should hold; none for [`Desired::None`].
    pub fn for_desired(desired: &Desired) -> Option<Self> {
        match desired {
            Desired::None => None,
            Desired::Ambient(options) | Desired::Joining(options) | Desired::Draining(options) => {
                Some(Self {
                    families: if options.ipv6 {
                        &[Family::V4, Family::V6]
                    } else {
                        &[Family::V4]
                    },
                })
            }
        }
    }
}

/// Stable name of a rule set's content: FNV-1a of its text form. Says nothing about who wrote it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(u64);

impl Fingerprint {
    fn of(text: &str) -> Self {
        let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        Self(text.bytes().fold(0xcbf2_9ce4_8422_2325, hash))
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

#[cfg(test)]
mod tests;

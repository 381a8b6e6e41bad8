//! Walks a rule set with one packet, as the kernel would.
//!
//! The oracle of the packet tests and the engine behind `sluicectl trace`: pure, and it knows only what a packet
//! description says.

use std::net::IpAddr;

use sluice_proto::id::InterfaceName;

use super::{
    Action, Chain, ChainKind, Family, Hook, Is, MARK_LOCAL_REPLY, MARK_MASK, Match, PolicyRouting, Protocol,
    Rule, RuleSet,
};

/// A packet at a hook.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packet {
    /// Where it is: prerouting for what arrives, output for what a local process sends.
    pub hook: Hook,
    /// Protocol.
    pub protocol: Protocol,
    /// Source address.
    pub source: IpAddr,
    /// Destination address; of the same family.
    pub destination: IpAddr,
    /// Source port; 0 if the protocol has none.
    pub source_port: u16,
    /// Destination port; 0 if the protocol has none.
    pub destination_port: u16,
    /// Interface it came in on; none at the output hook.
    pub in_interface: Option<InterfaceName>,
    /// Whether it leaves through lo.
    pub out_loopback: bool,
    /// Packet mark.
    pub mark: u32,
    /// Mark of its connection.
    pub ct_mark: u32,
    /// Whether conntrack takes it for the first of a connection: only then are nat chains asked.
    pub new_connection: bool,
    /// Whether it opens a TCP connection: of FIN, SYN, RST and ACK it has SYN alone.
    pub opens_tcp: bool,
    /// Owner of the local socket that sent it.
    pub socket_uid: Option<u32>,
}

/// Where the rules send a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// On its way, unchanged.
    Untouched,
    /// To this port of the machine itself.
    Redirected(u16),
    /// On its way, with this source.
    SourceRewritten(IpAddr),
}

/// One rule that was tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Chain.
    pub chain: &'static str,
    /// Number of the rule in it, from 0.
    pub index: usize,
    /// The rule in nft's words.
    pub rule: String,
    /// The first condition that did not hold; none if all did.
    pub failed: Option<String>,
}

/// What became of a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Evaluation {
    /// Where the connection goes.
    pub verdict: Verdict,
    /// Packet mark afterwards.
    pub mark: u32,
    /// Connection mark afterwards.
    pub ct_mark: u32,
    /// Conntrack zone.
    pub zone: u16,
    /// Every rule that was tried, in order.
    pub trace: Vec<Step>,
}

impl Evaluation {
    /// Whether policy routing keeps the packet on this machine.
    pub fn is_routed_locally(&self, routing: Option<PolicyRouting>, family: Family) -> bool {
        routing.is_some_and(|routing| routing.families.contains(&family))
            && self.mark & MARK_MASK == MARK_LOCAL_REPLY
    }
}

/// Walks all chains of the packet's hook, in the order of their priorities.
///
/// `in_set` answers whether an address is an element of a named set.
pub fn evaluate(rule_set: &RuleSet, packet: &Packet, in_set: impl Fn(&str, IpAddr) -> bool) -> Evaluation {
    let mut chains: Vec<&Chain> = rule_set
        .chains
        .iter()
        .filter(|chain| chain.hook == packet.hook)
        .collect();
    chains.sort_by_key(|chain| chain.priority);
    let mut walk = Walk {
        packet: packet.clone(),
        result: Evaluation {
            verdict: Verdict::Untouched,
            mark: packet.mark,
            ct_mark: packet.ct_mark,
            zone: 0,
            trace: Vec::new(),
        },
        in_set: &in_set,
    };
    for chain in chains {
        let bound = walk.result.verdict != Verdict::Untouched;
        if chain.kind != ChainKind::Nat || (packet.new_connection && !bound) {
            walk.chain(chain);
        }
    }
    walk.result
}

struct Walk<'a> {
    packet: Packet,
    result: Evaluation,
    in_set: &'a dyn Fn(&str, IpAddr) -> bool,
}

impl Walk<'_> {
    fn chain(&mut self, chain: &Chain) {
        for (index, rule) in chain.rules.iter().enumerate() {
            let failed = rule.matches.iter().find(|condition| !self.holds(condition));
            self.result.trace.push(Step {
                chain: chain.name,
                index,
                rule: rule.to_string(),
                failed: failed.map(ToString::to_string),
            });
            if failed.is_none() && self.act(rule) {
                return;
            }
        }
    }

    /// Whether nothing more happens in the chain.
    fn act(&mut self, rule: &Rule) -> bool {
        match rule.action {
            Action::Redirect(port) => self.result.verdict = Verdict::Redirected(port),
            Action::SnatTo(address) => self.result.verdict = Verdict::SourceRewritten(address),
            Action::Accept => {}
            Action::SetCtMark(value) => {
                self.result.ct_mark = self.result.ct_mark & !MARK_MASK | value;
                return false;
            }
            Action::RestoreMark => {
                self.result.mark = self.result.ct_mark;
                return false;
            }
            Action::SetZone(zone) => {
                self.result.zone = zone;
                return false;
            }
        }
        true
    }

    fn holds(&self, condition: &Match) -> bool {
        let packet = &self.packet;
        let ports = |protocol: Protocol| packet.protocol == protocol;
        match condition {
            Match::Family(family) => Family::of(packet.destination) == *family,
            Match::Protocol(protocol) => packet.protocol == *protocol,
            Match::Source(is, address) => {
                same_family(packet.source, *address) && is.of(packet.source == *address)
            }
            Match::Destination(is, address) => {
                same_family(packet.destination, *address) && is.of(packet.destination == *address)
            }
            Match::DestinationIn(family, set) => {
                Family::of(packet.destination) == *family && (self.in_set)(set, packet.destination)
            }
            Match::SourcePort(protocol, is, port) => ports(*protocol) && is.of(packet.source_port == *port),
            Match::DestinationPort(protocol, is, port) => {
                ports(*protocol) && is.of(packet.destination_port == *port)
            }
            Match::InInterface(is, name) => is.of(packet.in_interface.as_ref() == Some(name)),
            Match::OutLoopback(is) => is.of(packet.out_loopback),
            Match::Mark(is, value) => is.of(self.result.mark & MARK_MASK == *value),
            Match::CtMark(is, value) => is.of(self.result.ct_mark & MARK_MASK == *value),
            Match::OpensTcp(is) => ports(Protocol::Tcp) && is.of(packet.opens_tcp),
            Match::LocalSocket => packet.socket_uid.is_some(),
        }
    }
}

impl Is {
    fn of(self, equal: bool) -> bool {
        (self == Self::Equal) == equal
    }
}

fn same_family(one: IpAddr, other: IpAddr) -> bool {
    one.is_ipv4() == other.is_ipv4()
}

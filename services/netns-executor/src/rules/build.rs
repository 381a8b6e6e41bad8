//! From options to rules.
//!
//! All priorities are 10 below the standard ones: of several nat chains on a hook the first that binds a connection
//! wins, so ours precede those of kube-proxy, a firewall or a primary CNI in any order of insertion.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use sluice_proto::ambient::AmbientOptions;

use super::{
    Action, AddressSet, Chain, ChainKind, Family, HOST_TABLE, Hook, HostOptions, Is, MARK_LOCAL_REPLY,
    MARK_PROXY, Match, PORT_DNS, PORT_HBONE, PORT_INBOUND, PORT_OUTBOUND, PROBES_V4, PROBES_V6, Protocol,
    Rule, RuleSet, ZONE_PROXY_DNS,
};

const RAW: i32 = -310;
const MANGLE: i32 = -160;
const DESTINATION_NAT: i32 = -110;
const SOURCE_NAT: i32 = 90;

/// Chains of a pod in the mesh.
pub(super) fn ambient(options: &AmbientOptions) -> Vec<Chain> {
    let mut chains = draining(options);
    for chain in &mut chains {
        match (chain.kind, chain.hook) {
            (ChainKind::Nat, Hook::Prerouting) => chain.rules = inbound_redirections(options),
            (ChainKind::Nat, _) => chain.rules = outbound_redirections(options),
            _ => {}
        }
    }
    chains
}

/// Chains of a running pod while its connections are made known to conntrack: as in the mesh, but a packet that
/// conntrack takes for a new connection, and that opens none, belongs to one that was there before.
pub(super) fn joining(options: &AmbientOptions) -> Vec<Chain> {
    let mut chains = ambient(options);
    for chain in chains.iter_mut().filter(|chain| chain.kind == ChainKind::Nat) {
        let spare = Rule {
            matches: own_family(options, vec![Match::OpensTcp(Is::Not)]),
            counter: false,
            action: Action::Accept,
        };
        chain.rules.insert(0, spare);
    }
    chains
}

/// Chains of a pod that leaves: as in the mesh, without redirections.
///
/// The empty nat chains keep conntrack's translation of kept connections alive, the mark rules keep conntrack itself.
pub(super) fn draining(options: &AmbientOptions) -> Vec<Chain> {
    let mut chains = Vec::with_capacity(6);
    let note_proxy = Rule {
        matches: own_family(options, vec![Match::Mark(Is::Equal, MARK_PROXY)]),
        counter: false,
        action: Action::SetCtMark(MARK_LOCAL_REPLY),
    };
    let restore = Rule {
        matches: own_family(options, vec![Match::CtMark(Is::Equal, MARK_LOCAL_REPLY)]),
        counter: false,
        action: Action::RestoreMark,
    };
    chains.push(chain(
        "mangle-prerouting",
        ChainKind::Filter,
        Hook::Prerouting,
        MANGLE,
        vec![note_proxy],
    ));
    chains.push(chain(
        "mangle-output",
        ChainKind::Route,
        Hook::Output,
        MANGLE,
        vec![restore],
    ));
    chains.push(chain(
        "nat-prerouting",
        ChainKind::Nat,
        Hook::Prerouting,
        DESTINATION_NAT,
        Vec::new(),
    ));
    chains.push(chain(
        "nat-output",
        ChainKind::Nat,
        Hook::Output,
        DESTINATION_NAT,
        Vec::new(),
    ));
    // Last, so that switching DNS capture on and off leaves the order of the others.
    if options.dns_capture {
        let own_query = Rule {
            matches: own_family(
                options,
                vec![
                    Match::DestinationPort(Protocol::Udp, Is::Equal, 53),
                    Match::Mark(Is::Equal, MARK_PROXY),
                ],
            ),
            counter: false,
            action: Action::SetZone(ZONE_PROXY_DNS),
        };
        let answer = Rule {
            matches: own_family(
                options,
                vec![
                    Match::SourcePort(Protocol::Udp, Is::Equal, 53),
                    Match::Mark(Is::Not, MARK_PROXY),
                ],
            ),
            counter: false,
            action: Action::SetZone(ZONE_PROXY_DNS),
        };
        chains.push(chain(
            "raw-prerouting",
            ChainKind::Filter,
            Hook::Prerouting,
            RAW,
            vec![answer],
        ));
        chains.push(chain(
            "raw-output",
            ChainKind::Filter,
            Hook::Output,
            RAW,
            vec![own_query],
        ));
    }
    chains
}

fn inbound_redirections(options: &AmbientOptions) -> Vec<Rule> {
    let mut rules = Vec::new();
    for interface in &options.virtual_interfaces {
        let matches = vec![
            Match::InInterface(Is::Equal, interface.clone()),
            Match::Protocol(Protocol::Tcp),
        ];
        rules.push(redirect(own_family(options, matches), PORT_OUTBOUND));
    }
    if !options.bypass_inbound_capture {
        for addresses in families(options) {
            let matches = vec![
                Match::Source(Is::Not, addresses.probe),
                Match::Destination(Is::Not, addresses.loopback),
                Match::DestinationPort(Protocol::Tcp, Is::Not, PORT_HBONE),
                Match::Mark(Is::Not, MARK_PROXY),
            ];
            rules.push(redirect(matches, PORT_INBOUND));
        }
    }
    rules
}

fn outbound_redirections(options: &AmbientOptions) -> Vec<Rule> {
    let mut rules = Vec::new();
    if options.dns_capture {
        let matches = vec![
            Match::OutLoopback(Is::Not),
            Match::DestinationPort(Protocol::Udp, Is::Equal, 53),
            Match::Mark(Is::Not, MARK_PROXY),
        ];
        rules.push(redirect(own_family(options, matches), PORT_DNS));
        for addresses in families(options) {
            // The pod's own addresses are not spared here, in contrast to all other TCP: Istio captures them too.
            let matches = vec![
                Match::Destination(Is::Not, addresses.loopback),
                Match::Destination(Is::Not, addresses.probe),
                Match::DestinationPort(Protocol::Tcp, Is::Equal, 53),
                Match::Mark(Is::Not, MARK_PROXY),
            ];
            rules.push(redirect(matches, PORT_DNS));
        }
    }
    for addresses in families(options) {
        let matches = vec![
            Match::OutLoopback(Is::Not),
            Match::Destination(Is::Not, addresses.loopback),
            Match::Destination(Is::Not, addresses.probe),
            Match::Protocol(Protocol::Tcp),
            Match::Mark(Is::Not, MARK_PROXY),
            Match::Mark(Is::Not, MARK_LOCAL_REPLY),
        ];
        rules.push(redirect(matches, PORT_OUTBOUND));
    }
    rules
}

/// The host's table.
pub(super) fn host(options: &HostOptions) -> RuleSet {
    let mut sets = vec![AddressSet {
        name: PROBES_V4,
        family: Family::V4,
    }];
    let mut probes = vec![(Family::V4, PROBES_V4, IpAddr::V4(options.probe_ipv4))];
    if options.ipv6 {
        sets.push(AddressSet {
            name: PROBES_V6,
            family: Family::V6,
        });
        probes.push((Family::V6, PROBES_V6, IpAddr::V6(options.probe_ipv6)));
    }
    let rules = probes
        .into_iter()
        .map(|(family, set, probe)| Rule {
            matches: vec![
                Match::DestinationIn(family, set),
                Match::Protocol(Protocol::Tcp),
                Match::LocalSocket,
            ],
            counter: true,
            action: Action::SnatTo(probe),
        })
        .collect();
    let postrouting = chain(
        "postrouting",
        ChainKind::Nat,
        Hook::Postrouting,
        SOURCE_NAT,
        rules,
    );
    RuleSet {
        table: HOST_TABLE,
        sets,
        chains: vec![postrouting],
    }
}

struct Addresses {
    loopback: IpAddr,
    probe: IpAddr,
}

fn families(options: &AmbientOptions) -> Vec<Addresses> {
    let mut families = vec![Addresses {
        loopback: Ipv4Addr::LOCALHOST.into(),
        probe: options.probe_ipv4.into(),
    }];
    if options.ipv6 {
        families.push(Addresses {
            loopback: Ipv6Addr::LOCALHOST.into(),
            probe: options.probe_ipv6.into(),
        });
    }
    families
}

/// Confines a rule that looks at no address to IPv4 when IPv6 is not ours.
fn own_family(options: &AmbientOptions, mut matches: Vec<Match>) -> Vec<Match> {
    if !options.ipv6 {
        matches.insert(0, Match::Family(Family::V4));
    }
    matches
}

fn redirect(matches: Vec<Match>, port: u16) -> Rule {
    Rule {
        matches,
        counter: true,
        action: Action::Redirect(port),
    }
}

fn chain(name: &'static str, kind: ChainKind, hook: Hook, priority: i32, rules: Vec<Rule>) -> Chain {
    Chain {
        name,
        kind,
        hook,
        priority,
        rules,
    }
}

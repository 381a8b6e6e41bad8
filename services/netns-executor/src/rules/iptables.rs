//! The same options as chains of Istio's own agent: input of `iptables-restore --noflush`, byte for byte what that
//! agent gives it (`cni/pkg/iptables` there), quirks of spelling included.
//!
//! These are a list of their own and not another rendering of [`RuleSet`]: the incumbent's rules come in another order
//! and number (accept in front of redirect, one list per family), and how a condition is spelled depends on the rule it
//! is in (`-p tcp -m tcp`, `--to-port` next to `--to-ports`). A model that carried all that would hide both. Instead
//! each entry here holds its text *and* its meaning in the common model, [`rule_set`] gives the meaning to the same
//! evaluator, and tests show that both lists treat every packet alike, in the model and in the kernel.

use std::fmt::Write as _;
use std::net::IpAddr;

use sluice_proto::ambient::AmbientOptions;
use sluice_proto::id::InterfaceName;

use super::{
    Action, Chain, ChainKind, Family, Hook, Is, MARK_LOCAL_REPLY, MARK_PROXY, Match, PORT_DNS, PORT_HBONE,
    PORT_INBOUND, PORT_OUTBOUND, Protocol, Rule, RuleSet, ZONE_PROXY_DNS,
};

const PREROUTING: &str = "ISTIO_PRERT";
const OUTPUT: &str = "ISTIO_OUTPUT";

/// One line of the payload.
struct Entry {
    table: &'static str,
    chain: &'static str,
    /// What follows `-A CHAIN `.
    text: String,
    /// None for the jumps from the built-in chains.
    meaning: Option<Rule>,
}

/// Payload of `iptables-restore` (or `ip6tables-restore`) for one family.
pub fn payload(options: &AmbientOptions, family: Family) -> String {
    let entries = entries(options, family);
    let mut out = String::new();
    for table in ["mangle", "nat", "raw"] {
        let entries: Vec<_> = entries.iter().filter(|entry| entry.table == table).collect();
        if entries.is_empty() {
            continue;
        }
        let _ = writeln!(out, "* {table}");
        for chain in created_chains(&entries) {
            let _ = writeln!(out, "-N {chain}");
        }
        for entry in entries {
            let _ = writeln!(out, "-A {} {}", entry.chain, entry.text);
        }
        out.push_str("COMMIT\n");
    }
    out
}

/// What the payload means, for the evaluator: `ISTIO_*` chains are entered unconditionally, so they stand for the
/// built-in ones.
pub fn rule_set(options: &AmbientOptions, family: Family) -> RuleSet {
    let specification: [(&str, &str, &'static str, ChainKind, Hook, i32); 6] = [
        (
            "raw",
            PREROUTING,
            "raw PREROUTING",
            ChainKind::Filter,
            Hook::Prerouting,
            -300,
        ),
        ("raw", OUTPUT, "raw OUTPUT", ChainKind::Filter, Hook::Output, -300),
        (
            "mangle",
            PREROUTING,
            "mangle PREROUTING",
            ChainKind::Filter,
            Hook::Prerouting,
            -150,
        ),
        (
            "mangle",
            OUTPUT,
            "mangle OUTPUT",
            ChainKind::Route,
            Hook::Output,
            -150,
        ),
        (
            "nat",
            PREROUTING,
            "nat PREROUTING",
            ChainKind::Nat,
            Hook::Prerouting,
            -100,
        ),
        ("nat", OUTPUT, "nat OUTPUT", ChainKind::Nat, Hook::Output, -100),
    ];
    let entries = entries(options, family);
    let chains = specification
        .into_iter()
        .map(|(table, chain, name, kind, hook, priority)| {
            let of_chain = entries
                .iter()
                .filter(|entry| entry.table == table && entry.chain == chain);
            Chain {
                name,
                kind,
                hook,
                priority,
                rules: of_chain.filter_map(|entry| entry.meaning.clone()).collect(),
            }
        })
        .collect();
    RuleSet {
        table: "istio",
        sets: Vec::new(),
        chains,
    }
}

/// Own chains in the order the incumbent creates them: those that have rules, then those only jumped to.
fn created_chains<'a>(entries: &[&'a Entry]) -> Vec<&'a str> {
    let own = entries
        .iter()
        .map(|entry| entry.chain)
        .filter(|chain| chain.starts_with("ISTIO"));
    let targets = entries.iter().filter_map(|entry| entry.text.strip_prefix("-j "));
    let mut chains = Vec::new();
    for chain in own.chain(targets) {
        if !chains.contains(&chain) {
            chains.push(chain);
        }
    }
    chains
}

fn entries(options: &AmbientOptions, family: Family) -> Vec<Entry> {
    let (probe, loopback, loopback_text): (IpAddr, IpAddr, &str) = match family {
        Family::V4 => (
            options.probe_ipv4.into(),
            std::net::Ipv4Addr::LOCALHOST.into(),
            "127.0.0.1/32",
        ),
        Family::V6 => (
            options.probe_ipv6.into(),
            std::net::Ipv6Addr::LOCALHOST.into(),
            "::1/128",
        ),
    };
    let dns = options.dns_capture;
    let inbound = !options.bypass_inbound_capture;
    let mut list = jumps(dns);
    list.extend(options.virtual_interfaces.iter().flat_map(interface_entries));
    list.push(entry(
        "mangle",
        PREROUTING,
        "-m mark --mark 0x539/0xfff -j CONNMARK --set-xmark 0x111/0xfff",
        vec![Match::Mark(Is::Equal, MARK_PROXY)],
        Action::SetCtMark(MARK_LOCAL_REPLY),
    ));
    if inbound {
        let matches = vec![Match::Source(Is::Equal, probe), Match::Protocol(Protocol::Tcp)];
        list.push(entry(
            "nat",
            PREROUTING,
            format!("-s {probe} -p tcp -m tcp -j ACCEPT"),
            matches,
            Action::Accept,
        ));
    }
    let matches = vec![
        Match::Destination(Is::Equal, probe),
        Match::Protocol(Protocol::Tcp),
    ];
    list.push(entry(
        "nat",
        OUTPUT,
        format!("-d {probe} -p tcp -m tcp -j ACCEPT"),
        matches,
        Action::Accept,
    ));
    if inbound {
        list.push(entry(
            "nat",
            PREROUTING,
            format!("! -d {loopback_text} -p tcp ! --dport 15008 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15006"),
            vec![
                Match::Destination(Is::Not, loopback),
                Match::DestinationPort(Protocol::Tcp, Is::Not, PORT_HBONE),
                Match::Mark(Is::Not, MARK_PROXY),
            ],
            Action::Redirect(PORT_INBOUND),
        ));
    }
    list.push(entry(
        "mangle",
        OUTPUT,
        "-m connmark --mark 0x111/0xfff -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff",
        vec![Match::CtMark(Is::Equal, MARK_LOCAL_REPLY)],
        Action::RestoreMark,
    ));
    if dns {
        list.extend(dns_entries(loopback, loopback_text));
    }
    list.extend(outbound_entries(loopback, loopback_text));
    list
}

/// From the built-in chains to our own.
fn jumps(dns: bool) -> Vec<Entry> {
    let mut list = vec![
        jump("mangle", "PREROUTING", PREROUTING),
        jump("mangle", "OUTPUT", OUTPUT),
        jump("nat", "OUTPUT", OUTPUT),
    ];
    if dns {
        list.push(jump("raw", "PREROUTING", PREROUTING));
        list.push(jump("raw", "OUTPUT", OUTPUT));
    }
    list.push(jump("nat", "PREROUTING", PREROUTING));
    list
}

/// TCP that arrives on a virtual interface counts as outbound.
fn interface_entries(interface: &InterfaceName) -> [Entry; 2] {
    let matches = || {
        vec![
            Match::InInterface(Is::Equal, interface.clone()),
            Match::Protocol(Protocol::Tcp),
        ]
    };
    [
        entry(
            "nat",
            PREROUTING,
            format!("-i {interface} -p tcp -j REDIRECT --to-ports 15001"),
            matches(),
            Action::Redirect(PORT_OUTBOUND),
        ),
        entry(
            "nat",
            PREROUTING,
            format!("-i {interface} -p tcp -j RETURN"),
            matches(),
            Action::Accept,
        ),
    ]
}

fn dns_entries(loopback: IpAddr, loopback_text: &str) -> [Entry; 4] {
    [
        entry(
            "nat",
            OUTPUT,
            "! -o lo -p udp -m mark ! --mark 0x539/0xfff -m udp --dport 53 -j REDIRECT --to-port 15053",
            vec![
                Match::OutLoopback(Is::Not),
                Match::DestinationPort(Protocol::Udp, Is::Equal, 53),
                Match::Mark(Is::Not, MARK_PROXY),
            ],
            Action::Redirect(PORT_DNS),
        ),
        entry(
            "nat",
            OUTPUT,
            format!(
                "! -d {loopback_text} -p tcp --dport 53 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15053"
            ),
            vec![
                Match::Destination(Is::Not, loopback),
                Match::DestinationPort(Protocol::Tcp, Is::Equal, 53),
                Match::Mark(Is::Not, MARK_PROXY),
            ],
            Action::Redirect(PORT_DNS),
        ),
        entry(
            "raw",
            OUTPUT,
            "-p udp -m mark --mark 0x539/0xfff -m udp --dport 53 -j CT --zone 1",
            vec![
                Match::DestinationPort(Protocol::Udp, Is::Equal, 53),
                Match::Mark(Is::Equal, MARK_PROXY),
            ],
            Action::SetZone(ZONE_PROXY_DNS),
        ),
        entry(
            "raw",
            PREROUTING,
            "-p udp -m mark ! --mark 0x539/0xfff -m udp --sport 53 -j CT --zone 1",
            vec![
                Match::SourcePort(Protocol::Udp, Is::Equal, 53),
                Match::Mark(Is::Not, MARK_PROXY),
            ],
            Action::SetZone(ZONE_PROXY_DNS),
        ),
    ]
}

fn outbound_entries(loopback: IpAddr, loopback_text: &str) -> [Entry; 3] {
    [
        entry(
            "nat",
            OUTPUT,
            "-p tcp -m mark --mark 0x111/0xfff -j ACCEPT",
            vec![
                Match::Protocol(Protocol::Tcp),
                Match::Mark(Is::Equal, MARK_LOCAL_REPLY),
            ],
            Action::Accept,
        ),
        entry(
            "nat",
            OUTPUT,
            format!("! -d {loopback_text} -o lo -j ACCEPT"),
            vec![
                Match::OutLoopback(Is::Equal),
                Match::Destination(Is::Not, loopback),
            ],
            Action::Accept,
        ),
        entry(
            "nat",
            OUTPUT,
            format!("! -d {loopback_text} -p tcp -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15001"),
            vec![
                Match::Destination(Is::Not, loopback),
                Match::Protocol(Protocol::Tcp),
                Match::Mark(Is::Not, MARK_PROXY),
            ],
            Action::Redirect(PORT_OUTBOUND),
        ),
    ]
}

fn jump(table: &'static str, chain: &'static str, target: &'static str) -> Entry {
    Entry {
        table,
        chain,
        text: format!("-j {target}"),
        meaning: None,
    }
}

fn entry(
    table: &'static str,
    chain: &'static str,
    text: impl Into<String>,
    matches: Vec<Match>,
    action: Action,
) -> Entry {
    Entry {
        table,
        chain,
        text: text.into(),
        meaning: Some(Rule {
            matches,
            counter: false,
            action,
        }),
    }
}

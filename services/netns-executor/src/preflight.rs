//! Proves, one by one, that the kernel has what the rules need, by making it in a namespace and taking it away again.
//!
//! Meant for a scratch namespace; in any other, what is made matches no packet and is gone when this returns.

use std::net::IpAddr;

use nix::errno::Errno;
use sluice_proto::ambient::AmbientOptions;

use crate::netlink::error::NetlinkError;
use crate::netlink::route::{self, Object};
use crate::netlink::{Batch, NetfilterSocket, PodSockets, link, table};
use crate::rules::{
    Action, AddressSet, Chain, ChainKind, Family, Hook, Is, MARK_LOCAL_REPLY, Match, PORT_INBOUND, Protocol,
    Rule,
};

const TABLE: &str = "sluice-preflight";
const SET: &str = "addresses";
/// No packet has it: the rules of the preflight match nothing.
const MARK_NEVER: u32 = 0xabc;

/// One thing the kernel must be able to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Feature {
    /// What it is.
    pub name: &'static str,
    /// nft's name of the family: `ip`, `ip6`, or `inet` for both at once.
    pub family: &'static str,
    /// Whether Sluice cannot work without it.
    pub required: bool,
    /// Whether the kernel did it.
    pub available: bool,
    /// Name of the error number if it did not (errno.h).
    pub errno: Option<String>,
}

impl From<Feature> for sluice_proto::pb::executor::Feature {
    fn from(feature: Feature) -> Self {
        Self {
            name: feature.name.to_owned(),
            family: feature.family.to_owned(),
            required: feature.required,
            available: feature.available,
            error: feature.errno.unwrap_or_default(),
        }
    }
}

/// Tries every feature, for IPv4 and IPv6 apart. Those of IPv6 are required only with `ipv6`.
pub fn preflight(sockets: &PodSockets, ipv6: bool) -> Vec<Feature> {
    let mut features = Vec::new();
    let mut record = |name, family, required, outcome: Result<(), NetlinkError>| {
        let errno = outcome.as_ref().err().map(errno_name);
        features.push(Feature {
            name,
            family,
            required,
            available: outcome.is_ok(),
            errno,
        });
    };
    for (name, chain) in shared_chains() {
        record(name, "inet", true, try_chain(&sockets.netfilter, &[], &chain));
    }
    // A local route needs it; a namespace whose lo is up already stays as it is.
    let loopback = link::set_loopback_up(&sockets.route);
    record("loopback interface", "inet", true, loopback);
    for family in [Family::V4, Family::V6] {
        let (words, required) = match family {
            Family::V4 => ("ip", true),
            Family::V6 => ("ip6", ipv6),
        };
        for (name, sets, chain) in family_chains(family) {
            record(
                name,
                words,
                required,
                try_chain(&sockets.netfilter, &sets, &chain),
            );
        }
        record(
            "policy rule by mark",
            words,
            required,
            try_object(sockets, Object::Rule(family)),
        );
        record(
            "local route",
            words,
            required,
            try_object(sockets, Object::Route(family)),
        );
    }
    features
}

fn shared_chains() -> Vec<(&'static str, Chain)> {
    let never = || vec![Match::Mark(Is::Equal, MARK_NEVER)];
    let chain = |kind, hook, priority, matches, action| base(kind, hook, priority, rule(matches, action));
    let (filter, route) = (ChainKind::Filter, ChainKind::Route);
    vec![
        (
            "packet mark",
            chain(filter, Hook::Prerouting, -160, never(), Action::Accept),
        ),
        (
            "connection mark",
            chain(
                filter,
                Hook::Prerouting,
                -160,
                never(),
                Action::SetCtMark(MARK_LOCAL_REPLY),
            ),
        ),
        (
            "conntrack zone",
            chain(filter, Hook::Prerouting, -310, never(), Action::SetZone(1)),
        ),
        (
            "route chain",
            chain(route, Hook::Output, -160, never(), Action::RestoreMark),
        ),
        (
            "socket owner",
            chain(
                filter,
                Hook::Output,
                0,
                vec![never().remove(0), Match::LocalSocket],
                Action::Accept,
            ),
        ),
    ]
}

fn family_chains(family: Family) -> Vec<(&'static str, Vec<AddressSet>, Chain)> {
    let options = AmbientOptions::default();
    let probe = match family {
        Family::V4 => IpAddr::V4(options.probe_ipv4),
        Family::V6 => IpAddr::V6(options.probe_ipv6),
    };
    let never = || vec![Match::Mark(Is::Equal, MARK_NEVER), Match::Family(family)];
    let with = |condition| [never(), vec![condition]].concat();
    let tcp = || with(Match::DestinationPort(Protocol::Tcp, Is::Not, PORT_INBOUND));
    let nat = |hook, matches, action| base(ChainKind::Nat, hook, -110, rule(matches, action));
    let redirect = Action::Redirect(PORT_INBOUND);
    let set = AddressSet { name: SET, family };
    vec![
        (
            "nat redirect, inbound",
            Vec::new(),
            nat(Hook::Prerouting, tcp(), redirect.clone()),
        ),
        (
            "nat redirect, outbound",
            Vec::new(),
            nat(Hook::Output, tcp(), redirect),
        ),
        (
            "source nat",
            Vec::new(),
            nat(Hook::Postrouting, tcp(), Action::SnatTo(probe)),
        ),
        (
            "address set",
            vec![set],
            base(
                ChainKind::Filter,
                Hook::Output,
                0,
                rule(with(Match::DestinationIn(family, SET)), Action::Accept),
            ),
        ),
        (
            "address match",
            Vec::new(),
            base(
                ChainKind::Filter,
                Hook::Output,
                0,
                rule(with(Match::Destination(Is::Not, probe)), Action::Accept),
            ),
        ),
    ]
}

fn rule(matches: Vec<Match>, action: Action) -> Rule {
    Rule {
        matches,
        counter: true,
        action,
    }
}

fn base(kind: ChainKind, hook: Hook, priority: i32, rule: Rule) -> Chain {
    Chain {
        name: "try",
        kind,
        hook,
        priority,
        rules: vec![rule],
    }
}

fn try_chain(socket: &NetfilterSocket, sets: &[AddressSet], chain: &Chain) -> Result<(), NetlinkError> {
    table::delete(socket, TABLE)?;
    let mut batch = Batch::new();
    batch.new_table(TABLE);
    for set in sets {
        batch.new_set(TABLE, set);
    }
    batch.new_chain(TABLE, chain);
    for rule in &chain.rules {
        batch.new_rule(TABLE, chain.name, rule);
    }
    batch.commit(socket)?;
    table::delete(socket, TABLE).map(drop)
}

fn try_object(sockets: &PodSockets, object: Object) -> Result<(), NetlinkError> {
    let outcome = route::add(&sockets.route, &[object])?;
    // What was there before is not ours to remove.
    route::remove(&sockets.route, &outcome.added)?;
    if outcome.without_ipv6 {
        let source = std::io::Error::from_raw_os_error(libc::EAFNOSUPPORT);
        return Err(NetlinkError::Refused {
            request: object.words(),
            detail: " (IPv6 is off)".into(),
            source,
        });
    }
    Ok(())
}

fn errno_name(error: &NetlinkError) -> String {
    error.errno().map_or_else(
        || error.to_string(),
        |errno| format!("{:?}", Errno::from_raw(errno)),
    )
}

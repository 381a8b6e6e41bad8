//! Rule sets in nft's own words, spelled as `nft list` spells them.

use std::fmt;
use std::net::IpAddr;

use super::{
    Action, AddressSet, Chain, ChainKind, Family, Hook, Is, MARK_MASK, Match, PolicyRouting, Protocol, Rule,
    RuleSet,
};

/// A file that `nft -f` accepts.
impl fmt::Display for RuleSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return Ok(());
        }
        writeln!(f, "table inet {} {{", self.table)?;
        let mut separator = "";
        for set in &self.sets {
            write!(f, "{separator}{set}")?;
            separator = "\n";
        }
        for chain in &self.chains {
            write!(f, "{separator}{chain}")?;
            separator = "\n";
        }
        writeln!(f, "}}")
    }
}

impl RuleSet {
    /// The text form, line by line.
    pub fn lines(&self) -> Vec<String> {
        self.to_string().lines().map(str::to_owned).collect()
    }
}

impl fmt::Display for AddressSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ty = match self.family {
            Family::V4 => "ipv4_addr",
            Family::V6 => "ipv6_addr",
        };
        writeln!(f, "\tset {} {{\n\t\ttype {ty}\n\t}}", self.name)
    }
}

impl fmt::Display for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\tchain {} {{\n\t\t{}", self.name, self.declaration())?;
        for rule in &self.rules {
            writeln!(f, "\t\t{rule}")?;
        }
        writeln!(f, "\t}}")
    }
}

impl Chain {
    /// Type, hook, priority and policy.
    pub fn declaration(&self) -> String {
        format!(
            "type {} hook {} priority {}; policy accept;",
            self.kind, self.hook, self.priority
        )
    }
}

impl fmt::Display for ChainKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Filter => "filter",
            Self::Route => "route",
            Self::Nat => "nat",
        })
    }
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prerouting => "prerouting",
            Self::Output => "output",
            Self::Postrouting => "postrouting",
        })
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for matches in &self.matches {
            write!(f, "{matches} ")?;
        }
        if self.counter {
            f.write_str("counter ")?;
        }
        write!(f, "{}", self.action)
    }
}

impl fmt::Display for Match {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Family(Family::V4) => f.write_str("meta nfproto ipv4"),
            Self::Family(Family::V6) => f.write_str("meta nfproto ipv6"),
            Self::Protocol(protocol) => write!(f, "meta l4proto {protocol}"),
            Self::Source(is, address) => write!(f, "{} saddr {is}{address}", family_word(*address)),
            Self::Destination(is, address) => write!(f, "{} daddr {is}{address}", family_word(*address)),
            Self::DestinationIn(Family::V4, set) => write!(f, "ip daddr @{set}"),
            Self::DestinationIn(Family::V6, set) => write!(f, "ip6 daddr @{set}"),
            Self::SourcePort(protocol, is, port) => write!(f, "{protocol} sport {is}{port}"),
            Self::DestinationPort(protocol, is, port) => write!(f, "{protocol} dport {is}{port}"),
            Self::InInterface(is, name) => write!(f, "iifname {is}\"{name}\""),
            Self::OutLoopback(is) => write!(f, "oifname {is}\"lo\""),
            Self::Mark(is, value) => mark(f, "meta mark", *is, *value),
            Self::CtMark(is, value) => mark(f, "ct mark", *is, *value),
            Self::OpensTcp(is) => write!(f, "tcp flags {is}syn / fin,syn,rst,ack"),
            Self::LocalSocket => f.write_str("meta skuid >= 0"),
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Redirect(port) => write!(f, "redirect to :{port}"),
            Self::SnatTo(address) => write!(f, "snat {} to {address}", family_word(*address)),
            Self::SetCtMark(value) => {
                write!(
                    f,
                    "ct mark set ct mark & {:#010x} | {value:#010x}",
                    !MARK_MASK | value
                )
            }
            Self::RestoreMark => f.write_str("meta mark set ct mark"),
            Self::SetZone(zone) => write!(f, "ct zone set {zone}"),
            Self::Accept => f.write_str("accept"),
        }
    }
}

impl fmt::Display for Is {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::Not { "!= " } else { "" })
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp => f.write_str("tcp"),
            Self::Udp => f.write_str("udp"),
            Self::Other(number) => write!(f, "{number}"),
        }
    }
}

fn mark(f: &mut fmt::Formatter<'_>, key: &str, is: Is, value: u32) -> fmt::Result {
    let operator = if is == Is::Not { "!=" } else { "==" };
    write!(f, "{key} & {MARK_MASK:#010x} {operator} {value:#010x}")
}

fn family_word(address: IpAddr) -> &'static str {
    if address.is_ipv4() { "ip" } else { "ip6" }
}

impl PolicyRouting {
    /// The rule of a family, as arguments of `ip rule add`.
    pub fn rule_words(family: Family) -> String {
        format!(
            "{}pref {} fwmark {:#x}/{MARK_MASK:#x} lookup {}",
            option(family),
            Self::PRIORITY,
            super::MARK_LOCAL_REPLY,
            Self::TABLE
        )
    }

    /// The route of a family, as arguments of `ip route add`.
    pub fn route_words(family: Family) -> String {
        format!("{}local default dev lo table {}", option(family), Self::TABLE)
    }
}

fn option(family: Family) -> &'static str {
    if family == Family::V6 { "-6 " } else { "" }
}

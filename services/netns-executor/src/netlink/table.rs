//! Reads one of our tables back, tells how it differs from what it should be, and makes it so in one transaction.

use std::net::IpAddr;

use super::bytes::{Attributes, Message};
use super::compare::{Comparison, compare};
use super::error::NetlinkError;
use super::expression;
use super::nft::{self, Batch, FIXED, Transaction};
use super::socket::NetfilterSocket;
use crate::rules::{Fingerprint, RuleSet};

/// A rule set with everything computed that programming and comparing it needs.
#[derive(Debug, Clone)]
pub struct EncodedRuleSet {
    /// The rule set.
    pub rule_set: RuleSet,
    /// Its name.
    pub fingerprint: Fingerprint,
    /// Expressions of each rule, by chain.
    pub(super) expressions: Vec<Vec<Vec<u8>>>,
    /// Creates all of it where nothing is.
    create: Transaction,
}

impl EncodedRuleSet {
    /// Encodes a rule set.
    pub fn new(rule_set: RuleSet) -> Self {
        let expressions = rule_set
            .chains
            .iter()
            .map(|chain| chain.rules.iter().map(expression::encode).collect())
            .collect();
        let mut batch = Batch::new();
        push_all(&mut batch, &rule_set);
        Self {
            fingerprint: rule_set.fingerprint(),
            expressions,
            create: batch.finish(),
            rule_set,
        }
    }
}

fn push_all(batch: &mut Batch, rule_set: &RuleSet) {
    if rule_set.is_empty() {
        return;
    }
    batch.new_table(rule_set.table);
    for set in &rule_set.sets {
        batch.new_set(rule_set.table, set);
    }
    for chain in &rule_set.chains {
        batch.new_chain(rule_set.table, chain);
        for rule in &chain.rules {
            batch.new_rule(rule_set.table, chain.name, rule);
        }
    }
}

/// A chain as the kernel describes it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChainState {
    /// Name.
    pub name: String,
    /// Type, hook number and priority, if it is a base chain.
    pub base: Option<(String, u32, i32)>,
    /// Policy; 1 is accept.
    pub policy: Option<u32>,
    /// Handle and expressions of each rule.
    pub rules: Vec<(u64, Vec<u8>)>,
}

/// A set as the kernel describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetState {
    /// Name.
    pub name: String,
    /// nft's type number of the key.
    pub key_type: u32,
    /// Length of the key in bytes.
    pub key_length: u32,
    /// `NFT_SET_*` flags.
    pub flags: u32,
}

/// A table as the kernel describes it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TableState {
    /// `NFT_TABLE_F_*` flags; 1 is dormant.
    pub flags: u32,
    /// Number of chains, sets, objects and flow tables.
    pub members: u32,
    /// Chains with their rules.
    pub chains: Vec<ChainState>,
    /// Sets, without elements.
    pub sets: Vec<SetState>,
}

/// The state of an `inet` table, or none if there is no such table.
pub fn read_table(socket: &NetfilterSocket, table: &str) -> Result<Option<TableState>, NetlinkError> {
    let Some(mut state) = read_head(socket, table)? else {
        return Ok(None);
    };
    state.chains = read_chains(socket, table)?;
    read_rules(socket, table, &mut state.chains)?;
    if state.members as usize > state.chains.len() {
        state.sets = read_sets(socket, table)?;
    }
    Ok(Some(state))
}

/// Flags and number of members of a table.
fn read_head(socket: &NetfilterSocket, table: &str) -> Result<Option<TableState>, NetlinkError> {
    let found = socket.ask(
        "the table",
        |sequence| nft::query(nft::GETTABLE, false, sequence, |w| w.string(1, table)),
        |message| {
            let attributes = message.attributes(FIXED);
            Some(TableState {
                flags: attributes.be32(2).unwrap_or(0),
                members: attributes.be32(3).unwrap_or(0),
                ..TableState::default()
            })
        },
    );
    match found {
        Ok(state) => Ok(Some(state)),
        Err(error) if error.errno() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

fn read_chains(socket: &NetfilterSocket, table: &str) -> Result<Vec<ChainState>, NetlinkError> {
    socket.query(
        "the chains",
        |sequence| nft::query(nft::GETCHAIN, true, sequence, |_| {}),
        Vec::new,
        |chains, message| {
            let attributes = message.attributes(FIXED);
            // The kernel filters a dump of chains by family only.
            if message.ty != nft::NEWCHAIN || attributes.string(1) != Some(table) {
                return;
            }
            let hook = attributes.nested(4);
            let base = hook.be32(1).zip(hook.be32(2)).map(|(number, priority)| {
                (
                    attributes.string(7).unwrap_or_default().to_owned(),
                    number,
                    priority.cast_signed(),
                )
            });
            chains.push(ChainState {
                name: attributes.string(3).unwrap_or_default().to_owned(),
                base,
                policy: attributes.be32(5),
                rules: Vec::new(),
            });
        },
    )
}

fn read_rules(socket: &NetfilterSocket, table: &str, chains: &mut [ChainState]) -> Result<(), NetlinkError> {
    let rules = socket.query(
        "the rules",
        |sequence| nft::query(nft::GETRULE, true, sequence, |w| w.string(1, table)),
        Vec::new,
        |rules, message| {
            let attributes = message.attributes(FIXED);
            if message.ty == nft::NEWRULE && attributes.string(1) == Some(table) {
                let chain = attributes.string(2).unwrap_or_default().to_owned();
                let expressions = attributes.find(4).unwrap_or_default().to_vec();
                rules.push((chain, (attributes.be64(3).unwrap_or(0), expressions)));
            }
        },
    )?;
    for (name, rule) in rules {
        // A chain that appeared between the two dumps is for the next comparison.
        if let Some(chain) = chains.iter_mut().find(|chain| chain.name == name) {
            chain.rules.push(rule);
        }
    }
    Ok(())
}

fn read_sets(socket: &NetfilterSocket, table: &str) -> Result<Vec<SetState>, NetlinkError> {
    socket.query(
        "the sets",
        |sequence| nft::query(nft::GETSET, true, sequence, |w| w.string(1, table)),
        Vec::new,
        |sets, message| {
            let attributes = message.attributes(FIXED);
            if message.ty == nft::NEWSET {
                sets.push(SetState {
                    name: attributes.string(2).unwrap_or_default().to_owned(),
                    key_type: attributes.be32(4).unwrap_or(0),
                    key_length: attributes.be32(5).unwrap_or(0),
                    flags: attributes.be32(3).unwrap_or(0),
                });
            }
        },
    )
}

/// The elements of a set of addresses, in the kernel's order.
pub fn read_elements(socket: &NetfilterSocket, table: &str, set: &str) -> Result<Vec<IpAddr>, NetlinkError> {
    socket.query(
        "the set's elements",
        |sequence| {
            nft::query(nft::GETSETELEM, true, sequence, |w| {
                w.string(1, table);
                w.string(2, set);
            })
        },
        Vec::new,
        |addresses: &mut Vec<IpAddr>, message: &Message<'_>| {
            for (_, element) in message.attributes(FIXED).nested(3) {
                let key = Attributes(element).nested(1).find(1).unwrap_or_default();
                if let Ok(octets) = <[u8; 4]>::try_from(key) {
                    addresses.push(octets.into());
                } else if let Ok(octets) = <[u8; 16]>::try_from(key) {
                    addresses.push(octets.into());
                }
            }
        },
    )
}

/// The namespace's rule set generation (`NFT_MSG_GETGEN`): moves with every change by anyone but iptables-legacy.
pub fn generation(socket: &NetfilterSocket) -> Result<u32, NetlinkError> {
    socket.ask(
        "the generation",
        |sequence| nft::query(nft::GETGEN, false, sequence, |_| {}),
        |message| message.attributes(FIXED).be32(1),
    )
}

/// What is wrong with a table, worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TableDamage {
    /// It is not there.
    Missing,
    /// It is switched off or should not be there; chains or sets are missing, other than declared or not ours.
    Changed,
    /// Rules are missing or not ours.
    Rules,
}

/// How a table differs from what it should be.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Difference {
    /// The worst of it; `None`: it does not differ.
    pub damage: Option<TableDamage>,
    /// One line a difference.
    pub lines: Vec<String>,
}

impl Difference {
    fn one(damage: TableDamage, line: String) -> Self {
        Self {
            damage: Some(damage),
            lines: vec![line],
        }
    }
}

/// How the table differs from what it should be.
pub fn difference(socket: &NetfilterSocket, wanted: &EncodedRuleSet) -> Result<Difference, NetlinkError> {
    let table = wanted.rule_set.table;
    Ok(match (read_table(socket, table)?, wanted.rule_set.is_empty()) {
        (None, true) => Difference::default(),
        (None, false) => Difference::one(TableDamage::Missing, format!("table inet {table} is missing")),
        (Some(_), true) => Difference::one(
            TableDamage::Changed,
            format!("table inet {table} should not exist"),
        ),
        (Some(state), false) => {
            let comparison = compare(wanted, &state);
            Difference {
                damage: comparison.damage(),
                lines: comparison.lines,
            }
        }
    })
}

/// Makes the table what it should be; false if it was so already and nothing was changed.
///
/// Named sets and their elements are kept wherever their type is right.
pub fn converge(socket: &NetfilterSocket, wanted: &EncodedRuleSet) -> Result<bool, NetlinkError> {
    let state = read_table(socket, wanted.rule_set.table)?;
    converge_from(socket, wanted, state.as_ref())
}

/// As [`converge`], for a state that was just read.
pub fn converge_from(
    socket: &NetfilterSocket,
    wanted: &EncodedRuleSet,
    state: Option<&TableState>,
) -> Result<bool, NetlinkError> {
    let Some(state) = state else {
        // No deletion: that is the cheap form, and closing the socket afterwards does not wait for RCU.
        wanted.create.commit(socket)?;
        return Ok(!wanted.rule_set.is_empty());
    };
    if wanted.rule_set.is_empty() {
        return delete(socket, wanted.rule_set.table);
    }
    let comparison = compare(wanted, state);
    if comparison.lines.is_empty() {
        return Ok(false);
    }
    replacement(wanted, state, &comparison).commit(socket)?;
    Ok(true)
}

/// Deletes a table; false if there was none.
///
/// Looks first: a batch that fails waits for an RCU grace period, ten milliseconds and more.
pub fn delete(socket: &NetfilterSocket, table: &str) -> Result<bool, NetlinkError> {
    if read_head(socket, table)?.is_none() {
        return Ok(false);
    }
    let mut batch = Batch::new();
    batch.delete_table(table);
    match batch.commit(socket) {
        Ok(()) => Ok(true),
        Err(error) if error.errno() == Some(libc::ENOENT) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The smallest transaction that repairs. There is no moment without a nat chain and a rule that uses conntrack: the
/// kernel registers new hooks before it lets go of old ones.
fn replacement(wanted: &EncodedRuleSet, state: &TableState, comparison: &Comparison) -> Batch {
    let rule_set = &wanted.rule_set;
    let table = rule_set.table;
    let mut batch = Batch::new();
    if comparison.beyond_repair {
        batch.delete_table(table);
        push_all(&mut batch, rule_set);
        return batch;
    }
    if !comparison.structural {
        for chain in rule_set
            .chains
            .iter()
            .filter(|chain| comparison.stale_chains.contains(&chain.name))
        {
            batch.flush_chain(table, chain.name);
            for rule in &chain.rules {
                batch.new_rule(table, chain.name, rule);
            }
        }
        return batch;
    }
    batch.flush_table(table);
    for name in state
        .chains
        .iter()
        .map(|chain| &chain.name)
        .filter(|name| comparison.removed.contains(name))
    {
        batch.delete_chain(table, name);
    }
    for name in state
        .sets
        .iter()
        .map(|set| &set.name)
        .filter(|name| comparison.removed.contains(name))
    {
        batch.delete_set(table, name);
    }
    push_all(&mut batch, rule_set);
    batch
}

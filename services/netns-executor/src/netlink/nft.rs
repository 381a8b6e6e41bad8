//! nf_tables transactions: what a batch can hold, and how it is committed.
//!
//! A batch is one datagram, `NFNL_MSG_BATCH_BEGIN` to `NFNL_MSG_BATCH_END`; the kernel takes all of it or nothing. Only
//! the last message asks for an acknowledgement: that one without any error is success.

use std::net::IpAddr;

use super::bytes::Writer;
use super::error::NetlinkError;
use super::expression;
use super::socket::{ACK, APPEND, CREATE, DUMP, NetfilterSocket, REQUEST};
use super::verdict::Refusal;
use crate::rules::{AddressSet, Chain, ChainKind, Family, Hook, Rule};

const SUBSYSTEM: u16 = 0x0a00; // NFNL_SUBSYS_NFTABLES << 8
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
pub(super) const NEWTABLE: u16 = SUBSYSTEM;
pub(super) const GETTABLE: u16 = SUBSYSTEM | 0x01;
const DELTABLE: u16 = SUBSYSTEM | 0x02;
pub(super) const NEWCHAIN: u16 = SUBSYSTEM | 0x03;
pub(super) const GETCHAIN: u16 = SUBSYSTEM | 0x04;
const DELCHAIN: u16 = SUBSYSTEM | 0x05;
pub(super) const NEWRULE: u16 = SUBSYSTEM | 0x06;
pub(super) const GETRULE: u16 = SUBSYSTEM | 0x07;
const DELRULE: u16 = SUBSYSTEM | 0x08;
pub(super) const NEWSET: u16 = SUBSYSTEM | 0x09;
pub(super) const GETSET: u16 = SUBSYSTEM | 0x0a;
const DELSET: u16 = SUBSYSTEM | 0x0b;
const NEWSETELEM: u16 = SUBSYSTEM | 0x0c;
pub(super) const GETSETELEM: u16 = SUBSYSTEM | 0x0d;
const DELSETELEM: u16 = SUBSYSTEM | 0x0e;
pub(super) const GETGEN: u16 = SUBSYSTEM | 0x10;

/// Family byte of `inet` tables (`NFPROTO_INET`).
const INET: u8 = 1;
/// Length of `struct nfgenmsg`.
pub const FIXED: usize = 4;
const NF_ACCEPT: u32 = 1;
/// Batches begin here, so that a query's late answer is never taken for theirs.
const FIRST_SEQUENCE: u32 = 0x5100_0000;

/// `struct nfgenmsg` of the `inet` family.
pub(super) const INET_HEADER: [u8; FIXED] = [INET, 0, 0, 0];

/// A transaction under construction; commit sends it.
#[derive(Debug, Clone)]
pub struct Batch {
    writer: Writer,
    /// What each message does, in words, by sequence number.
    labels: Vec<String>,
    /// Where the last message begins.
    last: usize,
}

impl Default for Batch {
    fn default() -> Self {
        Self::new()
    }
}

impl Batch {
    /// An empty transaction.
    pub fn new() -> Self {
        let mut writer = Writer::new();
        let [high, low] = 10u16.to_be_bytes();
        writer.message(BATCH_BEGIN, REQUEST, FIRST_SEQUENCE, &[0, 0, high, low], |_| {});
        Self {
            writer,
            labels: Vec::new(),
            last: 0,
        }
    }

    /// Whether it would do nothing.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    fn push(&mut self, ty: u16, flags: u16, label: String, body: impl FnOnce(&mut Writer)) {
        self.last = self.writer.as_bytes().len();
        self.labels.push(label);
        let sequence = self.last_sequence();
        self.writer
            .message(ty, REQUEST | flags, sequence, &INET_HEADER, body);
    }

    fn last_sequence(&self) -> u32 {
        FIRST_SEQUENCE + u32::try_from(self.labels.len()).unwrap_or(u32::MAX >> 8)
    }

    /// `add table inet TABLE`.
    pub fn new_table(&mut self, table: &str) {
        self.push(NEWTABLE, CREATE, format!("table {table}"), |w| {
            w.string(1, table);
            w.be32(2, 0);
        });
    }

    /// `delete table inet TABLE`, with all in it.
    pub fn delete_table(&mut self, table: &str) {
        self.push(DELTABLE, 0, format!("deletion of table {table}"), |w| {
            w.string(1, table);
        });
    }

    /// `add chain`: a base chain with policy accept.
    pub fn new_chain(&mut self, table: &str, chain: &Chain) {
        self.push(
            NEWCHAIN,
            CREATE,
            format!("chain {} of table {table}", chain.name),
            |w| {
                w.string(1, table);
                w.string(3, chain.name);
                w.nest(4, |w| {
                    w.be32(1, hook_number(chain.hook));
                    w.be32(2, chain.priority.cast_unsigned());
                });
                w.be32(5, NF_ACCEPT);
                w.string(7, kind_name(chain.kind));
            },
        );
    }

    /// `delete chain`; its rules must be flushed before.
    pub fn delete_chain(&mut self, table: &str, chain: &str) {
        self.push(
            DELCHAIN,
            0,
            format!("deletion of chain {chain} of table {table}"),
            |w| {
                w.string(1, table);
                w.string(3, chain);
            },
        );
    }

    /// `flush table`: the rules of all chains.
    pub fn flush_table(&mut self, table: &str) {
        self.push(DELRULE, 0, format!("flush of table {table}"), |w| {
            w.string(1, table);
        });
    }

    /// `flush chain`.
    pub fn flush_chain(&mut self, table: &str, chain: &str) {
        self.push(
            DELRULE,
            0,
            format!("flush of chain {chain} of table {table}"),
            |w| {
                w.string(1, table);
                w.string(2, chain);
            },
        );
    }

    /// `add rule`, at the end of its chain.
    pub fn new_rule(&mut self, table: &str, chain: &str, rule: &Rule) {
        let expressions = expression::encode(rule);
        self.push(
            NEWRULE,
            CREATE | APPEND,
            format!("rule `{rule}` of chain {chain}"),
            |w| {
                w.string(1, table);
                w.string(2, chain);
                w.nest(4, |w| w.raw(&expressions));
            },
        );
    }

    /// `add set`.
    pub fn new_set(&mut self, table: &str, set: &AddressSet) {
        let id = self.last_sequence();
        self.push(
            NEWSET,
            CREATE,
            format!("set {} of table {table}", set.name),
            |w| {
                w.string(1, table);
                w.string(2, set.name);
                w.be32(3, 0);
                w.be32(4, set_key(set.family).0);
                w.be32(5, set_key(set.family).1);
                w.be32(10, id);
            },
        );
    }

    /// `delete set`; no rule may refer to it.
    pub fn delete_set(&mut self, table: &str, set: &str) {
        self.push(
            DELSET,
            0,
            format!("deletion of set {set} of table {table}"),
            |w| {
                w.string(1, table);
                w.string(2, set);
            },
        );
    }

    /// `add element`; one that is there already is no error.
    pub fn add_elements<'a>(
        &mut self,
        table: &str,
        set: &str,
        addresses: impl IntoIterator<Item = &'a IpAddr>,
    ) {
        self.elements(NEWSETELEM, CREATE, "addition", table, set, addresses);
    }

    /// `delete element`; one that is missing fails the batch with ENOENT.
    pub fn delete_elements<'a>(
        &mut self,
        table: &str,
        set: &str,
        addresses: impl IntoIterator<Item = &'a IpAddr>,
    ) {
        self.elements(DELSETELEM, 0, "deletion", table, set, addresses);
    }

    fn elements<'a>(
        &mut self,
        ty: u16,
        flags: u16,
        verb: &str,
        table: &str,
        set: &str,
        addresses: impl IntoIterator<Item = &'a IpAddr>,
    ) {
        let addresses: Vec<_> = addresses.into_iter().collect();
        // An attribute holds at most 64 KiB; an element needs at most 28 bytes.
        for part in addresses.chunks(1024) {
            self.push(
                ty,
                flags,
                format!("{verb} of {} elements of set {set}", part.len()),
                |w| {
                    w.string(1, table);
                    w.string(2, set);
                    w.nest(3, |w| {
                        for address in part {
                            w.nest(1, |w| {
                                w.nest(1, |w| match address {
                                    IpAddr::V4(v4) => w.attribute(1, &v4.octets()),
                                    IpAddr::V6(v6) => w.attribute(1, &v6.octets()),
                                });
                            });
                        }
                    });
                },
            );
        }
    }

    /// Completes the transaction, for use as often as wanted.
    pub fn finish(self) -> Transaction {
        let last = self.last_sequence();
        let Self {
            mut writer,
            labels,
            last: at,
        } = self;
        writer.message(BATCH_END, REQUEST, last.wrapping_add(1), &[0, 0, 0, 10], |_| {});
        let mut bytes = writer.into_bytes();
        // Flags of the last message: bytes 6 and 7 of its header.
        if let Some(flags) = bytes.get_mut(at + 6..at + 8) {
            let acknowledged = u16::from_ne_bytes([flags[0], flags[1]]) | ACK;
            flags.copy_from_slice(&acknowledged.to_ne_bytes());
        }
        Transaction { bytes, labels, last }
    }

    /// Sends it; all of it takes effect or nothing.
    pub fn commit(self, socket: &NetfilterSocket) -> Result<(), NetlinkError> {
        self.finish().commit(socket)
    }
}

/// A complete transaction.
#[derive(Debug, Clone)]
pub struct Transaction {
    bytes: Vec<u8>,
    labels: Vec<String>,
    last: u32,
}

impl Transaction {
    /// Sends it; all of it takes effect or nothing.
    pub fn commit(&self, socket: &NetfilterSocket) -> Result<(), NetlinkError> {
        if self.labels.is_empty() {
            return Ok(());
        }
        match socket.transact(&self.bytes, self.last)?.into_iter().next() {
            None => Ok(()),
            Some(refusal) => Err(self.explain(refusal)),
        }
    }

    /// Size of the datagram in bytes.
    pub fn size(&self) -> usize {
        self.bytes.len()
    }

    fn explain(&self, refusal: Refusal) -> NetlinkError {
        let index = refusal
            .sequence
            .checked_sub(FIRST_SEQUENCE + 1)
            .map(|index| index as usize);
        let label = index
            .and_then(|index| self.labels.get(index))
            .map_or("the transaction", String::as_str);
        refusal.into_error(label)
    }
}

/// A query of the `inet` family: a dump, or a request for one object, which its message answers.
pub(super) fn query(ty: u16, dump: bool, sequence: u32, body: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let mut writer = Writer::new();
    writer.message(
        ty,
        REQUEST | if dump { DUMP } else { 0 },
        sequence,
        &INET_HEADER,
        body,
    );
    writer.into_bytes()
}

/// Number of a hook for IP families (`linux/netfilter.h`).
pub(super) fn hook_number(hook: Hook) -> u32 {
    match hook {
        Hook::Prerouting => 0,
        Hook::Output => 3,
        Hook::Postrouting => 4,
    }
}

/// Name of a chain type in the kernel.
pub(super) fn kind_name(kind: ChainKind) -> &'static str {
    match kind {
        ChainKind::Filter => "filter",
        ChainKind::Route => "route",
        ChainKind::Nat => "nat",
    }
}

/// Type number (nft's `ipv4_addr`, `ipv6_addr`) and length of a set's key.
pub(super) fn set_key(family: Family) -> (u32, u32) {
    match family {
        Family::V4 => (7, 4),
        Family::V6 => (8, 16),
    }
}

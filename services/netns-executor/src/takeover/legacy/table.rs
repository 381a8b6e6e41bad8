//! A legacy table as bytes: entries one after the other, chains by position, jumps by offset. Pure.
//!
//! A base chain runs from its hook's entry to its underflow, the policy. Another chain begins with an entry whose
//! target is `ERROR` and carries its name, and ends with a `RETURN`. The table ends with one more `ERROR`.

use super::super::{Scope, is_istio_chain};

/// How a family lays out an entry (`struct ipt_entry`, `struct ip6t_entry`).
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) name: &'static str,
    /// Level of the socket options.
    pub(super) level: libc::c_int,
    /// Offset of `target_offset`; `next_offset` follows it.
    offsets: usize,
    /// Size of an entry without matches and target.
    entry: usize,
}

pub(super) const IPV4: Layout = Layout {
    name: "ip",
    level: libc::SOL_IP,
    offsets: 88,
    entry: 112,
};
pub(super) const IPV6: Layout = Layout {
    name: "ip6",
    level: libc::SOL_IPV6,
    offsets: 140,
    entry: 168,
};

/// Size of `struct xt_entry_match` and `struct xt_entry_target`: size, name, revision.
const EXTENSION: usize = 32;

/// `struct ipt_getinfo` without the name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Info {
    pub(super) valid_hooks: u32,
    pub(super) hook_entry: [u32; 5],
    pub(super) underflow: [u32; 5],
    pub(super) entries: u32,
    pub(super) size: u32,
}

#[derive(Debug)]
struct Entry {
    offset: u32,
    bytes: Vec<u8>,
    /// Where the target begins.
    target: usize,
    /// Where the matches begin.
    matches: usize,
}

/// A table that was read.
#[derive(Debug)]
pub(super) struct Table {
    info: Info,
    entries: Vec<Entry>,
}

/// What replaces a table.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Replacement {
    pub(super) info: Info,
    pub(super) bytes: Vec<u8>,
    /// Which entries of the old table it consists of.
    pub(super) kept: Vec<usize>,
}

impl Entry {
    fn target_name(&self) -> &[u8] {
        extension_name(&self.bytes, self.target)
    }

    /// The chain that begins here.
    fn chain_name(&self) -> Option<&str> {
        let named = self.bytes.get(self.target + EXTENSION..)?;
        (self.target_name() == b"ERROR").then(|| std::str::from_utf8(until_nul(named)).ok())?
    }

    /// Where a standard target leads, if to another entry.
    fn jump(&self) -> Option<u32> {
        let verdict = u32_at(&self.bytes, self.target + EXTENSION)?.cast_signed();
        self.target_name()
            .is_empty()
            .then(|| u32::try_from(verdict).ok())?
    }

    fn matches_with(&self, name: &[u8]) -> bool {
        let mut at = self.matches;
        while at < self.target {
            if extension_name(&self.bytes, at) == name {
                return true;
            }
            match u16_at(&self.bytes, at) {
                Some(size) if usize::from(size) >= EXTENSION => at += usize::from(size),
                _ => return false,
            }
        }
        false
    }

    /// A rule of Istio's host chain: source nat of what an ipset holds.
    fn is_probe_rule(&self) -> bool {
        self.target_name() == b"SNAT" && self.matches_with(b"set")
    }
}

/// A chain other than a base chain: its name, and the positions of its entries, head and final RETURN included.
struct Chain<'a> {
    name: &'a str,
    range: std::ops::Range<usize>,
}

impl Table {
    /// Reads a table's bytes; the error says what makes no sense.
    pub(super) fn decode(layout: &Layout, info: &Info, bytes: &[u8]) -> Result<Self, &'static str> {
        let mut entries = Vec::new();
        let mut at = 0;
        while at < bytes.len() {
            let offset = |index: usize| u16_at(bytes, at + layout.offsets + 2 * index).map(usize::from);
            let (target, next) = offset(0).zip(offset(1)).ok_or("cut entry")?;
            let entry = bytes.get(at..at + next).ok_or("entry beyond the end")?;
            if target < layout.entry || target + EXTENSION > next {
                return Err("target outside of its entry");
            }
            entries.push(Entry {
                offset: u32::try_from(at).map_err(|_| "too large")?,
                bytes: entry.to_vec(),
                target,
                matches: layout.entry,
            });
            at += next;
        }
        if entries.len() != info.entries as usize {
            return Err("another number of entries than announced");
        }
        Ok(Self { info: *info, entries })
    }

    /// Number of entries.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether a chain of Istio's is there.
    pub(super) fn has_istio_chain(&self, scope: Scope) -> bool {
        self.chains().any(|chain| is_istio_chain(chain.name, scope))
    }

    fn chains(&self) -> impl Iterator<Item = Chain<'_>> {
        let heads = |(index, entry): (usize, &'_ Entry)| entry.chain_name().is_some().then_some(index);
        let heads: Vec<_> = self.entries.iter().enumerate().filter_map(heads).collect();
        let mut pairs = Vec::new();
        for pair in heads.windows(2) {
            // The last head is the table's end and begins no chain.
            if let Some(name) = self.entries[pair[0]].chain_name() {
                pairs.push(Chain {
                    name,
                    range: pair[0]..pair[1],
                });
            }
        }
        pairs.into_iter()
    }

    /// Positions of rules in Istio's chains that are not Istio's. In a pod its chains are its own by their name.
    fn foreign(&self, chain: &Chain<'_>, scope: Scope) -> usize {
        let rules = chain.range.start + 1..chain.range.end.saturating_sub(1);
        match scope {
            Scope::Pod => 0,
            Scope::Host => self.entries[rules]
                .iter()
                .filter(|rule| !rule.is_probe_rule())
                .count(),
        }
    }

    /// What is Istio's, and what of others is in its chains; one line each.
    pub(super) fn istio_and_foreign(&self, scope: Scope) -> (Vec<String>, Vec<String>) {
        let (mut istio, mut foreign) = (Vec::new(), Vec::new());
        for chain in self.chains().filter(|chain| is_istio_chain(chain.name, scope)) {
            match self.foreign(&chain, scope) {
                0 => istio.push(format!("chain {}", chain.name)),
                count => {
                    foreign.push(format!("{count} rules in chain {}", chain.name));
                    let own = chain.range.len().saturating_sub(2 + count);
                    if own > 0 {
                        istio.push(format!("{own} rules in chain {}", chain.name));
                    }
                }
            }
        }
        (istio, foreign)
    }

    /// The table without Istio's rules; none if there are no such rules.
    pub(super) fn without_istio(&self, scope: Scope) -> Option<Replacement> {
        let mut keep = vec![true; self.entries.len()];
        for chain in self.chains().filter(|chain| is_istio_chain(chain.name, scope)) {
            if self.foreign(&chain, scope) > 0 {
                for index in chain.range {
                    keep[index] = !self.entries[index].is_probe_rule();
                }
                continue;
            }
            // The chain as a whole, and every jump to its first rule.
            let first = self.entries.get(chain.range.start + 1).map(|entry| entry.offset);
            keep[chain.range].fill(false);
            for (keep, entry) in keep.iter_mut().zip(&self.entries) {
                *keep &= !(entry.jump().is_some() && entry.jump() == first);
            }
        }
        keep.contains(&false).then(|| self.only(&keep))
    }

    /// Only the entries to be kept, with all offsets adjusted.
    fn only(&self, keep: &[bool]) -> Replacement {
        let mut moved = Vec::with_capacity(self.entries.len());
        let mut size = 0;
        for (keep, entry) in keep.iter().zip(&self.entries) {
            // What led to an entry that goes leads to the next one that stays: in a chain there always is one.
            moved.push((entry.offset, size));
            if *keep {
                size += u32::try_from(entry.bytes.len()).unwrap_or(0);
            }
        }
        let new_offset = |old: u32| {
            moved
                .iter()
                .find(|(offset, _)| *offset == old)
                .map_or(old, |(_, new)| *new)
        };
        let kept: Vec<_> = (0..self.entries.len()).filter(|index| keep[*index]).collect();
        let mut bytes = Vec::with_capacity(size as usize);
        for entry in kept.iter().map(|index| &self.entries[*index]) {
            let start = bytes.len();
            bytes.extend_from_slice(&entry.bytes);
            if let Some(target) = entry.jump() {
                let at = start + entry.target + EXTENSION;
                bytes[at..at + 4].copy_from_slice(&new_offset(target).to_ne_bytes());
            }
        }
        let mut info = self.info;
        for hook in (0..5).filter(|hook| self.info.valid_hooks & (1 << hook) != 0) {
            info.hook_entry[hook] = new_offset(info.hook_entry[hook]);
            info.underflow[hook] = new_offset(info.underflow[hook]);
        }
        info.entries = u32::try_from(kept.len()).unwrap_or(0);
        info.size = size;
        Replacement { info, bytes, kept }
    }
}

fn extension_name(bytes: &[u8], at: usize) -> &[u8] {
    bytes.get(at + 2..at + 31).map(until_nul).unwrap_or_default()
}

fn until_nul(bytes: &[u8]) -> &[u8] {
    bytes.split(|byte| *byte == 0).next().unwrap_or_default()
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// A host-order 32-bit integer at an offset.
pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..600),
            target in 100_u16..180,
            next in 140_u16..300,
            entries in 0_u32..5,
        ) {
            for at in [IPV4.offsets, IPV6.offsets] {
                if bytes.len() > at + 4 {
                    bytes[at..at + 2].copy_from_slice(&target.to_ne_bytes());
                    bytes[at + 2..at + 4].copy_from_slice(&next.to_ne_bytes());
                }
            }
            let info = Info { valid_hooks: 31, hook_entry: [0; 5], underflow: [0; 5], entries, size: 600 };
            for layout in [&IPV4, &IPV6] {
                if let Ok(table) = Table::decode(layout, &info, &bytes) {
                    for scope in [Scope::Pod, Scope::Host] {
                        let _ = table.istio_and_foreign(scope);
                        let _ = table.without_istio(scope);
                    }
                }
            }
        }
    }
}

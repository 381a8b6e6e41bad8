//! Socket options of the legacy tables (`linux/netfilter_ipv4/ip_tables.h`, `linux/netfilter/x_tables.h`), as a
//! 64-bit kernel lays them out; IPv6 has the same numbers and headers.
#![expect(
    unsafe_code,
    reason = "one of the options makes the kernel write where its value points to"
)]

use std::io;
use std::os::fd::BorrowedFd;

use super::table::Info;
use crate::sys::{read_option, write_option, write_option_with_pointers};

const GET_INFO: libc::c_int = 64;
const GET_ENTRIES: libc::c_int = 65;
const SET_REPLACE: libc::c_int = 64;
const SET_ADD_COUNTERS: libc::c_int = 65;
/// `XT_TABLE_MAXNAMELEN`.
const NAME: usize = 32;
/// `sizeof(struct ipt_getinfo)`.
const INFO: usize = 84;
/// `sizeof(struct ipt_get_entries)` and of `struct xt_counters_info`, without what follows.
const SHORT_HEADER: usize = 40;
/// Offset of the pointer in `struct ipt_replace`.
const COUNTERS_POINTER: usize = 88;

/// `struct xt_counters`: packets and bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counters {
    pub(super) packets: u64,
    pub(super) bytes: u64,
}

/// Size and hooks of a table.
pub(super) fn info(fd: BorrowedFd<'_>, level: libc::c_int, table: &str) -> io::Result<Info> {
    let mut bytes = [0; INFO];
    bytes[..NAME].copy_from_slice(&name(table));
    read_option(fd, level, GET_INFO, &mut bytes)?;
    let word = |index: usize| super::table::u32_at(&bytes, NAME + 4 * index).unwrap_or(0);
    Ok(Info {
        valid_hooks: word(0),
        hook_entry: [1, 2, 3, 4, 5].map(word),
        underflow: [6, 7, 8, 9, 10].map(word),
        entries: word(11),
        size: word(12),
    })
}

/// The entries of a table.
pub(super) fn entries(fd: BorrowedFd<'_>, level: libc::c_int, table: &str, size: u32) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; SHORT_HEADER + size as usize];
    bytes[..NAME].copy_from_slice(&name(table));
    bytes[NAME..NAME + 4].copy_from_slice(&size.to_ne_bytes());
    read_option(fd, level, GET_ENTRIES, &mut bytes)?;
    Ok(bytes.split_off(SHORT_HEADER))
}

/// Replaces a table that has `old_entries` entries; returns what they had counted in the end.
pub(super) fn replace(
    fd: BorrowedFd<'_>,
    level: libc::c_int,
    table: &str,
    info: &Info,
    entries: &[u8],
    old_entries: usize,
) -> io::Result<Vec<Counters>> {
    let mut counters = vec![Counters::default(); old_entries];
    let mut bytes = Vec::with_capacity(COUNTERS_POINTER + 8 + entries.len());
    bytes.extend(name(table));
    let words = [info.valid_hooks, info.entries, info.size]
        .into_iter()
        .chain(info.hook_entry)
        .chain(info.underflow);
    for word in words.chain([u32::try_from(old_entries).unwrap_or(u32::MAX)]) {
        bytes.extend(word.to_ne_bytes());
    }
    debug_assert_eq!(bytes.len(), COUNTERS_POINTER);
    bytes.extend((counters.as_mut_ptr().expose_provenance() as u64).to_ne_bytes());
    bytes.extend(entries);
    // SAFETY: the one address is that of `counters`, to which the kernel writes `old_entries` elements of struct
    // xt_counters; it is that long and lives on.
    unsafe { write_option_with_pointers(fd, level, SET_REPLACE, &bytes) }?;
    Ok(counters)
}

/// Adds to the counters of a table, entry by entry.
pub(super) fn add_counters(
    fd: BorrowedFd<'_>,
    level: libc::c_int,
    table: &str,
    counters: &[Counters],
) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(SHORT_HEADER + 16 * counters.len());
    bytes.extend(name(table));
    bytes.extend(u32::try_from(counters.len()).unwrap_or(u32::MAX).to_ne_bytes());
    bytes.resize(SHORT_HEADER, 0);
    for counter in counters {
        bytes.extend(counter.packets.to_ne_bytes());
        bytes.extend(counter.bytes.to_ne_bytes());
    }
    Ok(write_option(fd, level, SET_ADD_COUNTERS, &bytes)?)
}

fn name(table: &str) -> [u8; NAME] {
    let mut name = [0; NAME];
    let length = table.len().min(NAME - 1);
    name[..length].copy_from_slice(&table.as_bytes()[..length]);
    name
}

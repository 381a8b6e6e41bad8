//! Interfaces and their addresses, through a route socket (`linux/rtnetlink.h`, `linux/if_link.h`, `linux/if_addr.h`).

use std::collections::BTreeMap;
use std::net::IpAddr;

use sluice_proto::id::InterfaceName;

use crate::netlink::bytes::{Message, Writer, u32_ne};
use crate::netlink::socket::{ACK, DUMP, REQUEST};
use crate::netlink::{NetlinkError, RouteSocket};

const NEWLINK: u16 = 16;
const GETLINK: u16 = 18;
const SETLINK: u16 = 19;
const NEWADDR: u16 = 20;
const GETADDR: u16 = 22;
/// Length of `struct ifinfomsg`: family, type, index, flags, change mask.
const LINK_FIXED: usize = 16;
/// Length of `struct ifaddrmsg`: family, prefix length, flags, scope, index.
const ADDRESS_FIXED: usize = 8;
const IFLA_IFNAME: u16 = 3;
const IFLA_EXT_MASK: u16 = 29;
/// `RTEXT_FILTER_SKIP_STATS`: counters are not needed and cost most of the answer.
const SKIP_STATS: u32 = 1 << 3;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
/// `lo` is the first interface of every namespace (`LOOPBACK_IFINDEX`).
const LOOPBACK: u32 = 1;
const IFF_UP: u32 = 1;

/// Whether an interface of this name exists.
pub(super) fn has_interface(socket: &RouteSocket, name: &InterfaceName) -> Result<bool, NetlinkError> {
    let build = |sequence| {
        let mut writer = Writer::new();
        writer.message(GETLINK, REQUEST | ACK, sequence, &[0; LINK_FIXED], |body| {
            body.string(IFLA_IFNAME, name.as_str());
            body.ne32(IFLA_EXT_MASK, SKIP_STATS);
        });
        writer.into_bytes()
    };
    let found = socket.query("interface", build, || false, |found, message| *found |= message.ty == NEWLINK);
    match found {
        Err(error) if error.errno() == Some(libc::ENODEV) => Ok(false),
        found => found,
    }
}

/// Every address with its interface's name, loopback left out.
pub(super) fn addresses(socket: &RouteSocket) -> Result<Vec<(String, IpAddr)>, NetlinkError> {
    let names = socket.query(
        "interfaces",
        |sequence| {
            let mut writer = Writer::new();
            writer.message(GETLINK, REQUEST | DUMP, sequence, &[0; LINK_FIXED], |body| {
                body.ne32(IFLA_EXT_MASK, SKIP_STATS);
            });
            writer.into_bytes()
        },
        BTreeMap::new,
        |names, message| {
            if let Some((index, name)) = link(message) {
                names.insert(index, name);
            }
        },
    )?;
    let found = socket.query(
        "addresses",
        |sequence| {
            let mut writer = Writer::new();
            writer.message(GETADDR, REQUEST | DUMP, sequence, &[0; ADDRESS_FIXED], |_| {});
            writer.into_bytes()
        },
        Vec::new,
        |found, message| found.extend(address(message)),
    )?;
    let named = |(index, address): (u32, IpAddr)| Some((names.get(&index)?.clone(), address));
    Ok(found.into_iter().filter(|(index, _)| *index != LOOPBACK).filter_map(named).collect())
}

/// Sets `lo` up; a scratch namespace has it down.
pub(super) fn raise_loopback(socket: &RouteSocket) -> Result<(), NetlinkError> {
    let mut fixed = [0; LINK_FIXED];
    fixed[4..8].copy_from_slice(&LOOPBACK.to_ne_bytes());
    fixed[8..12].copy_from_slice(&IFF_UP.to_ne_bytes());
    fixed[12..16].copy_from_slice(&IFF_UP.to_ne_bytes());
    let mut writer = Writer::new();
    writer.message(SETLINK, REQUEST | ACK, 1, &fixed, |_| {});
    match socket.transact(writer.as_bytes(), 1)?.pop() {
        Some(refusal) => Err(refusal.into_error("lo up")),
        None => Ok(()),
    }
}

fn link(message: &Message<'_>) -> Option<(u32, String)> {
    if message.ty != NEWLINK {
        return None;
    }
    let name = message.attributes(LINK_FIXED).string(IFLA_IFNAME)?;
    Some((u32_ne(message.payload, 4)?, name.to_owned()))
}

fn address(message: &Message<'_>) -> Option<(u32, IpAddr)> {
    if message.ty != NEWADDR {
        return None;
    }
    let attributes = || message.attributes(ADDRESS_FIXED);
    // On a point-to-point link IFA_ADDRESS is the other end.
    let bytes = attributes().find(IFA_LOCAL).or_else(|| attributes().find(IFA_ADDRESS))?;
    let address = match *message.payload.first()? {
        2 => IpAddr::from(<[u8; 4]>::try_from(bytes).ok()?),
        10 => IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?),
        _ => return None,
    };
    Some((u32_ne(message.payload, 4)?, address))
}

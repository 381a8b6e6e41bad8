//! Interfaces and addresses of a namespace (`linux/rtnetlink.h`, `linux/if_link.h`, `linux/if_addr.h`).

use std::net::IpAddr;

use super::bytes::{Message, Writer, u32_ne};
use super::error::NetlinkError;
use super::socket::{ACK, DUMP, REQUEST, RouteSocket};

const NEWLINK: u16 = 16;
const DELLINK: u16 = 17;
const GETLINK: u16 = 18;
const NEWADDR: u16 = 20;
const GETADDR: u16 = 22;
/// Length of `struct ifinfomsg`.
const LINK_FIXED: usize = 16;
/// Length of `struct ifaddrmsg`.
const ADDRESS_FIXED: usize = 8;
const IFLA_IFNAME: u16 = 3;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFF_UP: u32 = 1;
const IFF_LOOPBACK: u32 = 8;
const LOOPBACK_INDEX: u32 = 1;

/// An interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Index.
    pub index: u32,
    /// Name.
    pub name: String,
    /// Whether it is a loopback interface.
    pub is_loopback: bool,
}

/// All interfaces.
pub fn links(socket: &RouteSocket) -> Result<Vec<Link>, NetlinkError> {
    socket.query(
        "the interfaces",
        |sequence| dump(GETLINK, sequence, &[0; LINK_FIXED]),
        Vec::new,
        |links, message| {
            let header = |at| u32_ne(message.payload, at).unwrap_or(0);
            if message.ty == NEWLINK {
                links.push(Link {
                    index: header(4),
                    name: message
                        .attributes(LINK_FIXED)
                        .string(IFLA_IFNAME)
                        .unwrap_or_default()
                        .to_owned(),
                    is_loopback: header(8) & IFF_LOOPBACK != 0,
                });
            }
        },
    )
}

/// Whether an interface of this name exists.
pub fn link_exists(socket: &RouteSocket, name: &str) -> Result<bool, NetlinkError> {
    let found = socket.ask(
        "the interface",
        |sequence| {
            let mut writer = Writer::new();
            writer.message(GETLINK, REQUEST, sequence, &[0; LINK_FIXED], |w| {
                w.string(IFLA_IFNAME, name);
            });
            writer.into_bytes()
        },
        |message| {
            message
                .attributes(LINK_FIXED)
                .string(IFLA_IFNAME)
                .map(|found| found == name)
        },
    );
    match found {
        Err(error) if error.errno() == Some(libc::ENODEV) => Ok(false),
        found => found,
    }
}

/// The name of the interface whose deletion a message tells.
pub fn deleted<'a>(message: &Message<'a>) -> Option<&'a str> {
    (message.ty == DELLINK)
        .then(|| message.attributes(LINK_FIXED).string(IFLA_IFNAME))
        .flatten()
}

/// Every address with its interface's name, loopback interfaces left out.
pub fn addresses(socket: &RouteSocket) -> Result<Vec<(String, IpAddr)>, NetlinkError> {
    let links = links(socket)?;
    let found = socket.query(
        "the addresses",
        |sequence| dump(GETADDR, sequence, &[0; ADDRESS_FIXED]),
        Vec::new,
        |found, message| {
            if message.ty == NEWADDR {
                found.extend(u32_ne(message.payload, 4).zip(address(message)));
            }
        },
    )?;
    let named = |(index, address)| {
        let link = links
            .iter()
            .find(|link| link.index == index && !link.is_loopback)?;
        Some((link.name.clone(), address))
    };
    Ok(found.into_iter().filter_map(named).collect())
}

/// Sets `lo` up.
pub fn set_loopback_up(socket: &RouteSocket) -> Result<(), NetlinkError> {
    let mut header = [0; LINK_FIXED];
    header[4..8].copy_from_slice(&LOOPBACK_INDEX.to_ne_bytes());
    header[8..12].copy_from_slice(&IFF_UP.to_ne_bytes());
    header[12..16].copy_from_slice(&IFF_UP.to_ne_bytes());
    let mut writer = Writer::new();
    writer.message(NEWLINK, REQUEST | ACK, 1, &header, |_| {});
    match socket.transact(&writer.into_bytes(), 1)?.into_iter().next() {
        None => Ok(()),
        Some(refusal) => Err(refusal.into_error("lo up")),
    }
}

/// On a point-to-point interface IFA_ADDRESS is the peer's address and IFA_LOCAL ours.
fn address(message: &Message<'_>) -> Option<IpAddr> {
    let attributes = message.attributes(ADDRESS_FIXED);
    let bytes = attributes
        .find(IFA_LOCAL)
        .or_else(|| attributes.find(IFA_ADDRESS))?;
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

fn dump(ty: u16, sequence: u32, header: &[u8]) -> Vec<u8> {
    let mut writer = Writer::new();
    writer.message(ty, REQUEST | DUMP, sequence, header, |_| {});
    writer.into_bytes()
}

//! The kernel's own account of a netns, read over netlink by code that shares nothing with the product; and damage
//! done the same way. The demo must not need `nft` or `ip`.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket};
use sluice_testkit::netns::Netns;

// include/uapi/linux/netlink.h
const REQUEST: u16 = 0x01;
const ACK: u16 = 0x04;
const DUMP: u16 = 0x300;
const ERROR: u16 = 2;
const DONE: u16 = 3;
const HEADER: usize = 16;
// include/uapi/linux/netfilter/nfnetlink.h, nf_tables.h
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
const NFTABLES: u16 = 0x0a00;
const GETTABLE: u16 = NFTABLES | 0x01;
const DELTABLE: u16 = NFTABLES | 0x02;
const GETCHAIN: u16 = NFTABLES | 0x04;
const GETRULE: u16 = NFTABLES | 0x07;
const DELRULE: u16 = NFTABLES | 0x08;
const GETSET: u16 = NFTABLES | 0x0a;
const GETSETELEM: u16 = NFTABLES | 0x0d;
const GETGEN: u16 = NFTABLES | 0x10;
const NFPROTO_INET: u8 = 1;
// include/uapi/linux/rtnetlink.h
const RTM_GETROUTE: u16 = 26;
const RTM_GETRULE: u16 = 34;
const RT_TABLE_MAIN: u8 = 254;
const RT_TABLE_LOCAL: u8 = 255;

/// Sockets inside a netns. They keep it alive until dropped.
#[derive(Debug)]
pub struct View {
    netfilter: OwnedFd,
    route: OwnedFd,
}

/// Everything that a redirection consists of, as the kernel dumps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Tables, chains, rules and sets of nftables, without the generation in their headers.
    pub nftables: [Vec<Vec<u8>>; 4],
    /// Policy routing rules.
    pub policy: Vec<Vec<u8>>,
    /// Routes in other tables than `main` and `local`, which the kernel fills itself.
    pub routes: Vec<Vec<u8>>,
}

impl Snapshot {
    /// Number of nftables rules.
    pub fn rules(&self) -> usize {
        self.nftables[2].len()
    }
}

impl View {
    /// Opens the sockets inside `netns`.
    pub fn of(netns: &Netns) -> io::Result<Self> {
        let open = |protocol| {
            socket(
                AddressFamily::Netlink,
                SockType::Raw,
                SockFlag::SOCK_CLOEXEC,
                protocol,
            )
        };
        netns.run(|| {
            Ok(Self {
                netfilter: open(SockProtocol::NetlinkNetFilter)?,
                route: open(SockProtocol::NetlinkRoute)?,
            })
        })
    }

    /// The rule set's generation: moves with every change of nftables rules by anyone.
    pub fn generation(&self) -> io::Result<u32> {
        send(
            self.netfilter.as_raw_fd(),
            &message(GETGEN, REQUEST, &[0; 4]),
            MsgFlags::empty(),
        )?;
        let answer = receive(&self.netfilter)?;
        // Header, nfgenmsg, then NFTA_GEN_ID as the first attribute, in network order.
        answer
            .first()
            .and_then(|(_, payload)| payload.get(8..12)?.try_into().ok())
            .map(u32::from_be_bytes)
            .ok_or_else(|| io::Error::other("no generation in the answer"))
    }

    /// Number of nftables rules of all tables.
    pub fn rules(&self) -> io::Result<usize> {
        Ok(dump(&self.netfilter, GETRULE, &[0; 4])?.len())
    }

    /// Everything that a redirection consists of.
    pub fn snapshot(&self) -> io::Result<Snapshot> {
        let nftables = |kind| -> io::Result<Vec<Vec<u8>>> {
            let found = dump(&self.netfilter, kind, &[0; 4])?;
            Ok(found
                .into_iter()
                .map(|payload| payload.get(4..).unwrap_or_default().to_vec())
                .collect())
        };
        let mut routes = dump(&self.route, RTM_GETROUTE, &[0; 12])?;
        routes.retain(|route| !matches!(route.get(4), Some(&(RT_TABLE_MAIN | RT_TABLE_LOCAL)) | None));
        Ok(Snapshot {
            nftables: [
                nftables(GETTABLE)?,
                nftables(GETCHAIN)?,
                nftables(GETRULE)?,
                nftables(GETSET)?,
            ],
            policy: dump(&self.route, RTM_GETRULE, &[0; 12])?,
            routes,
        })
    }

    /// How many of these addresses are elements of the host's probe sets.
    pub fn probed(&self, addresses: &[IpAddr]) -> io::Result<usize> {
        let mut elements = Vec::new();
        for set in ["probes-v4", "probes-v6"] {
            let mut header = vec![NFPROTO_INET, 0, 0, 0];
            // NFTA_SET_ELEM_LIST_TABLE, NFTA_SET_ELEM_LIST_SET
            name(&mut header, 1, "sluice-host")?;
            name(&mut header, 2, set)?;
            elements.extend(dump(&self.netfilter, GETSETELEM, &header)?);
        }
        let is_element = |address: &&IpAddr| {
            let octets = match address {
                IpAddr::V4(address) => address.octets().to_vec(),
                IpAddr::V6(address) => address.octets().to_vec(),
            };
            elements
                .iter()
                .any(|element| element.windows(octets.len()).any(|bytes| bytes == octets))
        };
        Ok(addresses.iter().filter(is_element).count())
    }

    /// Removes all rules of an `inet` table, as `nft flush table` does.
    pub fn flush_table(&self, table: &str) -> io::Result<()> {
        self.change(DELRULE, table)
    }

    /// Removes an `inet` table, as `nft delete table` does.
    pub fn delete_table(&self, table: &str) -> io::Result<()> {
        self.change(DELTABLE, table)
    }

    fn change(&self, kind: u16, table: &str) -> io::Result<()> {
        // struct nfgenmsg: family, version, and for a batch the subsystem as res_id in network order.
        let batch = [0, 0, 0, 10];
        let mut body = vec![NFPROTO_INET, 0, 0, 0];
        name(&mut body, 1, table)?;
        let mut bytes = message(BATCH_BEGIN, REQUEST, &batch);
        bytes.extend(message(kind, REQUEST | ACK, &body));
        bytes.extend(message(BATCH_END, REQUEST, &batch));
        send(self.netfilter.as_raw_fd(), &bytes, MsgFlags::empty())?;
        receive(&self.netfilter).map(drop)
    }
}

/// Adds a string attribute.
fn name(body: &mut Vec<u8>, attribute: u16, text: &str) -> io::Result<()> {
    let length = u16::try_from(text.len() + 1).map_err(io::Error::other)?;
    body.extend((4 + length).to_ne_bytes());
    body.extend(attribute.to_ne_bytes());
    body.extend(text.bytes());
    body.push(0);
    body.resize(body.len().next_multiple_of(4), 0);
    Ok(())
}

fn message(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(HEADER + body.len()).unwrap_or(u32::MAX);
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend([0; 8]);
    bytes.extend(body);
    bytes
}

/// Type and payload of each message of one datagram; an error message becomes an error.
fn receive(socket: &OwnedFd) -> io::Result<Vec<(u16, Vec<u8>)>> {
    let mut buffer = vec![0; 64 * 1024];
    let length = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
    let mut left = &buffer[..length];
    let mut messages = Vec::new();
    while let (Some(length), Some(kind)) = (word(left, 0), left.get(4..6)) {
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let Some(payload) = left.get(HEADER..length) else {
            break;
        };
        let kind = u16::from_ne_bytes([kind[0], kind[1]]);
        match (kind, word(payload, 0)) {
            (ERROR, Some(code)) if code != 0 => {
                return Err(io::Error::from_raw_os_error(code.cast_signed().saturating_neg()));
            }
            _ => messages.push((kind, payload.to_vec())),
        }
        left = left.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(messages)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn dump(socket: &OwnedFd, kind: u16, header: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    send(
        socket.as_raw_fd(),
        &message(kind, REQUEST | DUMP, header),
        MsgFlags::empty(),
    )?;
    let mut found = Vec::new();
    loop {
        for (kind, payload) in receive(socket)? {
            if kind == DONE {
                return Ok(found);
            }
            found.push(payload);
        }
    }
}

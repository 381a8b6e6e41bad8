//! The address sets of Istio's host rules (`linux/netfilter/ipset/ip_set.h`).

use crate::netlink::NetfilterSocket;
use crate::netlink::bytes::Writer;
use crate::netlink::error::NetlinkError;
use crate::netlink::socket::{ACK, REQUEST};

const SETS: [&str; 2] = ["istio-inpod-probes-v4", "istio-inpod-probes-v6"];
const DESTROY: u16 = 6 << 8 | 0x3;
const HEADER: u16 = 6 << 8 | 0xc;
/// Oldest protocol that every supported kernel speaks (`IPSET_PROTOCOL_MIN`).
const PROTOCOL: u8 = 6;
const ATTRIBUTE_PROTOCOL: u16 = 1;
const ATTRIBUTE_NAME: u16 = 2;

/// Which of the sets are there. A kernel without ipset has none.
pub(super) fn present(socket: &NetfilterSocket) -> Vec<String> {
    let exists = |name: &&&str| {
        let build = |sequence| request(HEADER, sequence, name);
        socket.query("an ipset", build, || (), |(), _| {}).is_ok()
    };
    SETS.iter().filter(exists).map(|name| describe(name)).collect()
}

/// Destroys them; one that is still in use by a rule stays and is logged.
pub(super) fn destroy(socket: &NetfilterSocket) -> Result<Vec<String>, NetlinkError> {
    let mut destroyed = Vec::new();
    for name in SETS {
        match socket.transact(&request(DESTROY, 1, name), 1)?.into_iter().next() {
            None => destroyed.push(describe(name)),
            Some(refusal) if matches!(refusal.errno, libc::ENOENT | libc::EINVAL | libc::EOPNOTSUPP) => {}
            Some(refusal) => tracing::warn!(set = name, errno = refusal.errno, "ipset of Istio's agent stays"),
        }
    }
    Ok(destroyed)
}

fn describe(name: &str) -> String {
    format!("ipset {name}")
}

fn request(ty: u16, sequence: u32, name: &str) -> Vec<u8> {
    let mut writer = Writer::new();
    writer.message(ty, REQUEST | ACK, sequence, &[0; 4], |w| {
        w.attribute(ATTRIBUTE_PROTOCOL, &[PROTOCOL]);
        w.string(ATTRIBUTE_NAME, name);
    });
    writer.into_bytes()
}

//! The address sets of Istio's host rules (`linux/netfilter/ipset/ip_set.h`).

use std::time::Duration;

use crate::netlink::NetfilterSocket;
use crate::netlink::bytes::Writer;
use crate::netlink::error::NetlinkError;
use crate::netlink::socket::{ACK, EXCLUSIVE, REQUEST};
use crate::netlink::verdict::Refusal;

const SETS: [&str; 2] = ["istio-inpod-probes-v4", "istio-inpod-probes-v6"];
const DESTROY: u16 = 6 << 8 | 0x3;
const HEADER: u16 = 6 << 8 | 0xc;
/// Oldest protocol that every supported kernel speaks (`IPSET_PROTOCOL_MIN`).
const PROTOCOL: u8 = 6;
/// `IPSET_ERR_BUSY`.
const IN_USE: i32 = 4100;
const ATTEMPTS: u32 = 50;
const PAUSE: Duration = Duration::from_millis(10);
const ATTRIBUTE_PROTOCOL: u16 = 1;
const ATTRIBUTE_NAME: u16 = 2;

/// Which of the sets are there. A kernel without ipset has none.
pub(super) fn present(socket: &NetfilterSocket) -> Vec<String> {
    let exists = |name: &&&str| {
        let build = |sequence| request(HEADER, 0, sequence, name);
        socket.query("an ipset", build, || (), |(), _| {}).is_ok()
    };
    SETS.iter().filter(exists).map(|name| describe(name)).collect()
}

/// Destroys them; one that is still in use by a rule stays and is logged.
pub(super) fn destroy(socket: &NetfilterSocket) -> Result<Vec<String>, NetlinkError> {
    let mut destroyed = Vec::new();
    for name in SETS {
        match destroy_one(socket, name)? {
            None => destroyed.push(describe(name)),
            Some(refusal) if matches!(refusal.errno, libc::ENOENT | libc::EINVAL | libc::EOPNOTSUPP) => {}
            Some(refusal) => {
                tracing::warn!(set = name, errno = refusal.errno, "ipset of Istio's agent stays");
            }
        }
    }
    Ok(destroyed)
}

/// The kernel lets go of a deleted rule's set a little later than of the rule.
fn destroy_one(socket: &NetfilterSocket, name: &str) -> Result<Option<Refusal>, NetlinkError> {
    let mut attempt = 0;
    loop {
        let refusal = socket
            .transact(&request(DESTROY, EXCLUSIVE, 1, name), 1)?
            .into_iter()
            .next();
        if attempt == ATTEMPTS || refusal.as_ref().is_none_or(|refusal| refusal.errno != IN_USE) {
            return Ok(refusal);
        }
        attempt += 1;
        std::thread::sleep(PAUSE);
    }
}

fn describe(name: &str) -> String {
    format!("ipset {name}")
}

fn request(ty: u16, flags: u16, sequence: u32, name: &str) -> Vec<u8> {
    let mut writer = Writer::new();
    writer.message(ty, REQUEST | ACK | flags, sequence, &[0; 4], |w| {
        w.attribute(ATTRIBUTE_PROTOCOL, &[PROTOCOL]);
        w.string(ATTRIBUTE_NAME, name);
    });
    writer.into_bytes()
}

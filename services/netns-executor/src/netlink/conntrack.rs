//! Connections that conntrack redirects to the proxy (`linux/netfilter/nfnetlink_conntrack.h`).

use std::net::IpAddr;

use super::bytes::{Attributes, Message, Writer};
use super::error::NetlinkError;
use super::nft::FIXED;
use super::socket::{DUMP, NetfilterSocket, REQUEST};
use crate::rules::{PORT_HBONE, PORT_INBOUND, PORT_OUTBOUND, Protocol};

/// Subsystem `NFNL_SUBSYS_CTNETLINK`, message `IPCTNL_MSG_CT_GET`.
const GET: u16 = 1 << 8 | 1;
pub(super) const NEW: u16 = 1 << 8;
pub(super) const TUPLE_ORIGINAL: u16 = 1;
pub(super) const TUPLE_REPLY: u16 = 2;
pub(super) const PROTOCOL_INFO: u16 = 4;
pub(super) const PROTOCOL_INFO_TCP: u16 = 1;
pub(super) const TCP_STATE: u16 = 1;
pub(super) const TUPLE_IP: u16 = 1;
pub(super) const IPV4_SOURCE: u16 = 1;
pub(super) const IPV4_DESTINATION: u16 = 2;
pub(super) const IPV6_SOURCE: u16 = 3;
pub(super) const IPV6_DESTINATION: u16 = 4;
pub(super) const TUPLE_PROTOCOL: u16 = 2;
pub(super) const PROTOCOL_NUMBER: u16 = 1;
pub(super) const SOURCE_PORT: u16 = 2;
pub(super) const DESTINATION_PORT: u16 = 3;
/// `TCP_CONNTRACK_TIME_WAIT` and `TCP_CONNTRACK_CLOSE` (`linux/netfilter/nf_conntrack_tcp.h`).
const ENDED: [u8; 2] = [7, 8];

/// Counts TCP connections that have not ended and are the proxy's: translated to its redirection ports, or made to
/// its HBONE port at one of the pod's `own` addresses. DNS is left out.
///
/// While it is not zero, the namespace's nat chains and the rules that keep conntrack going must stay.
pub fn redirected_connections(socket: &NetfilterSocket, own: &[IpAddr]) -> Result<u32, NetlinkError> {
    socket.query(
        "the connections",
        |sequence| {
            let mut writer = Writer::new();
            writer.message(GET, REQUEST | DUMP, sequence, &[0; FIXED], |_| {});
            writer.into_bytes()
        },
        || 0,
        |count, message| *count += u32::from(message.ty == NEW && is_the_proxys(message, own)),
    )
}

fn is_the_proxys(message: &Message<'_>, own: &[IpAddr]) -> bool {
    let attributes = message.attributes(FIXED);
    let port = |tuple, end| {
        let protocol = attributes.nested(tuple).nested(TUPLE_PROTOCOL);
        let is_tcp = protocol.find(PROTOCOL_NUMBER) == Some(&[Protocol::Tcp.number()]);
        let bytes: [u8; 2] = protocol.find(end)?.try_into().ok()?;
        is_tcp.then_some(u16::from_be_bytes(bytes))
    };
    let (Some(dialled), Some(answering)) = (
        port(TUPLE_ORIGINAL, DESTINATION_PORT),
        port(TUPLE_REPLY, SOURCE_PORT),
    ) else {
        return false;
    };
    let state: Attributes<'_> = attributes.nested(PROTOCOL_INFO).nested(PROTOCOL_INFO_TCP);
    let ended = state
        .find(TCP_STATE)
        .is_some_and(|state| ENDED.iter().any(|ended| state == [*ended]));
    let redirected = dialled != answering && [PORT_OUTBOUND, PORT_INBOUND].contains(&answering);
    let hbone = dialled == PORT_HBONE && destination(&attributes).is_some_and(|to| own.contains(&to));
    !ended && (redirected || hbone)
}

/// Where the connection was made to.
fn destination(attributes: &Attributes<'_>) -> Option<IpAddr> {
    let tuple = attributes.nested(TUPLE_ORIGINAL).nested(TUPLE_IP);
    if let Some(v4) = tuple.find(IPV4_DESTINATION) {
        return <[u8; 4]>::try_from(v4).ok().map(IpAddr::from);
    }
    let v6 = tuple.find(IPV6_DESTINATION)?;
    <[u8; 16]>::try_from(v6).ok().map(IpAddr::from)
}

//! Connections that conntrack redirects to the proxy (`linux/netfilter/nfnetlink_conntrack.h`).

use super::bytes::{Attributes, Message, Writer};
use super::error::NetlinkError;
use super::nft::FIXED;
use super::socket::{DUMP, NetfilterSocket, REQUEST};
use crate::rules::{PORT_INBOUND, PORT_OUTBOUND, Protocol};

/// Subsystem `NFNL_SUBSYS_CTNETLINK`, message `IPCTNL_MSG_CT_GET`.
const GET: u16 = 1 << 8 | 1;
const NEW: u16 = 1 << 8;
const TUPLE_ORIGINAL: u16 = 1;
const TUPLE_REPLY: u16 = 2;
const PROTOCOL_INFO: u16 = 4;
const PROTOCOL_INFO_TCP: u16 = 1;
const TCP_STATE: u16 = 1;
const TUPLE_PROTOCOL: u16 = 2;
const PROTOCOL_NUMBER: u16 = 1;
const SOURCE_PORT: u16 = 2;
const DESTINATION_PORT: u16 = 3;
/// `TCP_CONNTRACK_TIME_WAIT` and `TCP_CONNTRACK_CLOSE` (`linux/netfilter/nf_conntrack_tcp.h`).
const ENDED: [u8; 2] = [7, 8];

/// Counts TCP connections that are translated to the proxy's redirection ports and have not ended. DNS is left out.
///
/// While it is not zero, the namespace's nat chains and the rules that keep conntrack going must stay.
pub fn redirected_connections(socket: &NetfilterSocket) -> Result<u32, NetlinkError> {
    socket.query(
        "the connections",
        |sequence| {
            let mut writer = Writer::new();
            writer.message(GET, REQUEST | DUMP, sequence, &[0; FIXED], |_| {});
            writer.into_bytes()
        },
        || 0,
        |count, message| *count += u32::from(message.ty == NEW && is_redirected(message)),
    )
}

fn is_redirected(message: &Message<'_>) -> bool {
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
    dialled != answering && [PORT_OUTBOUND, PORT_INBOUND].contains(&answering) && !ended
}

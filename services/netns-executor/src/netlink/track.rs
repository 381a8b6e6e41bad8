//! Makes conntrack know connections that exist (`linux/netfilter/nfnetlink_conntrack.h`, as `conntrack -I` sends it).
//!
//! What conntrack does not know is a new connection to it, whose first packet the nat chains may translate. An entry
//! that has seen an answer is past them, and its packets go untranslated.

use std::net::{IpAddr, SocketAddr};

use super::bytes::{AF_INET, AF_INET6, Writer};
use super::conntrack::{
    DESTINATION_PORT, IPV4_DESTINATION, IPV4_SOURCE, IPV6_DESTINATION, IPV6_SOURCE, NEW, PROTOCOL_INFO,
    PROTOCOL_INFO_TCP, PROTOCOL_NUMBER, SOURCE_PORT, TCP_STATE, TUPLE_IP, TUPLE_ORIGINAL, TUPLE_PROTOCOL,
    TUPLE_REPLY,
};
use super::diagnostics::{Connection, TcpState};
use super::socket::{ACK, CREATE, EXCLUSIVE, NetfilterSocket, REQUEST};
use crate::rules::Protocol;

const STATUS: u16 = 3;
const TIMEOUT: u16 = 7;
const TCP_FLAGS_ORIGINAL: u16 = 4;
const TCP_FLAGS_REPLY: u16 = 5;
/// `IPS_SEEN_REPLY | IPS_ASSURED | IPS_CONFIRMED`: the kernel takes no entry without the last.
const KNOWN: u32 = 1 << 1 | 1 << 2 | 1 << 3;
/// `IP_CT_TCP_FLAG_BE_LIBERAL` and `IP_CT_TCP_FLAG_SACK_PERM`, as the kernel itself takes up a connection in its middle:
/// where the windows are, and what was agreed on, is not known.
const LIBERAL: u8 = 0x08 | 0x02;
/// `IP_CT_TCP_FLAG_CLOSE_INIT`: a SYN that comes after the end is a new connection, not part of this one.
const CLOSE_INIT: u8 = 0x04;
/// Messages in one datagram. A refusal takes about 1 KiB of the socket's receive buffer (208 KiB by default), and all
/// may be refused.
const BATCH: usize = 64;
/// Batches begin here, so that a query's late answer is never taken for theirs.
const FIRST_SEQUENCE: u32 = 0x5200_0000;

/// What became of connections that conntrack was told of.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tracked {
    /// New to conntrack.
    pub made: u32,
    /// It knew them already.
    pub known: u32,
    /// It did not take them.
    pub refused: u32,
    /// Why not the first of these.
    pub reason: Option<String>,
}

/// Makes conntrack know each of these connections, in the state that it is in. One that it does not take keeps no
/// other from being taken.
pub fn track(socket: &NetfilterSocket, connections: &[Connection]) -> Tracked {
    let mut tracked = Tracked::default();
    for batch in connections.chunks(BATCH) {
        let (bytes, last) = encode(batch);
        let whole = count(batch.len());
        match socket.transact(&bytes, last) {
            Ok(refusals) => {
                let known = count(refusals.iter().filter(|r| r.errno == libc::EEXIST).count());
                let refused = count(refusals.len()) - known;
                tracked.made += whole - known - refused;
                tracked.known += known;
                tracked.refused += refused;
                if let Some(refusal) = refusals.into_iter().find(|r| r.errno != libc::EEXIST) {
                    let error = refusal.into_error("a connection");
                    tracked.note(&error);
                }
            }
            Err(error) => {
                tracked.refused += whole;
                tracked.note(&error);
            }
        }
    }
    tracked
}

impl Tracked {
    fn note(&mut self, error: &(dyn std::error::Error + 'static)) {
        self.reason
            .get_or_insert_with(|| sluice_runtime::telemetry::chain(error));
    }
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Messages for these connections, and the sequence number of the last, which alone asks for an acknowledgement.
fn encode(connections: &[Connection]) -> (Vec<u8>, u32) {
    let mut writer = Writer::new();
    let last = FIRST_SEQUENCE + count(connections.len()).saturating_sub(1);
    for (connection, sequence) in connections.iter().zip(FIRST_SEQUENCE..) {
        let ack = if sequence == last { ACK } else { 0 };
        let family = if connection.local.is_ipv4() {
            AF_INET
        } else {
            AF_INET6
        };
        let flags = REQUEST | CREATE | EXCLUSIVE | ack;
        writer.message(NEW, flags, sequence, &[family, 0, 0, 0], |w| entry(w, connection));
    }
    (writer.into_bytes(), last)
}

fn entry(w: &mut Writer, connection: &Connection) {
    let Connection {
        local,
        remote,
        state,
        inbound,
    } = connection;
    let (from, to) = if *inbound {
        (remote, local)
    } else {
        (local, remote)
    };
    let known = KnownAs::from(*state);
    tuple(w, TUPLE_ORIGINAL, from, to);
    tuple(w, TUPLE_REPLY, to, from);
    w.be32(STATUS, KNOWN);
    w.be32(TIMEOUT, known.seconds);
    w.nest(PROTOCOL_INFO, |w| {
        w.nest(PROTOCOL_INFO_TCP, |w| {
            w.attribute(TCP_STATE, &[known.state]);
            // struct nf_ct_tcp_flags: flags, mask.
            w.attribute(TCP_FLAGS_ORIGINAL, &[known.flags; 2]);
            w.attribute(TCP_FLAGS_REPLY, &[known.flags; 2]);
        });
    });
}

fn tuple(w: &mut Writer, ty: u16, from: &SocketAddr, to: &SocketAddr) {
    w.nest(ty, |w| {
        w.nest(TUPLE_IP, |w| {
            for (address, v4, v6) in [
                (from.ip(), IPV4_SOURCE, IPV6_SOURCE),
                (to.ip(), IPV4_DESTINATION, IPV6_DESTINATION),
            ] {
                match address {
                    IpAddr::V4(address) => w.attribute(v4, &address.octets()),
                    IpAddr::V6(address) => w.attribute(v6, &address.octets()),
                }
            }
        });
        w.nest(TUPLE_PROTOCOL, |w| {
            w.attribute(PROTOCOL_NUMBER, &[Protocol::Tcp.number()]);
            w.attribute(SOURCE_PORT, &from.port().to_be_bytes());
            w.attribute(DESTINATION_PORT, &to.port().to_be_bytes());
        });
    });
}

/// How conntrack would know a connection if it had seen all of it.
struct KnownAs {
    /// `enum tcp_conntrack` (`linux/netfilter/nf_conntrack_tcp.h`).
    state: u8,
    /// The kernel's default for that state (net/netfilter/nf_conntrack_proto_tcp.c); the next packet sets the
    /// namespace's own.
    seconds: u32,
    /// Of either direction.
    flags: u8,
}

impl From<TcpState> for KnownAs {
    fn from(state: TcpState) -> Self {
        let ending = LIBERAL | CLOSE_INIT;
        let (state, seconds, flags) = match state {
            TcpState::SynSent => (1, 120, LIBERAL),
            TcpState::SynReceived => (2, 60, LIBERAL),
            TcpState::Established => (3, 432_000, LIBERAL),
            TcpState::FinWait => (4, 120, ending),
            TcpState::HalfClosed => (5, 60, ending),
            TcpState::LastAck => (6, 30, ending),
        };
        Self {
            state,
            seconds,
            flags,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::bytes::Messages;

    fn connection(local: &str, remote: &str, state: TcpState, inbound: bool) -> Connection {
        Connection {
            local: local.parse().unwrap(),
            remote: remote.parse().unwrap(),
            state,
            inbound,
        }
    }

    /// What `strace -xx conntrack -I -p tcp -s 10.0.0.2 -d 192.0.2.1 --sport 40000 --dport 80 --state ESTABLISHED
    /// -u SEEN_REPLY,ASSURED -t 432000` (1.4.7) shows, with zeros for what it leaves undefined between attributes.
    const GOLDEN: &[u8] = b"\x02\0\0\0\
        \x34\0\x01\x80\
        \x14\0\x01\x80\x08\0\x01\0\x0a\0\0\x02\x08\0\x02\0\xc0\0\x02\x01\
        \x1c\0\x02\x80\x05\0\x01\0\x06\0\0\0\x06\0\x02\0\x9c\x40\0\0\x06\0\x03\0\0\x50\0\0\
        \x34\0\x02\x80\
        \x14\0\x01\x80\x08\0\x01\0\xc0\0\x02\x01\x08\0\x02\0\x0a\0\0\x02\
        \x1c\0\x02\x80\x05\0\x01\0\x06\0\0\0\x06\0\x02\0\0\x50\0\0\x06\0\x03\0\x9c\x40\0\0\
        \x08\0\x03\0\0\0\0\x0e\
        \x08\0\x07\0\0\x06\x97\x80\
        \x20\0\x04\x80\
        \x1c\0\x01\x80\x05\0\x01\0\x03\0\0\0\x06\0\x04\0\x0a\x0a\0\0\x06\0\x05\0\x0a\x0a\0\0";

    #[test]
    fn an_entry_is_what_the_conntrack_tool_sends() {
        let out = connection("10.0.0.2:40000", "192.0.2.1:80", TcpState::Established, false);
        // The same, seen from the other end.
        let into = connection("192.0.2.1:80", "10.0.0.2:40000", TcpState::Established, true);
        for connection in [out, into] {
            let (bytes, last) = encode(&[connection]);
            let message = Messages(&bytes).next().unwrap();
            assert_eq!((message.ty, message.flags), (0x100, 0x605));
            assert_eq!(message.sequence, last);
            assert_eq!(message.payload, GOLDEN);
        }
    }

    #[test]
    fn only_the_last_of_a_batch_asks_for_an_answer() {
        let one = connection("[fd00::2]:1", "[fd00::1]:2", TcpState::FinWait, false);
        let (bytes, last) = encode(&[one; 3]);
        let messages: Vec<_> = Messages(&bytes).collect();
        let answered: Vec<_> = messages.iter().map(|m| m.flags & ACK != 0).collect();
        assert_eq!(answered, [false, false, true]);
        assert_eq!(messages[2].sequence, last);
        assert!(messages.iter().all(|m| m.payload[0] == AF_INET6));
        assert!(bytes.len() < 1024);
    }
}

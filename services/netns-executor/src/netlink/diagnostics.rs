//! The TCP connections of a namespace (`linux/sock_diag.h`, `linux/inet_diag.h`). Listing them needs no capability.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};

use super::bytes::{AF_INET, AF_INET6, Message, Writer};
use super::error::NetlinkError;
use super::socket::{DUMP, DiagnosticSocket, REQUEST};

/// `TCPDIAG_GETSOCK`: both families in one walk through the kernel's table of connections, which is the machine's, and
/// half a millisecond long. `SOCK_DIAG_BY_FAMILY` takes two.
const TCP: u16 = 18;
/// `struct inet_diag_req`: four bytes, an `inet_diag_sockid`, the states, four bytes. All but the states is left empty.
const REQUEST_LENGTH: usize = 60;
const REQUEST_STATES: usize = 52;
/// `struct inet_diag_msg`, up to and with its `inet_diag_sockid`.
const MESSAGE_LENGTH: usize = 52;

/// What a TCP socket is about (`enum` of `net/tcp_states.h`), as far as conntrack can tell it apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TcpState {
    /// Both directions are open.
    Established,
    /// Our SYN has not been answered.
    SynSent,
    /// A SYN was answered, and the answer not yet acknowledged.
    SynReceived,
    /// Our FIN has not been acknowledged.
    FinWait,
    /// One side has ended, and the other knows.
    HalfClosed,
    /// Both have ended, and not both are acknowledged.
    LastAck,
}

impl TcpState {
    /// None for sockets without a connection.
    fn of(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::Established,
            2 => Self::SynSent,
            3 | 12 => Self::SynReceived,
            4 => Self::FinWait,
            5 | 8 => Self::HalfClosed,
            9 | 11 => Self::LastAck,
            _ => return None,
        })
    }
}

const TCP_TIME_WAIT: u32 = 6;
const TCP_CLOSE: u32 = 7;
const TCP_LISTEN: u8 = 10;
const TCP_MAX_STATES: u32 = 13;
/// All states but two. Connections in `TCP_TIME_WAIT` are over: a busy pod has thousands of them, and nobody misses one.
const STATES: u32 = ((1 << TCP_MAX_STATES) - 2) & !(1 << TCP_TIME_WAIT | 1 << TCP_CLOSE);

/// A TCP connection, seen from one of its ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connection {
    /// This end. IPv4 in IPv6 is IPv4.
    pub local: SocketAddr,
    /// The other end.
    pub remote: SocketAddr,
    /// How far it is.
    pub state: TcpState,
    /// The other end has opened it: somebody listens on the local port.
    pub inbound: bool,
}

#[derive(Debug, Default)]
struct Listed {
    connections: Vec<Connection>,
    listening: HashSet<u16>,
}

/// Lists the TCP connections of the socket's namespace. Those over loopback, which no rule of ours redirects, are left
/// out.
pub fn connections(socket: &DiagnosticSocket) -> Result<Vec<Connection>, NetlinkError> {
    let Listed {
        mut connections,
        listening,
    } = socket.query("the TCP sockets", request, Listed::default, Listed::take)?;
    for connection in &mut connections {
        connection.inbound =
            connection.state == TcpState::SynReceived || listening.contains(&connection.local.port());
    }
    Ok(connections)
}

fn request(sequence: u32) -> Vec<u8> {
    let mut fixed = [0; REQUEST_LENGTH];
    fixed[REQUEST_STATES..REQUEST_STATES + 4].copy_from_slice(&STATES.to_ne_bytes());
    let mut writer = Writer::new();
    writer.message(TCP, REQUEST | DUMP, sequence, &fixed, |_| {});
    writer.into_bytes()
}

impl Listed {
    fn take(&mut self, message: &Message<'_>) {
        let Some(payload) = message.payload.first_chunk::<MESSAGE_LENGTH>() else {
            return;
        };
        if message.ty != TCP {
            return;
        }
        let (family, number) = (payload[0], payload[1]);
        let port = |at: usize| u16::from_be_bytes([payload[at], payload[at + 1]]);
        if number == TCP_LISTEN {
            self.listening.insert(port(4));
            return;
        }
        let (Some(local), Some(remote)) = (
            address(family, &payload[8..24]),
            address(family, &payload[24..40]),
        ) else {
            return;
        };
        if let Some(state) = TcpState::of(number)
            && !local.is_loopback()
            && !remote.is_loopback()
        {
            self.connections.push(Connection {
                local: SocketAddr::new(local, port(4)),
                remote: SocketAddr::new(remote, port(6)),
                state,
                inbound: false,
            });
        }
    }
}

fn address(family: u8, bytes: &[u8]) -> Option<IpAddr> {
    match family {
        AF_INET => Some(IpAddr::from(*bytes.first_chunk::<4>()?)),
        AF_INET6 => Some(IpAddr::from(*bytes.first_chunk::<16>()?).to_canonical()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::bytes::Messages;

    /// `struct inet_diag_msg` with all its fields, and an attribute behind it as the kernel sends them.
    fn message(family: u8, state: u8, local: SocketAddr, remote: SocketAddr) -> Vec<u8> {
        let mut fixed = vec![0; 72];
        fixed[..2].copy_from_slice(&[family, state]);
        for (end, port, address) in [(local, 4, 8), (remote, 6, 24)] {
            fixed[port..port + 2].copy_from_slice(&end.port().to_be_bytes());
            match end.ip() {
                IpAddr::V4(v4) => fixed[address..address + 4].copy_from_slice(&v4.octets()),
                IpAddr::V6(v6) => fixed[address..address + 16].copy_from_slice(&v6.octets()),
            }
        }
        let mut writer = Writer::new();
        writer.message(TCP, 2, 1, &fixed, |w| w.attribute(8, &[0]));
        writer.into_bytes()
    }

    fn listed(datagram: &[u8]) -> Listed {
        let mut listed = Listed::default();
        Messages(datagram).for_each(|message| listed.take(&message));
        listed
    }

    #[test]
    fn the_request_asks_for_all_states_with_a_connection_and_for_listeners() {
        // struct nlmsghdr (length, type, flags, sequence, port), then struct inet_diag_req: only the states.
        let bytes = request(7);
        let mut expected = vec![0; 76];
        expected[..4].copy_from_slice(&76_u32.to_ne_bytes());
        expected[4..6].copy_from_slice(&18_u16.to_ne_bytes());
        expected[6..8].copy_from_slice(&0x301_u16.to_ne_bytes());
        expected[8..12].copy_from_slice(&7_u32.to_ne_bytes());
        expected[68..72].copy_from_slice(&0x1f3e_u32.to_ne_bytes());
        assert_eq!(bytes, expected);
    }

    #[test]
    fn connections_are_read_and_ipv4_in_ipv6_is_ipv4() {
        let of = |address: &str| address.parse::<SocketAddr>().unwrap();
        for (family, local, remote, expected) in [
            (
                AF_INET,
                "10.0.0.2:40000",
                "192.0.2.1:80",
                "10.0.0.2:40000 192.0.2.1:80",
            ),
            (
                AF_INET6,
                "[fd00::2]:40000",
                "[fd00::1]:80",
                "[fd00::2]:40000 [fd00::1]:80",
            ),
            (
                AF_INET6,
                "[::ffff:10.0.0.2]:8080",
                "[::ffff:10.0.0.1]:50000",
                "10.0.0.2:8080 10.0.0.1:50000",
            ),
        ] {
            let listed = listed(&message(family, 1, of(local), of(remote)));
            let found = listed.connections[0];
            assert_eq!(format!("{} {}", found.local, found.remote), expected);
            assert_eq!(found.state, TcpState::Established);
        }
    }

    #[test]
    fn listeners_are_no_connections_and_loopback_is_left_out() {
        let of = |address: &str| address.parse::<SocketAddr>().unwrap();
        let any = of("0.0.0.0:0");
        let listener = listed(&message(AF_INET, TCP_LISTEN, of("0.0.0.0:8080"), any));
        assert!(listener.connections.is_empty() && listener.listening.contains(&8080));
        for (family, state, local, remote) in [
            (AF_INET, 6, "10.0.0.2:1", "10.0.0.1:2"),
            (AF_INET, 1, "127.0.0.1:15001", "10.0.0.2:40000"),
            (AF_INET6, 1, "[::1]:1", "[::1]:2"),
            (AF_INET6, 1, "[::ffff:127.0.0.1]:1", "[::ffff:127.0.0.1]:2"),
            (1, 1, "10.0.0.2:1", "10.0.0.1:2"),
        ] {
            let listed = listed(&message(family, state, of(local), of(remote)));
            assert!(listed.connections.is_empty(), "{family} {state} {local}");
        }
    }

    #[test]
    fn every_cut_of_a_message_is_read_without_panic() {
        let end = "[fd00::2]:40000".parse().unwrap();
        let bytes = message(AF_INET6, 1, end, end);
        for cut in 0..bytes.len() {
            let _ = listed(&bytes[..cut]);
            let message = Message {
                ty: TCP,
                flags: 0,
                sequence: 1,
                payload: &bytes[..cut],
            };
            Listed::default().take(&message);
        }
    }
}

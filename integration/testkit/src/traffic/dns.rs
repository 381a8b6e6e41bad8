//! As much DNS (RFC 1035) as a test needs: ask for an address, answer with a fixed one.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;

use super::Worker;
use crate::netns::Netns;

const HEADER: usize = 12;
/// Compressed name: the one that starts right behind the header.
const QUESTION_NAME: [u8; 2] = [0xc0, 12];
const TYPE_A: u16 = 1;
const TYPE_AAAA: u16 = 28;
const CLASS_IN: u16 = 1;

/// Asks the server at `server`, from inside `netns`, for the A (or AAAA) record of `name`.
pub fn query(
    netns: &Netns,
    server: SocketAddr,
    name: &str,
    ipv6: bool,
    tcp: bool,
    timeout: Duration,
) -> io::Result<Vec<IpAddr>> {
    let message = encode_query(name, if ipv6 { TYPE_AAAA } else { TYPE_A });
    let reply = netns.run(|| -> io::Result<Vec<u8>> {
        if tcp {
            let mut stream = std::net::TcpStream::connect_timeout(&server, timeout)?;
            stream.set_read_timeout(Some(timeout))?;
            stream.write_all(&framed(&message))?;
            let mut len = [0; 2];
            stream.read_exact(&mut len)?;
            let mut reply = vec![0; u16::from_be_bytes(len).into()];
            stream.read_exact(&mut reply)?;
            return Ok(reply);
        }
        let any: IpAddr = if server.is_ipv4() {
            [0, 0, 0, 0].into()
        } else {
            [0u16; 8].into()
        };
        let socket = std::net::UdpSocket::bind((any, 0))?;
        socket.set_read_timeout(Some(timeout))?;
        socket.connect(server)?;
        socket.send(&message)?;
        let mut reply = vec![0; 4096];
        let len = socket.recv(&mut reply)?;
        reply.truncate(len);
        Ok(reply)
    })?;
    decode_addresses(&reply).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "malformed DNS answer"))
}

fn encode_query(name: &str, kind: u16) -> Vec<u8> {
    let mut message = vec![0x51, 0x1c, 0x01, 0x00, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.trim_end_matches('.').split('.') {
        let label = &label.as_bytes()[..label.len().min(63)];
        message.push(u8::try_from(label.len()).unwrap_or(63));
        message.extend_from_slice(label);
    }
    message.push(0);
    message.extend_from_slice(&kind.to_be_bytes());
    message.extend_from_slice(&CLASS_IN.to_be_bytes());
    message
}

fn framed(message: &[u8]) -> Vec<u8> {
    let mut bytes = u16::try_from(message.len())
        .unwrap_or(u16::MAX)
        .to_be_bytes()
        .to_vec();
    bytes.extend_from_slice(message);
    bytes
}

/// Offset behind a name; compressed names end with their pointer.
fn skip_name(message: &[u8], mut at: usize) -> Option<usize> {
    loop {
        match *message.get(at)? {
            0 => return Some(at + 1),
            pointer if pointer & 0xc0 == 0xc0 => return Some(at + 2),
            len => at += usize::from(len) + 1,
        }
    }
}

fn u16_at(message: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(message.get(at..at + 2)?.try_into().ok()?))
}

fn decode_addresses(message: &[u8]) -> Option<Vec<IpAddr>> {
    let answers = u16_at(message, 6)?;
    let mut at = skip_name(message, HEADER)? + 4;
    let mut addresses = Vec::new();
    for _ in 0..answers {
        at = skip_name(message, at)?;
        let len = usize::from(u16_at(message, at + 8)?);
        let data = message.get(at + 10..at + 10 + len)?;
        if let Ok(v4) = <[u8; 4]>::try_from(data) {
            addresses.push(v4.into());
        } else if let Ok(v6) = <[u8; 16]>::try_from(data) {
            addresses.push(v6.into());
        }
        at += 10 + len;
    }
    Some(addresses)
}

/// The answer to a query for one A or AAAA record; `None` if it is not one.
pub fn answer(query: &[u8], v4: Ipv4Addr, v6: Ipv6Addr) -> Option<Vec<u8>> {
    let end = skip_name(query, HEADER)?;
    let kind = u16_at(query, end)?;
    let question = query.get(HEADER..end + 4)?;
    let data = match kind {
        TYPE_A => v4.octets().to_vec(),
        TYPE_AAAA => v6.octets().to_vec(),
        _ => return None,
    };
    let mut message = query.get(..2)?.to_vec();
    message.extend_from_slice(&[0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0]);
    message.extend_from_slice(question);
    message.extend_from_slice(&QUESTION_NAME);
    message.extend_from_slice(&kind.to_be_bytes());
    message.extend_from_slice(&CLASS_IN.to_be_bytes());
    message.extend_from_slice(&[0, 0, 0, 5]);
    message.extend_from_slice(&framed(&data));
    Some(message)
}

/// Answers the queries of one TCP connection.
pub(crate) async fn serve_tcp(
    mut stream: TcpStream,
    answer: impl Fn(&[u8]) -> Option<Vec<u8>>,
) -> io::Result<()> {
    loop {
        let mut query = vec![0; stream.read_u16().await?.into()];
        stream.read_exact(&mut query).await?;
        let Some(message) = answer(&query) else {
            return Ok(());
        };
        stream.write_all(&framed(&message)).await?;
    }
}

/// A name server that answers everything with one address; stops when dropped.
#[derive(Debug)]
pub struct DnsServer {
    queries: Arc<AtomicU64>,
    _worker: Worker<io::Result<()>>,
}

impl DnsServer {
    /// Listens at `address` (port 53 for a cluster DNS) inside `netns`, UDP and TCP.
    pub fn start(netns: &Netns, address: SocketAddr, v4: Ipv4Addr, v6: Ipv6Addr) -> io::Result<Self> {
        let (udp, tcp) = netns.run(|| -> io::Result<_> {
            let (udp, tcp) = (
                std::net::UdpSocket::bind(address)?,
                std::net::TcpListener::bind(address)?,
            );
            udp.set_nonblocking(true)?;
            tcp.set_nonblocking(true)?;
            Ok((udp, tcp))
        })?;
        let queries = Arc::new(AtomicU64::new(0));
        let counted = queries.clone();
        let worker = Worker::start(netns, "dns", move |mut stop| async move {
            let (udp, tcp) = (UdpSocket::from_std(udp)?, TcpListener::from_std(tcp)?);
            let mut buffer = [0; 4096];
            let mut clients = JoinSet::new();
            loop {
                tokio::select! {
                    Ok((len, client)) = udp.recv_from(&mut buffer) => {
                        counted.fetch_add(1, Ordering::Relaxed);
                        if let Some(message) = answer(&buffer[..len], v4, v6) {
                            let _ = udp.send_to(&message, client).await;
                        }
                    }
                    Ok((stream, _)) = tcp.accept() => {
                        counted.fetch_add(1, Ordering::Relaxed);
                        clients.spawn(serve_tcp(stream, move |query| answer(query, v4, v6)));
                    }
                    Some(_) = clients.join_next() => {}
                    _ = stop.wait_for(|stop| *stop) => return Ok(()),
                }
            }
        })?;
        Ok(Self {
            queries,
            _worker: worker,
        })
    }

    /// How many queries (UDP) and connections (TCP) came.
    pub fn queries(&self) -> u64 {
        self.queries.load(Ordering::Relaxed)
    }
}

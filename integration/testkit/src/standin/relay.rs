//! Relaying for one pod: a task accepts on all its listeners; each connection is a task of its own.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::report::Counters;
use super::sockets::{self, Listening};
use super::workloads::AddressBook;
use super::{DNS_MARKER_V4, DNS_MARKER_V6, INBOUND_PORT, OUTBOUND_PORT, TUNNEL_PORT};
use crate::netns::Netns;
use crate::traffic::dns;

/// What relaying for one pod needs.
#[derive(Debug, Clone)]
pub(super) struct Relay {
    pub(super) netns: Netns,
    pub(super) counters: Arc<Counters>,
    /// Addresses of held pods, if connections between them go through the tunnel port.
    pub(super) tunnel_to: Option<AddressBook>,
    /// Who answers UDP queries; otherwise the marker address.
    pub(super) dns_upstream: Option<SocketAddr>,
}

impl Relay {
    /// Serves until `closing` turns true, then until the last connection ends. Aborting the task ends all at once.
    pub(super) async fn serve(
        self,
        listening: Listening,
        mut closing: watch::Receiver<bool>,
    ) -> io::Result<()> {
        let outbound = sockets::register_tcp(listening.outbound)?;
        let inbound = sockets::register_tcp(listening.inbound)?;
        let tunnel = sockets::register_tcp(listening.tunnel)?;
        let mut tasks = JoinSet::new();
        let mut answering = JoinSet::new();
        for socket in listening.dns_udp {
            answering.spawn(self.clone().answer_udp(sockets::register_udp(socket)?));
        }
        for listener in listening.dns_tcp {
            answering.spawn(answer_tcp(
                sockets::register_tcp(listener)?,
                self.counters.clone(),
            ));
        }
        loop {
            let relay = self.clone();
            tokio::select! {
                Ok((stream, _)) = outbound.accept() => {
                    tasks.spawn(async move { relay.count(&relay.counters.outbound, stream, Relay::outbound).await });
                }
                Ok((stream, _)) = inbound.accept() => {
                    tasks.spawn(async move { relay.count(&relay.counters.inbound, stream, Relay::inbound).await });
                }
                Ok((stream, _)) = tunnel.accept() => {
                    tasks.spawn(async move { relay.count(&relay.counters.tunnel, stream, Relay::tunnel).await });
                }
                Some(_) = tasks.join_next() => {}
                _ = closing.wait_for(|closing| *closing) => break,
            }
        }
        drop((outbound, inbound, tunnel, answering));
        while tasks.join_next().await.is_some() {}
        Ok(())
    }

    async fn count<F, R>(&self, counter: &AtomicU64, mut stream: TcpStream, relay: F)
    where
        F: FnOnce(Self, TcpStream) -> R,
        R: Future<Output = (TcpStream, io::Result<TcpStream>)>,
    {
        counter.fetch_add(1, Ordering::Relaxed);
        let _open = Open::new(&self.counters.open);
        let _ = stream.set_nodelay(true);
        let onward;
        (stream, onward) = relay(self.clone(), stream).await;
        match onward {
            Ok(mut onward) => {
                let _ = onward.set_nodelay(true);
                if tokio::io::copy_bidirectional(&mut stream, &mut onward)
                    .await
                    .is_err()
                {
                    sockets::reset_on_close(&stream);
                    sockets::reset_on_close(&onward);
                }
            }
            Err(error) => {
                self.counters.failed.fetch_add(1, Ordering::Relaxed);
                tracing::debug!(%error, "connection not relayed");
                sockets::reset_on_close(&stream);
            }
        }
    }

    async fn outbound(self, stream: TcpStream) -> (TcpStream, io::Result<TcpStream>) {
        let onward = async {
            let destination = not_to_ourselves(sockets::original_destination(&stream)?, OUTBOUND_PORT)?;
            let through = self
                .tunnel_to
                .as_ref()
                .is_some_and(|book| book.contains(destination.ip()));
            if !through {
                return sockets::connect(&self.netns, destination, None).await;
            }
            let tunnel = SocketAddr::new(destination.ip(), TUNNEL_PORT);
            let mut onward = sockets::connect(&self.netns, tunnel, None).await?;
            onward
                .write_all(format!("CONNECT {destination}\n").as_bytes())
                .await?;
            Ok(onward)
        };
        let onward = onward.await;
        (stream, onward)
    }

    async fn inbound(self, stream: TcpStream) -> (TcpStream, io::Result<TcpStream>) {
        let onward = async {
            let destination = not_to_ourselves(sockets::original_destination(&stream)?, INBOUND_PORT)?;
            self.to_application(&stream, destination).await
        };
        let onward = onward.await;
        (stream, onward)
    }

    async fn tunnel(self, mut stream: TcpStream) -> (TcpStream, io::Result<TcpStream>) {
        let onward = async {
            let destination = read_connect_line(&mut stream).await?;
            self.to_application(&stream, destination).await
        };
        let onward = onward.await;
        (stream, onward)
    }

    async fn answer_udp(self, socket: UdpSocket) -> io::Result<()> {
        let mut buffer = [0; 4096];
        loop {
            let (len, client) = socket.recv_from(&mut buffer).await?;
            self.counters.dns_udp.fetch_add(1, Ordering::Relaxed);
            let answer = match self.dns_upstream {
                None => marker_answer(&buffer[..len]),
                Some(upstream) => sockets::exchange(&self.netns, upstream, &buffer[..len])
                    .await
                    .ok(),
            };
            if let Some(answer) = answer {
                let _ = socket.send_to(&answer, client).await;
            }
        }
    }

    /// The application sees the client's address: the answer comes back through connmark 0x111 and table 100.
    async fn to_application(&self, stream: &TcpStream, destination: SocketAddr) -> io::Result<TcpStream> {
        let client = stream.peer_addr()?.ip().to_canonical();
        sockets::connect(&self.netns, destination, Some(client)).await
    }
}

fn not_to_ourselves(destination: SocketAddr, port: u16) -> io::Result<SocketAddr> {
    if destination.port() == port {
        return Err(io::Error::other(
            "not redirected: somebody connected to the proxy's own port",
        ));
    }
    Ok(SocketAddr::new(
        destination.ip().to_canonical(),
        destination.port(),
    ))
}

async fn read_connect_line(stream: &mut TcpStream) -> io::Result<SocketAddr> {
    let mut line = Vec::new();
    loop {
        match stream.read_u8().await? {
            b'\n' => break,
            _ if line.len() >= 128 => return Err(io::Error::other("CONNECT line too long")),
            byte => line.push(byte),
        }
    }
    let line = String::from_utf8_lossy(&line);
    let destination = line
        .trim_end()
        .strip_prefix("CONNECT ")
        .and_then(|target| target.parse().ok());
    destination.ok_or_else(|| io::Error::other(format!("expected CONNECT address:port, got {line:?}")))
}

struct Open<'a>(&'a AtomicU64);

impl<'a> Open<'a> {
    fn new(counter: &'a AtomicU64) -> Self {
        counter.fetch_add(1, Ordering::Relaxed);
        Self(counter)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn marker_answer(query: &[u8]) -> Option<Vec<u8>> {
    dns::answer(query, DNS_MARKER_V4, DNS_MARKER_V6)
}

async fn answer_tcp(listener: TcpListener, counters: Arc<Counters>) -> io::Result<()> {
    let mut clients = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let (stream, _) = accepted?;
                counters.dns_tcp.fetch_add(1, Ordering::Relaxed);
                clients.spawn(dns::serve_tcp(stream, marker_answer));
            }
            Some(_) = clients.join_next() => {}
        }
    }
}

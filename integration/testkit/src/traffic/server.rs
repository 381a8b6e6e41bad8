//! An application: HTTP and UDP on one port, both answering with the address the client appears to have.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;

use super::Worker;
use crate::netns::Netns;
use crate::pod::lock;

/// What the application answers: how the connection looks from its side.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// The client, as the application sees it.
    pub peer: SocketAddr,
    /// The application's own address of this connection.
    pub local: SocketAddr,
}

/// A running application. Stops when dropped; until then it keeps its netns alive.
#[derive(Debug)]
pub struct EchoServer {
    port: u16,
    peers: Arc<Mutex<BTreeMap<IpAddr, u64>>>,
    _worker: Worker<()>,
}

impl EchoServer {
    /// Listens on all addresses of `netns`, TCP and UDP. Any TCP client that speaks HTTP gets `{"peer":..,"local":..}`;
    /// any datagram gets the sender's address as text.
    pub fn start(netns: &Netns, port: u16) -> io::Result<Self> {
        let (tcp, udp) = netns.run(|| -> io::Result<_> {
            let tcp = bind(Type::STREAM, Protocol::TCP, port)?;
            tcp.listen(1024)?;
            Ok((
                std::net::TcpListener::from(tcp),
                std::net::UdpSocket::from(bind(Type::DGRAM, Protocol::UDP, port)?),
            ))
        })?;
        let peers = Arc::new(Mutex::new(BTreeMap::new()));
        let counted = peers.clone();
        let worker = Worker::start(netns, "echo", move |mut stop| async move {
            let (Ok(tcp), Ok(udp)) = (TcpListener::from_std(tcp), UdpSocket::from_std(udp)) else {
                return;
            };
            tokio::select! {
                () = accept(tcp, counted.clone()) => {}
                () = echo_udp(udp, counted) => {}
                _ = stop.wait_for(|stop| *stop) => {}
            }
        })?;
        Ok(Self {
            port,
            peers,
            _worker: worker,
        })
    }

    /// The port it listens on.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// How many connections and datagrams came from each address.
    pub fn peers(&self) -> BTreeMap<IpAddr, u64> {
        lock(&self.peers).clone()
    }
}

fn bind(kind: Type, protocol: Protocol, port: u16) -> io::Result<Socket> {
    let bind_to = |ip: IpAddr| -> io::Result<Socket> {
        let address = SocketAddr::new(ip, port);
        let socket = Socket::new(Domain::for_address(address), kind, Some(protocol))?;
        socket.set_reuse_address(true)?;
        socket.set_nonblocking(true)?;
        socket.bind(&address.into())?;
        Ok(socket)
    };
    bind_to(Ipv6Addr::UNSPECIFIED.into()).or_else(|_| bind_to(Ipv4Addr::UNSPECIFIED.into()))
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

type Peers = Arc<Mutex<BTreeMap<IpAddr, u64>>>;

async fn accept(listener: TcpListener, peers: Peers) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            Ok((stream, peer)) = listener.accept() => {
                *lock(&peers).entry(peer.ip().to_canonical()).or_default() += 1;
                connections.spawn(converse(stream));
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn converse(stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let seen = Seen {
        peer: canonical(stream.peer_addr()?),
        local: canonical(stream.local_addr()?),
    };
    let body = serde_json::to_string(&seen)?;
    let response = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    loop {
        line.clear();
        if stream.read_line(&mut line).await? == 0 {
            return Ok(());
        }
        // The empty line ends a request; requests have no body here.
        if line.trim_end().is_empty() {
            stream.get_mut().write_all(response.as_bytes()).await?;
        }
    }
}

async fn echo_udp(socket: UdpSocket, peers: Peers) {
    let mut buffer = [0; 2048];
    loop {
        let Ok((_, peer)) = socket.recv_from(&mut buffer).await else {
            continue;
        };
        *lock(&peers).entry(peer.ip().to_canonical()).or_default() += 1;
        let _ = socket.send_to(canonical(peer).to_string().as_bytes(), peer).await;
    }
}

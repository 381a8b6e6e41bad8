//! Sockets of the stand-in: made on a thread inside the pod's netns, marked, then used from anywhere.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UdpSocket};

use super::{DNS_PORT, INBOUND_PORT, MARK, OUTBOUND_PORT, TUNNEL_PORT};
use crate::netns::{Netns, Place};

/// All listening sockets of one pod, not yet registered with the runtime.
#[derive(Debug)]
pub(super) struct Listening {
    pub(super) outbound: std::net::TcpListener,
    pub(super) inbound: std::net::TcpListener,
    pub(super) tunnel: std::net::TcpListener,
    pub(super) dns_tcp: Vec<std::net::TcpListener>,
    pub(super) dns_udp: Vec<std::net::UdpSocket>,
    pub(super) addresses: Vec<IpAddr>,
}

impl Listening {
    /// Opens everything inside `netns`.
    pub(super) fn open(netns: &Netns) -> io::Result<Self> {
        netns.run(|| {
            // IPv6 may be switched off in the pod: then loopback has no ::1.
            let loopbacks = [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()];
            let dns: Vec<SocketAddr> = loopbacks.map(|ip| SocketAddr::new(ip, DNS_PORT)).to_vec();
            let optional = |address: &SocketAddr, error: &io::Error| {
                address.is_ipv6() && error.kind() == io::ErrorKind::AddrNotAvailable
            };
            let mut dns_tcp = Vec::new();
            let mut dns_udp = Vec::new();
            for address in &dns {
                match (listen(*address), bind_udp(*address)) {
                    (Ok(tcp), Ok(udp)) => {
                        dns_tcp.push(tcp);
                        dns_udp.push(udp);
                    }
                    (Err(error), _) | (_, Err(error)) if !optional(address, &error) => return Err(error),
                    _ => {}
                }
            }
            Ok(Self {
                outbound: listen_any(OUTBOUND_PORT)?,
                inbound: listen_any(INBOUND_PORT)?,
                tunnel: listen_any(TUNNEL_PORT)?,
                dns_tcp,
                dns_udp,
                addresses: interface_addresses()?,
            })
        })
    }
}

fn interface_addresses() -> io::Result<Vec<IpAddr>> {
    let all = nix::ifaddrs::getifaddrs()?;
    let addresses = all.filter_map(|interface| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|a| IpAddr::from(a.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|a| IpAddr::from(a.ip())))
    });
    Ok(addresses.filter(|ip| !ip.is_loopback()).collect())
}

fn marked(domain: Domain, kind: Type, protocol: Protocol) -> io::Result<Socket> {
    let socket = Socket::new(domain, kind, Some(protocol))?;
    socket.set_mark(MARK)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

fn transparent(socket: &Socket, ipv6: bool) -> io::Result<()> {
    if ipv6 {
        socket.set_ip_transparent_v6(true)
    } else {
        socket.set_ip_transparent_v4(true)
    }
}

fn listen(address: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = marked(Domain::for_address(address), Type::STREAM, Protocol::TCP)?;
    socket.set_reuse_port(true)?;
    socket.set_reuse_address(true)?;
    // Best effort, as ztunnel does.
    let _ = transparent(&socket, address.is_ipv6());
    socket.bind(&address.into())?;
    socket.listen(1024)?;
    Ok(socket.into())
}

/// On both families, or on IPv4 alone where the kernel has no IPv6.
fn listen_any(port: u16) -> io::Result<std::net::TcpListener> {
    let v4 = || listen((Ipv4Addr::UNSPECIFIED, port).into());
    listen((Ipv6Addr::UNSPECIFIED, port).into()).or_else(|_| v4())
}

fn bind_udp(address: SocketAddr) -> io::Result<std::net::UdpSocket> {
    let socket = marked(Domain::for_address(address), Type::DGRAM, Protocol::UDP)?;
    socket.set_reuse_port(true)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}

/// Registers listeners with the runtime of the calling task.
pub(super) fn register_tcp(listener: std::net::TcpListener) -> io::Result<TcpListener> {
    TcpListener::from_std(listener)
}

/// Registers a socket with the runtime of the calling task.
pub(super) fn register_udp(socket: std::net::UdpSocket) -> io::Result<UdpSocket> {
    UdpSocket::from_std(socket)
}

/// Connects from inside `netns` to `destination`, with `source` as the source address if given, whoever owns it.
pub(super) async fn connect(
    netns: &Netns,
    destination: SocketAddr,
    source: Option<IpAddr>,
) -> io::Result<TcpStream> {
    let make = move || -> io::Result<Socket> {
        let socket = marked(Domain::for_address(destination), Type::STREAM, Protocol::TCP)?;
        if let Some(source) = source {
            transparent(&socket, source.is_ipv6())?;
            socket.bind(&SocketAddr::new(source, 0).into())?;
        }
        Ok(socket)
    };
    let socket = inside(netns, make).await??;
    TcpSocket::from_std_stream(socket.into())
        .connect(destination)
        .await
}

/// Sends a datagram from inside `netns` and waits up to 2 s for the answer.
pub(super) async fn exchange(netns: &Netns, destination: SocketAddr, bytes: &[u8]) -> io::Result<Vec<u8>> {
    let any: IpAddr = if destination.is_ipv4() {
        [0, 0, 0, 0].into()
    } else {
        [0u16; 8].into()
    };
    let socket = register_udp(inside(netns, move || bind_udp(SocketAddr::new(any, 0))).await??)?;
    socket.connect(destination).await?;
    socket.send(bytes).await?;
    let mut answer = vec![0; 4096];
    let len = tokio::time::timeout(std::time::Duration::from_secs(2), socket.recv(&mut answer)).await??;
    answer.truncate(len);
    Ok(answer)
}

async fn inside<T: Send + 'static>(
    netns: &Netns,
    make: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (sender, made) = tokio::sync::oneshot::channel();
    Place::from(netns).spawn("socket", move || drop(sender.send(make())))?;
    made.await.map_err(io::Error::other)
}

/// Where a redirected connection was going (`SO_ORIGINAL_DST`, linux/netfilter_ipv4.h).
pub(super) fn original_destination(stream: &TcpStream) -> io::Result<SocketAddr> {
    let socket = SockRef::from(stream);
    let ipv4 = stream.local_addr()?.ip().to_canonical().is_ipv4();
    let address = if ipv4 {
        socket.original_dst_v4()
    } else {
        socket.original_dst_v6()
    }?;
    address
        .as_socket()
        .ok_or_else(|| io::Error::other("the original destination is not an IP address"))
}

/// Makes closing the connection send a reset, so that the client sees a failure and not an end.
pub(super) fn reset_on_close(stream: &TcpStream) {
    let _ = SockRef::from(stream).set_linger(Some(std::time::Duration::ZERO));
}

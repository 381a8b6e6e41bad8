//! ICMP passes a mesh pod as it is, both ways: the proxy has no part in it.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use sluice_integration::manifests::PodOptions;
use sluice_integration::mesh::MeshOptions;
use sluice_testkit::netns::Netns;
use sluice_testkit::standin::Counts;
use socket2::{Domain, Protocol, Socket, Type};

use crate::rules::Table;

/// Sends an echo request from inside `netns`, as ping(8) does, and waits for the answer; gives who answered.
fn ping(netns: &Netns, to: IpAddr) -> io::Result<IpAddr> {
    // RFC 792 and RFC 4443; the kernel fills in identifier and checksum (icmp(7), "ping sockets").
    let (domain, protocol, request, reply) = match to {
        IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4, 8, 0),
        IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6, 128, 129),
    };
    netns.run(|| {
        std::fs::write("/proc/sys/net/ipv4/ping_group_range", "0 0")?;
        let socket = Socket::new(domain, Type::DGRAM, Some(protocol))?;
        socket.set_read_timeout(Some(Duration::from_secs(5)))?;
        let socket = std::net::UdpSocket::from(socket);
        socket.send_to(&[request, 0, 0, 0, 0, 0, 0, 1], SocketAddr::new(to, 0))?;
        let mut answer = [0; 64];
        let (length, from) = socket.recv_from(&mut answer)?;
        let is_reply = length >= 8 && answer[0] == reply;
        is_reply
            .then_some(from.ip())
            .ok_or_else(|| io::Error::other(format!("answered with {:?}", &answer[..length])))
    })
}

#[test]
fn echo_requests_are_answered_by_the_pod_and_not_seen_by_the_proxy() {
    let table = Table::start(&PodOptions::default(), MeshOptions::default());
    for ipv6 in [false, true] {
        for (from, to) in [(&table.meshed, &table.plain), (&table.plain, &table.meshed)] {
            let address = to.address(ipv6);
            let (answered, counts) = table.during(|| ping(from.netns(), address));
            assert_eq!(answered.unwrap(), address);
            assert_eq!(counts, Counts::default(), "{address}");
        }
    }
}

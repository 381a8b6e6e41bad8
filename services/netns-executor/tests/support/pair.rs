//! A pair of namespaces in which packets are really sent, and what the kernel made of them.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first surprise"
)]

use std::collections::HashMap;
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, SockaddrStorage, bind, connect, sendto, setsockopt, socket,
    sockopt,
};
use sluice_netns_executor::rules::evaluate::{Evaluation, Packet, Verdict};
use sluice_netns_executor::rules::{Hook, Protocol};

use crate::netns::Netns;
use crate::packets::{INTERFACES, PROBE_V6};

/// A packet to send; no other of the same batch has its pair of ports.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) packet: Packet,
}

/// Protocol, source, source port, destination, destination port.
pub(crate) type Tuple = (u8, IpAddr, u16, IpAddr, u16);

impl Case {
    pub(crate) fn tuple(&self) -> Tuple {
        let packet = &self.packet;
        let protocol = packet.protocol.number();
        (
            protocol,
            packet.source,
            packet.source_port,
            packet.destination,
            packet.destination_port,
        )
    }

    fn ports(&self) -> (u16, u16) {
        (self.packet.source_port, self.packet.destination_port)
    }
}

/// What the kernel did with a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Observed {
    pub(crate) verdict: Verdict,
    pub(crate) zone: u16,
    pub(crate) mark: u32,
    pub(crate) ct_mark: u32,
}

impl From<&Evaluation> for Observed {
    fn from(evaluation: &Evaluation) -> Self {
        Self {
            verdict: evaluation.verdict,
            zone: evaluation.zone,
            mark: evaluation.mark,
            ct_mark: evaluation.ct_mark,
        }
    }
}

/// A pod with three interfaces and what is on the other side of them.
pub(crate) struct Pair {
    pub(crate) pod: Netns,
    peer: Netns,
}

impl Pair {
    pub(crate) fn new() -> Self {
        let (pod, peer) = (Netns::new(), Netns::new());
        for netns in [&pod, &peer] {
            netns.sh(
                "for c in all default; do echo 0 > /proc/sys/net/ipv4/conf/$c/rp_filter; \
                      echo 0 > /proc/sys/net/ipv6/conf/$c/accept_dad; done",
            );
        }
        for (net, (name, peer_name)) in [("eth0", "p0"), (INTERFACES[0], "p1"), (INTERFACES[1], "p2")]
            .iter()
            .enumerate()
        {
            pod.veth(name, &peer, peer_name);
            let addresses = |netns: &Netns, device: &str, host: u8| {
                netns.sh(&format!(
                    "ip addr add 10.0.{net}.{host}/24 dev {device}; ip addr add fd0{net}::{host}/64 dev {device} nodad"
                ));
            };
            addresses(&pod, name, 2);
            addresses(&peer, peer_name, 1);
        }
        pod.sh("ip addr add 10.9.9.9/32 dev lo; ip addr add fd99::9/128 dev lo nodad");
        pod.sh("ip route add default via 10.0.0.1; ip -6 route add default via fd00::1");
        peer.sh("ip route add 10.9.9.9/32 via 10.0.0.2; ip -6 route add fd99::9/128 via fd00::2");
        peer.sh("ip addr add 169.254.7.127/32 dev lo; ip addr add 203.0.113.7/32 dev lo");
        peer.sh(&format!(
            "ip addr add 2001:db8::7/128 dev lo nodad; ip addr add {PROBE_V6}/128 dev lo nodad"
        ));
        Self { pod, peer }
    }

    /// Sends the cases and tells what the kernel made of each.
    pub(crate) fn run(&self, cases: &[Case]) -> HashMap<Tuple, Observed> {
        self.observe(cases);
        self.pod.sh("conntrack -F 2>/dev/null");
        self.pod.run(|| {
            cases
                .iter()
                .filter(|case| case.packet.hook == Hook::Output)
                .for_each(send);
        });
        self.peer.run(|| {
            cases
                .iter()
                .filter(|case| case.packet.hook == Hook::Prerouting)
                .for_each(send);
        });
        let deadline = Instant::now() + Duration::from_secs(10);
        let entries = loop {
            let text = self
                .pod
                .sh("conntrack -L -f ipv4 2>/dev/null; conntrack -L -f ipv6 2>/dev/null");
            let entries = parse_conntrack(&text);
            let Some(missing) = cases.iter().find(|case| !entries.contains_key(&case.tuple())) else {
                break entries;
            };
            assert!(Instant::now() < deadline, "never seen: {missing:?}\n{text}");
        };
        let marks = self.marks();
        let observed = |case: &Case| {
            let (verdict, zone) = entries[&case.tuple()];
            let (mark, ct_mark) = marks[&(case.packet.hook == Hook::Output, case.ports())];
            (
                case.tuple(),
                Observed {
                    verdict,
                    zone,
                    mark,
                    ct_mark,
                },
            )
        };
        cases.iter().map(observed).collect()
    }

    /// Marks packets as the cases say, and writes down what the rules made of the marks. Resets are dropped before
    /// conntrack sees them: it forgets a connection whose first answer is one.
    fn observe(&self, cases: &[Case]) {
        let mut text =
            String::from("table inet observer {}\ndelete table inet observer\ntable inet observer {\n");
        for (map, of_packet) in [("marks", true), ("ctmarks", false)] {
            let _ = writeln!(
                text,
                "map {map} {{ type inet_service . inet_service : mark; elements = {{"
            );
            for case in cases {
                let (source, destination) = case.ports();
                let value = if of_packet {
                    case.packet.mark
                } else {
                    case.packet.ct_mark
                };
                let _ = writeln!(text, "{source} . {destination} : {value},");
            }
            text.push_str("} }\n");
        }
        for (hook, condition) in [("prerouting", "iifname != lo"), ("output", "")] {
            let _ = writeln!(
                text,
                "set {hook}-seen {{ type inet_service . inet_service . mark . mark; size 65535; flags dynamic; }}\n\
                 chain {hook}-resets {{ type filter hook {hook} priority -500; tcp flags & rst == rst drop; }}\n\
                 chain {hook}-ct {{ type filter hook {hook} priority -190; \
                 {condition} ct state new ct mark set th sport . th dport map @ctmarks; }}\n\
                 chain {hook}-late {{ type filter hook {hook} priority -50; {condition} meta l4proto {{ tcp, udp }} \
                 ct direction original add @{hook}-seen {{ \
                 ct original proto-src . ct original proto-dst . meta mark . ct mark }}; }}"
            );
        }
        text.push_str("chain marks-in { type filter hook prerouting priority -450; ");
        text.push_str("iifname != lo meta mark set th sport . th dport map @marks; }\n}\n");
        self.pod.sh_with("nft -f -", &text);
    }

    /// Packet and connection mark by hook (output or not) and ports.
    fn marks(&self) -> HashMap<(bool, (u16, u16)), (u32, u32)> {
        let mut marks = HashMap::new();
        for (output, set) in [(false, "prerouting-seen"), (true, "output-seen")] {
            let text = self.pod.sh(&format!("nft -j list set inet observer {set}"));
            let json: serde_json::Value = serde_json::from_str(&text).unwrap();
            let sets = json["nftables"].as_array().unwrap().iter();
            for element in sets.filter_map(|item| item["set"]["elem"].as_array()).flatten() {
                let element = if element["elem"].is_object() {
                    &element["elem"]["val"]
                } else {
                    element
                };
                let number =
                    |index: usize| u32::try_from(element["concat"][index].as_u64().unwrap()).unwrap();
                let port = |index| u16::try_from(number(index)).unwrap();
                let earlier = marks.insert((output, (port(0), port(1))), (number(2), number(3)));
                assert_eq!(earlier, None, "{element}");
            }
        }
        marks
    }
}

/// Sends the packet of a case from the namespace of the calling thread.
fn send(case: &Case) {
    let packet = &case.packet;
    let family = if packet.source.is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    };
    let tcp = packet.protocol == Protocol::Tcp;
    let ty = if tcp { SockType::Stream } else { SockType::Datagram };
    let fd = socket(family, ty, SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC, None).unwrap();
    setsockopt(&fd, sockopt::ReuseAddr, &true).unwrap();
    if packet.hook == Hook::Output {
        setsockopt(&fd, sockopt::Mark, &packet.mark).unwrap();
    }
    let source = SockaddrStorage::from(SocketAddr::new(packet.source, packet.source_port));
    let destination = SockaddrStorage::from(SocketAddr::new(packet.destination, packet.destination_port));
    bind(fd.as_raw_fd(), &source).unwrap();
    let result = if tcp {
        connect(fd.as_raw_fd(), &destination)
    } else {
        sendto(fd.as_raw_fd(), b"x", &destination, MsgFlags::empty()).map(|_| ())
    };
    assert!(
        matches!(result, Ok(()) | Err(Errno::EINPROGRESS)),
        "{result:?}: {case:?}"
    );
}

/// Translation and zone of each connection, by its original direction.
fn parse_conntrack(text: &str) -> HashMap<Tuple, (Verdict, u16)> {
    let mut entries = HashMap::new();
    for line in text.lines() {
        let Some(protocol) = line
            .split_whitespace()
            .nth(1)
            .and_then(|word| word.parse::<u8>().ok())
        else {
            continue;
        };
        let values = |key: &str| -> Vec<&str> {
            line.split_whitespace()
                .filter_map(|word| word.strip_prefix(key)?.strip_prefix('='))
                .collect()
        };
        let addresses = |key| {
            values(key)
                .into_iter()
                .map(|text| text.parse::<IpAddr>().unwrap())
                .collect::<Vec<_>>()
        };
        let ports = |key| {
            values(key)
                .into_iter()
                .map(|text| text.parse::<u16>().unwrap())
                .collect::<Vec<_>>()
        };
        let (sources, destinations) = (addresses("src"), addresses("dst"));
        let (source_ports, destination_ports) = (ports("sport"), ports("dport"));
        if source_ports.len() < 2 {
            continue;
        }
        let untouched = (sources[1], source_ports[1]) == (destinations[0], destination_ports[0]);
        let verdict = if untouched {
            Verdict::Untouched
        } else {
            Verdict::Redirected(source_ports[1])
        };
        let zone = values("zone").first().map_or(0, |zone| zone.parse().unwrap());
        let tuple = (
            protocol,
            sources[0],
            source_ports[0],
            destinations[0],
            destination_ports[0],
        );
        entries.insert(tuple, (verdict, zone));
    }
    entries
}

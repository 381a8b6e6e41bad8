//! Host rules, probe sets, preflight, connections and links on real namespaces. Needs root.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on ends")]

#[path = "support/netns.rs"]
mod support;

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use sluice_netns_executor::host::{self, HostSockets, probe_set};
use sluice_netns_executor::netlink::conntrack::redirected_connections;
use sluice_netns_executor::netlink::table::TableDamage;
use sluice_netns_executor::netlink::{apply, link};
use sluice_netns_executor::preflight::preflight;
use sluice_netns_executor::rules::HostOptions;
use sluice_proto::ambient::{AmbientOptions, Desired, PROBE_IPV4, PROBE_IPV6};
use support::Netns;

const POD_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 2));
const POD_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd00, 9, 0, 0, 0, 0, 0, 2));

fn host_sockets(netns: &Netns) -> HostSockets {
    netns.sockets().into()
}

/// A host and a pod joined by a veth; the pod's default route leads to the host.
fn host_and_pod(ipv4: bool, ipv6: bool) -> (Netns, Netns) {
    let (host, pod) = (Netns::new(), Netns::new());
    host.veth("veth0", &pod, "eth0");
    if ipv4 {
        host.sh("ip addr add 10.9.0.1/24 dev veth0");
        pod.sh("ip addr add 10.9.0.2/24 dev eth0; ip route add default via 10.9.0.1");
    }
    if ipv6 {
        host.sh("ip addr add fd00:9::1/64 dev veth0 nodad");
        pod.sh("ip addr add fd00:9::2/64 dev eth0 nodad; ip -6 route add default via fd00:9::1");
    }
    (host, pod)
}

/// The source address a pod sees when a process of the host connects to it.
fn source_seen(host: &Netns, pod: &Netns, address: IpAddr) -> IpAddr {
    // Any port: a program that another test starts may hold a copy of the last listener for a moment.
    let listener = pod.run(|| TcpListener::bind(SocketAddr::new(address, 0)).unwrap());
    let remote = listener.local_addr().unwrap();
    let mut stream = host.run(|| TcpStream::connect_timeout(&remote, Duration::from_secs(5)).unwrap());
    // It is established, so there is somebody to accept.
    let (mut accepted, peer) = listener.accept().unwrap();
    accepted.write_all(b"x").unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    stream.read_exact(&mut [0]).unwrap();
    peer.ip()
}

#[test]
fn what_is_right_is_not_touched_and_damage_is_mended() {
    let netns = Netns::new();
    let (host, options) = (host_sockets(&netns), HostOptions::default());
    let first = host::ensure(&host, &options).unwrap();
    assert!(first.changed && first.found.damage == Some(TableDamage::Missing));
    probe_set::add(&host, &options, &[POD_V4, POD_V6]).unwrap();
    let (state, generation) = (netns.state(), host::generation(&host).unwrap());
    for _ in 0..3 {
        assert_eq!(host::ensure(&host, &options).unwrap(), host::Outcome::default());
    }
    assert_eq!(host::generation(&host).unwrap(), generation);
    for (damage, found) in [
        ("nft flush chain inet sluice-host postrouting", TableDamage::Rules),
        (
            "nft insert rule inet sluice-host postrouting accept",
            TableDamage::Rules,
        ),
        (
            "nft flush chain inet sluice-host postrouting; nft delete chain inet sluice-host postrouting",
            TableDamage::Changed,
        ),
        ("nft add chain inet sluice-host others", TableDamage::Changed),
    ] {
        netns.sh(damage);
        assert_ne!(host::generation(&host).unwrap(), generation);
        let mended = host::ensure(&host, &options).unwrap();
        assert!(mended.changed && !mended.found.lines.is_empty(), "{damage}");
        assert_eq!(mended.found.damage, Some(found), "{damage}");
        assert_eq!(
            netns.state(),
            state,
            "after {damage}: rules are back and sets kept their elements"
        );
    }
    for damage in ["nft delete table inet sluice-host", "nft flush ruleset"] {
        netns.sh(damage);
        assert!(host::ensure(&host, &options).unwrap().changed, "{damage}");
        probe_set::sync(&host, &options, &[POD_V4, POD_V6]).unwrap();
        assert_eq!(netns.state(), state);
    }
    assert!(host::remove(&host).unwrap());
    assert!(!host::remove(&host).unwrap());
    assert_eq!(netns.sh("nft list ruleset"), "");
}

#[test]
fn a_set_of_another_type_is_replaced() {
    let netns = Netns::new();
    netns.sh_with(
        "nft -f -",
        "table inet sluice-host { set probes-v4 { type ipv6_addr; flags interval; }; set probes-v6 { type inet_service; }; }",
    );
    let (host, options) = (host_sockets(&netns), HostOptions::default());
    assert!(host::ensure(&host, &options).unwrap().changed);
    probe_set::add(&host, &options, &[POD_V4, POD_V6]).unwrap();
    assert!(
        netns
            .sh("nft list set inet sluice-host probes-v4")
            .contains("type ipv4_addr")
    );
    assert!(
        netns
            .sh("nft list set inet sluice-host probes-v6")
            .contains("type ipv6_addr")
    );
}

#[test]
fn addresses_come_and_go_idempotently() {
    let netns = Netns::new();
    let (host, options) = (host_sockets(&netns), HostOptions::default());
    assert!(probe_set::list(&host, &options).unwrap().is_empty());
    probe_set::remove(&host, &options, &[POD_V4]).unwrap();
    host::ensure(&host, &options).unwrap();
    let listed = || {
        let mut addresses = probe_set::list(&host, &options).unwrap();
        addresses.sort();
        addresses
    };
    probe_set::add(&host, &options, &[POD_V4, POD_V6]).unwrap();
    probe_set::add(&host, &options, &[POD_V4]).unwrap();
    probe_set::add(&host, &options, &[]).unwrap();
    assert_eq!(listed(), [POD_V4, POD_V6]);
    assert!(
        netns
            .sh("nft list set inet sluice-host probes-v4")
            .contains("elements = { 10.9.0.2 }")
    );
    let other: IpAddr = "10.9.0.3".parse().unwrap();
    probe_set::remove(&host, &options, &[other, POD_V6]).unwrap();
    assert_eq!(listed(), [POD_V4]);
    let mapped: IpAddr = "::ffff:10.9.0.3".parse().unwrap();
    let synced = probe_set::sync(&host, &options, &[mapped, POD_V6]).unwrap();
    assert_eq!((synced.added, synced.removed), (2, 1));
    assert_eq!(listed(), [other, POD_V6]);
    let generation = host::generation(&host).unwrap();
    probe_set::sync(&host, &options, &[mapped, POD_V6]).unwrap();
    assert_eq!(host::generation(&host).unwrap(), generation);
    let many: Vec<IpAddr> = (0..3000_u32)
        .map(|n| Ipv4Addr::from(0x0a00_0000 + n).into())
        .collect();
    probe_set::sync(&host, &options, &many).unwrap();
    assert_eq!(listed(), many);
}

#[test]
fn without_ipv6_its_addresses_are_passed_over() {
    let netns = Netns::new();
    let host = host_sockets(&netns);
    let options = HostOptions {
        ipv6: false,
        ..HostOptions::default()
    };
    host::ensure(&host, &options).unwrap();
    probe_set::add(&host, &options, &[POD_V4, POD_V6]).unwrap();
    probe_set::remove(&host, &options, &[POD_V6]).unwrap();
    assert_eq!(probe_set::list(&host, &options).unwrap(), [POD_V4]);
}

#[test]
fn a_probe_has_the_probe_address_whatever_others_masquerade() {
    for variant in ["iptables-nft", "iptables-legacy", "nft"] {
        let (host, pod) = host_and_pod(true, true);
        let masquerade = |when: &str| {
            match variant {
            "nft" => host.sh_with(
                "nft -f -",
                &format!(
                    "table inet others-{when} {{ chain c {{ type nat hook postrouting priority 100; masquerade; }}; }}"
                ),
            ),
            tool => host.sh(&format!(
                "{tool} -t nat -I POSTROUTING -d 10.9.0.0/24 -j MASQUERADE; \
                 {} -t nat -I POSTROUTING -d fd00:9::/64 -j MASQUERADE",
                tool.replace("iptables", "ip6tables")
            )),
        }
        };
        masquerade("before");
        let (sockets, options) = (host_sockets(&host), HostOptions::default());
        host::ensure(&sockets, &options).unwrap();
        masquerade("after");
        assert_ne!(
            source_seen(&host, &pod, POD_V4),
            IpAddr::V4(PROBE_IPV4),
            "not enrolled yet"
        );
        probe_set::add(&sockets, &options, &[POD_V4, POD_V6]).unwrap();
        assert_eq!(
            source_seen(&host, &pod, POD_V4),
            IpAddr::V4(PROBE_IPV4),
            "{variant}"
        );
        assert_eq!(
            source_seen(&host, &pod, POD_V6),
            IpAddr::V6(PROBE_IPV6),
            "{variant}"
        );
    }
}

#[test]
fn a_node_with_ipv6_only_probes_with_the_probe_address() {
    let (host, pod) = host_and_pod(false, true);
    let (sockets, options) = (host_sockets(&host), HostOptions::default());
    host::ensure(&sockets, &options).unwrap();
    probe_set::add(&sockets, &options, &[POD_V6]).unwrap();
    assert_eq!(source_seen(&host, &pod, POD_V6), IpAddr::V6(PROBE_IPV6));
}

#[test]
fn the_preflight_proves_every_feature_and_leaves_nothing() {
    let netns = Netns::new();
    let before = netns.state();
    let features = preflight(&netns.sockets(), true);
    for feature in &features {
        assert!(feature.available && feature.required, "{feature:?}");
    }
    assert!(features.len() >= 18, "{features:?}");
    assert_eq!(netns.state(), before);
}

#[test]
fn the_preflight_names_what_is_missing() {
    let netns = Netns::new();
    netns.sh(
        "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6; echo 1 > /proc/sys/net/ipv6/conf/lo/disable_ipv6",
    );
    let features = preflight(&netns.sockets(), false);
    let missing: Vec<_> = features.iter().filter(|feature| !feature.available).collect();
    assert_eq!(missing.len(), 1, "{missing:?}");
    assert_eq!(
        (missing[0].name, missing[0].family, missing[0].required),
        ("local route", "ip6", false)
    );
    assert!(missing[0].errno.is_some());
}

#[test]
fn only_live_redirected_connections_are_counted() {
    let netns = Netns::new();
    netns.sh("ip link add d0 type veth peer name d1; ip link set d0 up; ip link set d1 up; ip addr add 192.0.2.1/24 dev d0; ip addr add fd00:2::1/64 dev d0 nodad");
    let sockets = netns.sockets();
    let own: [IpAddr; 2] = ["192.0.2.1".parse().unwrap(), "fd00:2::1".parse().unwrap()];
    assert_eq!(redirected_connections(&sockets.netfilter, &own).unwrap(), 0);
    apply(&sockets, &Desired::Ambient(AmbientOptions::default())).unwrap();
    let (outbound, direct) = netns.run(|| {
        let outbound = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 15001)).unwrap();
        (outbound, TcpListener::bind((Ipv4Addr::LOCALHOST, 8080)).unwrap())
    });
    let connect = |remote: &str| {
        let remote: SocketAddr = remote.parse().unwrap();
        netns.run(|| TcpStream::connect_timeout(&remote, Duration::from_secs(5)).unwrap())
    };
    let accept = |listener: &TcpListener| listener.accept().unwrap().0;
    let first = (connect("192.0.2.9:80"), accept(&outbound));
    let second = (connect("[fd00:2::9]:80"), accept(&outbound));
    let _loopback = (connect("127.0.0.1:8080"), accept(&direct));
    let _to_the_proxy_itself = (connect("127.0.0.1:15001"), accept(&outbound));
    assert_eq!(redirected_connections(&sockets.netfilter, &own).unwrap(), 2);
    apply(&sockets, &Desired::Draining(AmbientOptions::default())).unwrap();
    assert_eq!(redirected_connections(&sockets.netfilter, &own).unwrap(), 2);
    // What peers opened to the proxy before they heard that the pod leaves, and what the pod's own clients have there.
    let hbone = netns.run(|| TcpListener::bind((Ipv6Addr::UNSPECIFIED, 15008)).unwrap());
    let inbound = [
        (connect("192.0.2.1:15008"), accept(&hbone)),
        (connect("[fd00:2::1]:15008"), accept(&hbone)),
    ];
    let _elsewhere = (connect("127.0.0.1:15008"), accept(&hbone));
    assert_eq!(redirected_connections(&sockets.netfilter, &own).unwrap(), 4);
    // The last segments of a connection are on their way when both ends are closed.
    let falls_to = |expected: u32| {
        let deadline = std::time::Instant::now() + Duration::from_secs(5);
        while redirected_connections(&sockets.netfilter, &own).unwrap() != expected {
            assert!(std::time::Instant::now() < deadline, "not {expected}");
            std::thread::yield_now();
        }
    };
    drop(inbound);
    falls_to(2);
    drop(first);
    falls_to(1);
    drop(second);
    falls_to(0);
}

#[test]
fn links_and_addresses_are_told_without_loopback() {
    let (_host, pod) = host_and_pod(true, true);
    pod.sh("ip link add tun0 type veth peer name tun1; ip addr add 100.64.1.2/32 peer 100.64.1.1 dev tun0; ip link set tun0 up");
    let route = pod.sockets().route;
    assert!(link::link_exists(&route, "eth0").unwrap());
    assert!(!link::link_exists(&route, "eth1").unwrap());
    let addresses = link::addresses(&route).unwrap();
    for expected in [
        ("eth0", POD_V4),
        ("eth0", POD_V6),
        ("tun0", "100.64.1.2".parse().unwrap()),
    ] {
        assert!(
            addresses.contains(&(expected.0.to_owned(), expected.1)),
            "{expected:?} in {addresses:?}"
        );
    }
    assert!(addresses.iter().all(|(name, _)| name != "lo"));
}

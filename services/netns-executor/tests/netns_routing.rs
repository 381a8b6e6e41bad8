//! Policy routing in real namespaces, and the sockets that reach them, beside what `ip` tells. Needs root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first surprise"
)]

#[path = "support/netns.rs"]
mod netns;

use netns::Netns;
use sluice_netns_executor::netlink::link::link_exists;
use sluice_netns_executor::netlink::{NetfilterSocket, apply, generation, read_back, routing_works};
use sluice_proto::ambient::{AmbientOptions, Desired};

fn nothing() -> Vec<String> {
    Vec::new()
}

#[test]
fn the_kernel_is_asked_how_it_routes_and_tells_every_damage() {
    let desired = Desired::Ambient(AmbientOptions::default());
    let draining = Desired::Draining(AmbientOptions::default());
    let netns = Netns::new();
    let pod = netns.sockets();
    assert!(!routing_works(&pod, &desired).unwrap(), "nothing is there yet");
    for damage in [
        "ip rule del lookup 100",
        "ip -6 rule del lookup 100",
        "ip route flush table 100",
        "ip -6 route flush table 100",
        "ip rule add pref 32000 fwmark 0x111 lookup main; ip rule add pref 32001 fwmark 0x111/0xfff blackhole",
        "ip rule del lookup 100; ip rule add pref 32764 fwmark 0x111/0xffffff lookup 100",
        "ip rule del lookup 100; ip rule add pref 32764 fwmark 0x111/0xfff from 10.0.0.0/8 lookup 100",
        "ip rule del lookup 100; ip rule add pref 32764 fwmark 0x111/0xfff to 10.0.0.0/8 lookup 100",
        "ip rule del lookup 100; ip rule add pref 32764 fwmark 0x111/0xfff ipproto tcp lookup 100",
        "ip rule del lookup 100; ip rule add pref 32764 fwmark 0x111/0xfff iif lo sport 80 lookup 100",
        "ip -6 rule del lookup 100; ip -6 rule add pref 32764 fwmark 0x111/0xfff lookup main",
        "ip route replace blackhole default table 100",
        "ip -6 route flush table 100; ip -6 route add blackhole default table 100",
        "ip link set lo down",
    ] {
        apply(&pod, &desired).unwrap();
        assert!(routing_works(&pod, &desired).unwrap(), "before: {damage}");
        assert!(routing_works(&pod, &draining).unwrap(), "before: {damage}");
        let before = generation(&pod).unwrap();
        netns.sh(damage);
        assert!(!routing_works(&pod, &desired).unwrap(), "{damage}");
        assert_eq!(generation(&pod).unwrap(), before, "{damage}");
        netns.sh("ip rule del pref 32000 2>&-; ip rule del pref 32001 2>&-; ip rule del pref 32764 2>&-; ip link set lo up");
    }
    // IPv6 that is switched off is for the full comparison to judge.
    apply(&pod, &desired).unwrap();
    netns.sh("echo 1 > /proc/sys/net/ipv6/conf/lo/disable_ipv6");
    assert!(!routing_works(&pod, &desired).unwrap());
    let only_ipv4 = Desired::Ambient(AmbientOptions {
        ipv6: false,
        ..AmbientOptions::default()
    });
    assert!(routing_works(&pod, &only_ipv4).unwrap());
}

#[test]
fn a_narrower_rule_in_the_place_of_ours_does_not_pass_for_it() {
    let desired = Desired::Ambient(AmbientOptions::default());
    let netns = Netns::new();
    let pod = netns.sockets();
    for narrow in ["to 192.0.2.0/24", "from 10.0.0.0/8", "ipproto tcp", "iif lo"] {
        apply(&pod, &desired).unwrap();
        netns.sh(&format!(
            "ip rule add pref 32764 fwmark 0x111/0xfff {narrow} lookup 100; ip rule del pref 32764"
        ));
        assert_eq!(read_back(&pod, &desired).unwrap().len(), 1, "{narrow}");
        assert!(apply(&pod, &desired).unwrap().changed, "{narrow}");
        assert_eq!(read_back(&pod, &desired).unwrap(), nothing(), "{narrow}");
        netns.sh("ip rule del pref 32764; ip rule del pref 32764");
    }
}

#[test]
fn an_interface_is_looked_for_by_name() {
    let (netns, other) = (Netns::new(), Netns::new());
    let pod = netns.sockets();
    assert!(link_exists(&pod.route, "lo").unwrap());
    assert!(!link_exists(&pod.route, "eth0").unwrap());
    netns.veth("eth0", &other, "veth0");
    assert!(link_exists(&pod.route, "eth0").unwrap());
    other.sh("ip link del veth0");
    assert!(!link_exists(&pod.route, "eth0").unwrap());
}

#[test]
fn a_pod_with_ipv6_switched_off_gets_the_rest() {
    for sysctl in ["all lo", "lo"] {
        let netns = Netns::new();
        for name in sysctl.split(' ') {
            netns.sh(&format!("echo 1 > /proc/sys/net/ipv6/conf/{name}/disable_ipv6"));
        }
        let pod = netns.sockets();
        let desired = Desired::Ambient(AmbientOptions::default());
        let outcome = apply(&pod, &desired).unwrap();
        assert!(outcome.changed && outcome.without_ipv6);
        assert_eq!(read_back(&pod, &desired).unwrap(), nothing());
        assert!(
            netns
                .sh("ip route show table 100")
                .starts_with("local default dev lo")
        );
        let again = apply(&pod, &desired).unwrap();
        assert!(!again.changed && again.without_ipv6);
        // Once it is on, the missing route is drift.
        netns.sh("echo 0 > /proc/sys/net/ipv6/conf/lo/disable_ipv6");
        assert_eq!(read_back(&pod, &desired).unwrap().len(), 1);
        assert!(apply(&pod, &desired).unwrap().changed);
        assert!(
            netns
                .sh("ip -6 route show table 100")
                .starts_with("local default dev lo")
        );
        assert!(apply(&pod, &Desired::None).unwrap().changed);
    }
}

#[test]
fn a_loopback_interface_that_is_still_down_is_brought_up() {
    let netns = Netns::new();
    netns.sh("ip link set lo down");
    let pod = netns.sockets();
    let desired = Desired::Ambient(AmbientOptions::default());
    assert!(apply(&pod, &desired).unwrap().changed);
    for family in ["-4", "-6"] {
        let route = netns.sh(&format!("ip {family} route show table 100"));
        assert!(route.starts_with("local default dev lo"), "{family}: {route}");
    }
    assert!(netns.sh("ip link show lo").contains("UP"));
    assert_eq!(read_back(&pod, &desired).unwrap(), Vec::<String>::new());
}

#[test]
fn other_descriptors_are_refused() {
    let netns = Netns::new();
    let pod = netns.sockets();
    let error = NetfilterSocket::from_fd(pod.route.into_fd()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "descriptor is not a NETLINK_NETFILTER socket: domain 16, protocol 0"
    );
    let file = std::fs::File::open("/proc/self/status").unwrap();
    assert!(
        NetfilterSocket::from_fd(file.into())
            .unwrap_err()
            .to_string()
            .contains("not a NETLINK_NETFILTER socket")
    );
}

#[test]
fn sockets_know_their_namespace() {
    let (one, other) = (Netns::new(), Netns::new());
    let (pod, stranger) = (one.sockets(), other.sockets());
    assert_eq!(pod.netfilter.cookie().unwrap(), pod.route.cookie().unwrap());
    assert_ne!(
        pod.netfilter.cookie().unwrap(),
        stranger.netfilter.cookie().unwrap()
    );
    let inode = |fd: std::os::fd::OwnedFd| {
        use std::os::unix::fs::MetadataExt as _;
        std::fs::File::from(fd).metadata().unwrap().ino()
    };
    let by_socket = inode(pod.netfilter.netns_fd().unwrap());
    assert_eq!(
        by_socket.to_string(),
        one.sh("stat -L -c %i /proc/self/ns/net").trim()
    );
    assert_ne!(by_socket, inode(stranger.route.netns_fd().unwrap()));
}

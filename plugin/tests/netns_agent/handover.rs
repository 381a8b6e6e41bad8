//! What reaches the executor: descriptors of the right kind, in the right namespace, in order, and the facts.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;

use nix::sys::socket::{NetlinkAddr, bind};
use rustix::net::sockopt;

use crate::executor::Behaviour;
use crate::{PodNetns, add, node};

const AF_INET: i32 = 2;
const AF_INET6: i32 = 10;
const AF_NETLINK: i32 = 16;
const NETLINK_ROUTE: u32 = 0;
const NETLINK_NETFILTER: u32 = 12;

/// Address family and, for netlink, protocol.
fn kind(socket: &impl AsFd) -> (i32, u32) {
    let domain = i32::from(sockopt::socket_domain(socket).unwrap().as_raw());
    let protocol = sockopt::socket_protocol(socket)
        .unwrap()
        .map_or(0, |protocol| protocol.as_raw().get());
    (domain, if domain == AF_NETLINK { protocol } else { 0 })
}

/// Whether the kernel lists this netlink socket in this namespace (`/proc/net/netlink`; only bound ones are listed).
fn is_listed_in(netns: &PodNetns, socket: BorrowedFd<'_>) -> bool {
    bind(socket.as_raw_fd(), &NetlinkAddr::new(0, 0)).unwrap();
    let link = std::fs::read_link(format!("/proc/self/fd/{}", socket.as_raw_fd())).unwrap();
    let link = link.to_string_lossy();
    let inode = link.trim_start_matches("socket:[").trim_end_matches(']');
    let table = netns.exec(&["cat", "/proc/net/netlink"]);
    table
        .lines()
        .any(|line| line.split_whitespace().last() == Some(inode))
}

#[test]
fn the_executor_gets_the_namespace_and_its_sockets_in_order() {
    let (run_dir, executor, netns) = node(Behaviour::Well);
    assert_eq!(add(run_dir.path(), &netns).go().status, 0);
    let calls = executor.calls();
    let descriptors = &calls.add[0].descriptors;
    let sockets: Vec<_> = descriptors[1..].iter().map(kind).collect();
    assert_eq!(
        sockets,
        [
            (AF_NETLINK, NETLINK_NETFILTER),
            (AF_NETLINK, NETLINK_ROUTE),
            (AF_NETLINK, NETLINK_ROUTE)
        ]
    );
    let handed_over = nix::sys::stat::fstat(&descriptors[0]).unwrap();
    let expected = std::fs::metadata(netns.path()).unwrap();
    assert_eq!(
        (handed_over.st_dev, handed_over.st_ino),
        (expected.dev(), expected.ino())
    );
    for socket in &descriptors[1..] {
        assert!(is_listed_in(&netns, socket.as_fd()), "{socket:?}");
    }
}

#[test]
fn legacy_tables_of_a_family_bring_a_datagram_socket_of_that_family() {
    for (program, family) in [("iptables-legacy", AF_INET), ("ip6tables-legacy", AF_INET6)] {
        let (run_dir, executor, netns) = node(Behaviour::Well);
        netns.exec(&[program, "-t", "mangle", "-A", "OUTPUT", "-j", "ACCEPT"]);
        assert_eq!(add(run_dir.path(), &netns).go().status, 0);
        let calls = executor.calls();
        let descriptors = &calls.add[0].descriptors;
        assert_eq!(descriptors.len(), 5, "{program}");
        assert_eq!(kind(&descriptors[4]), (family, 0), "{program}");
        let datagram = sockopt::socket_type(&descriptors[4]).unwrap();
        assert_eq!(datagram, rustix::net::SocketType::DGRAM);
    }
}

#[test]
fn the_request_carries_what_the_runtime_gave_and_how_long_is_left() {
    let (run_dir, executor, netns) = node(Behaviour::Well);
    assert_eq!(add(run_dir.path(), &netns).go().status, 0);
    let calls = executor.calls();
    let seen = &calls.add[0];
    let pod = seen.message.pod.as_ref().unwrap();
    assert_eq!(
        (&*pod.namespace, &*pod.name, &*pod.uid),
        ("team-a", "web-0", "11111111-2222-3333-4444-555555555555")
    );
    let attachment = seen.message.attachment.as_ref().unwrap();
    assert_eq!(
        (&*attachment.container_id, &*attachment.ifname),
        ("c0ffee", "eth0")
    );
    assert_eq!(seen.message.netns_path, netns.path());
    assert_eq!(seen.message.addresses, ["10.1.2.3", "fd00::3"]);
    assert_eq!(seen.message.config_hash.len(), 16);
    let microseconds: u64 = seen.timeout.trim_end_matches('u').parse().expect("microseconds");
    assert!(
        (8_000_000..10_000_000).contains(&microseconds),
        "{}",
        seen.timeout
    );
}

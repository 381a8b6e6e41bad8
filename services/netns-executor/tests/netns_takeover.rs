//! Rules of Istio's own agent, in each of their three forms, make way for ours. Needs root.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on ends")]

#[path = "support/netns.rs"]
mod support;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use sluice_netns_executor::netlink::apply;
use sluice_netns_executor::takeover::{self, Findings, LegacySockets, Scope};
use sluice_proto::ambient::{AmbientOptions, Desired};
use sluice_testkit::incumbent::{NFT_RULES, iptables_rules};
use support::Netns;

const PROBE_V6: &str = "fd16:9254:7127:1337:ffff:ffff:ffff:ffff";

fn legacy_sockets(netns: &Netns) -> LegacySockets {
    let families = [AddressFamily::Inet, AddressFamily::Inet6];
    let sockets: Vec<OwnedFd> = netns.run(|| {
        families
            .map(|family| socket(family, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None).unwrap())
            .into()
    });
    LegacySockets::from_fds(sockets).unwrap()
}

fn program_iptables(netns: &Netns, variant: &str) {
    netns.sh_with(
        &format!("iptables-{variant}-restore --noflush"),
        &iptables_rules("169.254.7.127", "127.0.0.1/32"),
    );
    netns.sh_with(
        &format!("ip6tables-{variant}-restore --noflush"),
        &iptables_rules(PROBE_V6, "::1/128"),
    );
}

/// Rules of somebody else in every table, before and after where Istio's jumps will be, with counters that count.
fn program_foreign(netns: &Netns, variant: &str) {
    for tool in ["iptables", "ip6tables"] {
        for table in ["nat", "mangle", "raw", "filter"] {
            netns.sh(&format!(
                "t='{tool}-{variant} -t {table}'; $t -N OTHERS && $t -A OTHERS -p tcp --dport 7 -m comment --comment 'keep me' \
                 && $t -A OUTPUT -j OTHERS && $t -A OUTPUT -o lo -p udp -m multiport --dports 9,11 -m mark ! --mark 0x5 \
                 && $t -A OTHERS -m conntrack --ctstate ESTABLISHED -j RETURN"
            ));
        }
    }
    count_packets(netns);
}

/// One packet for each family, through the chains of output and input.
fn count_packets(netns: &Netns) {
    netns.run(|| {
        for loopback in ["127.0.0.1:0", "[::1]:0"] {
            let socket = UdpSocket::bind(loopback).unwrap();
            assert_eq!(
                socket.send_to(b"counted", socket.local_addr().unwrap()).unwrap(),
                7
            );
        }
    });
}

fn saved(netns: &Netns, variant: &str) -> String {
    netns.sh(&format!(
        "iptables-{variant}-save -c | sed '/^#/d'; ip6tables-{variant}-save -c | sed '/^#/d'"
    ))
}

fn remove(netns: &Netns, legacy: &LegacySockets, scope: Scope) -> Findings {
    takeover::remove(&netns.sockets().netfilter, legacy, scope).unwrap()
}

#[test]
fn nothing_is_found_in_a_fresh_namespace_and_looking_changes_nothing() {
    let netns = Netns::new();
    let before = netns.state();
    let sockets = netns.sockets();
    for scope in [Scope::Pod, Scope::Host] {
        let none = LegacySockets::default();
        assert_eq!(
            takeover::find(&sockets.netfilter, &none, scope).unwrap(),
            Findings::default()
        );
        assert_eq!(
            takeover::remove(&sockets.netfilter, &none, scope).unwrap(),
            Findings::default()
        );
    }
    assert_eq!(netns.state(), before);
    assert_eq!(
        netns.sh("cat /proc/net/ip_tables_names /proc/net/ip6_tables_names"),
        ""
    );
}

#[test]
fn native_nft_tables_go_and_tables_of_others_stay() {
    let netns = Netns::new();
    netns.sh_with(
        "nft -f -",
        "table inet others { chain c { type filter hook output priority 0; counter accept; }; }\n\
         table inet istio-ambient-others { }",
    );
    let before = netns.state();
    netns.sh_with("nft -f -", NFT_RULES);
    let none = LegacySockets::default();
    let found = takeover::find(&netns.sockets().netfilter, &none, Scope::Pod).unwrap();
    assert_eq!(found.istio.len(), 3, "{found:?}");
    assert_eq!(remove(&netns, &none, Scope::Pod), found);
    assert_eq!(netns.state(), before);
    assert!(remove(&netns, &none, Scope::Pod).is_empty());
}

#[test]
fn iptables_nft_chains_go_and_leave_an_empty_namespace() {
    let netns = Netns::new();
    let before = netns.state();
    program_iptables(&netns, "nft");
    assert_ne!(netns.state(), before);
    let removed = remove(&netns, &LegacySockets::default(), Scope::Pod);
    assert_eq!(
        removed.istio.len(),
        24,
        "six chains and six jumps for each family: {removed:?}"
    );
    assert_eq!(netns.state(), before);
}

#[test]
fn iptables_nft_rules_of_others_stay_as_they_were() {
    let netns = Netns::new();
    program_foreign(&netns, "nft");
    let before = (saved(&netns, "nft"), netns.state());
    assert!(before.0.contains("[1:35] -A OUTPUT -j OTHERS"), "{}", before.0);
    program_iptables(&netns, "nft");
    netns.sh("iptables-nft -t nat -A OTHERS -j ISTIO_OUTPUT");
    remove(&netns, &LegacySockets::default(), Scope::Pod);
    assert_eq!((saved(&netns, "nft"), netns.state()), before);
}

#[test]
fn legacy_rules_of_others_stay_with_their_counters() {
    let netns = Netns::new();
    program_foreign(&netns, "legacy");
    let before = saved(&netns, "legacy");
    assert!(
        before.contains("-A OTHERS -p tcp -m tcp --dport 7 -m comment --comment \"keep me\""),
        "{before}"
    );
    assert!(before.contains("[1:35] -A OUTPUT -j OTHERS"), "{before}");
    program_iptables(&netns, "legacy");
    netns.sh("iptables-legacy -t nat -I OTHERS -p tcp -g ISTIO_OUTPUT; ip6tables-legacy -t raw -A OTHERS -j ISTIO_PRERT");
    // iptables-restore resets the counters of policies: packets from here on must stay counted.
    count_packets(&netns);
    let with_istio = saved(&netns, "legacy");
    let others: Vec<_> = with_istio
        .split_inclusive('\n')
        .filter(|line| !line.contains("ISTIO_"))
        .collect();
    let others = others.concat();
    let legacy = legacy_sockets(&netns);
    let found = takeover::find(&netns.sockets().netfilter, &legacy, Scope::Pod).unwrap();
    assert_eq!(found.istio.len(), 12, "{found:?}");
    assert_eq!(remove(&netns, &legacy, Scope::Pod), found);
    assert_eq!(saved(&netns, "legacy"), others);
    assert!(
        others.contains(":POSTROUTING ACCEPT [1:35]") && others.contains("[2:110] -A OUTPUT -j OTHERS"),
        "{others}"
    );
    let rule = |line: &str| line.rsplit_once(']').map(|(_, rule)| rule.to_owned());
    assert!(others.lines().map(rule).eq(before.lines().map(rule)));
    assert!(remove(&netns, &legacy, Scope::Pod).is_empty());
    // The tables can still be changed by the tools they belong to.
    netns.sh("iptables-legacy -t nat -A OTHERS -p tcp -j ACCEPT; iptables-legacy -t nat -D OTHERS -p tcp -j ACCEPT");
    // Without counters: the tool itself begins those of the policies anew.
    assert!(
        saved(&netns, "legacy")
            .lines()
            .map(rule)
            .eq(others.lines().map(rule))
    );
}

#[test]
fn legacy_tables_with_nothing_of_istio_are_left_alone() {
    let netns = Netns::new();
    netns.sh("iptables-legacy -t nat -A OUTPUT -p tcp --dport 7 -j ACCEPT");
    let before = saved(&netns, "legacy");
    assert!(remove(&netns, &legacy_sockets(&netns), Scope::Pod).is_empty());
    assert_eq!(
        saved(&netns, "legacy")
            .lines()
            .filter(|line| line.contains("-A "))
            .count(),
        1
    );
    assert!(saved(&netns, "legacy").contains(before.trim_end()));
}

/// The host's chain and sets as Istio's agent leaves them.
fn program_host(netns: &Netns, variant: &str, jump: bool, foreign: bool) {
    for (tool, set, family, probe) in [
        ("iptables", "istio-inpod-probes-v4", "inet", "169.254.7.127"),
        ("ip6tables", "istio-inpod-probes-v6", "inet6", PROBE_V6),
    ] {
        netns.sh(&format!("ipset create {set} hash:ip family {family} comment"));
        let t = format!("{tool}-{variant} -t nat");
        netns.sh(&format!(
            "{t} -N ISTIO_POSTRT; {t} -A ISTIO_POSTRT -m owner --socket-exists -p tcp -m set --match-set {set} dst \
             -j SNAT --to-source {probe}"
        ));
        if jump {
            netns.sh(&format!("{t} -I POSTROUTING 1 -j ISTIO_POSTRT"));
        }
        if foreign {
            netns.sh(&format!(
                "{t} -I ISTIO_POSTRT -p udp --dport 4789 -j RETURN; {t} -A ISTIO_POSTRT -p sctp -j ACCEPT"
            ));
        }
    }
}

#[test]
fn the_hosts_stale_chain_goes_whatever_state_it_is_in() {
    for variant in ["nft", "legacy"] {
        for jump in [true, false] {
            let netns = Netns::new();
            netns.sh(&format!(
                "for t in iptables ip6tables; do $t-{variant} -t nat -A POSTROUTING -p icmp -j ACCEPT; done"
            ));
            let before = saved(&netns, variant);
            program_host(&netns, variant, jump, false);
            netns.sh_with(
                "nft -f -",
                "table inet istio-ambient-nat { set s { type ipv4_addr; }; }",
            );
            let legacy = legacy_sockets_of(&netns, variant);
            let found = takeover::find(&netns.sockets().netfilter, &legacy, Scope::Host).unwrap();
            assert_eq!(
                remove(&netns, &legacy, Scope::Host),
                found,
                "{variant}, jump: {jump}"
            );
            assert_eq!(saved(&netns, variant), before);
            assert_eq!(netns.sh("ipset list -n; nft list tables inet"), "");
        }
    }
}

#[test]
fn rules_that_others_put_into_the_hosts_chain_stay_and_are_told() {
    for variant in ["nft", "legacy"] {
        let netns = Netns::new();
        program_host(&netns, variant, true, true);
        let findings = remove(&netns, &legacy_sockets_of(&netns, variant), Scope::Host);
        assert_eq!(findings.foreign.len(), 2, "{variant}: {findings:?}");
        let after = saved(&netns, variant);
        assert!(!after.contains("SNAT"), "{after}");
        for line in [
            "-A POSTROUTING -j ISTIO_POSTRT",
            "-A ISTIO_POSTRT -p sctp -j ACCEPT",
            "--dport 4789 -j RETURN",
        ] {
            assert_eq!(after.matches(line).count(), 2, "{line} in\n{after}");
        }
        assert_eq!(netns.sh("ipset list -n"), "");
    }
}

fn legacy_sockets_of(netns: &Netns, variant: &str) -> LegacySockets {
    if variant == "legacy" {
        legacy_sockets(netns)
    } else {
        LegacySockets::default()
    }
}

#[test]
fn a_pod_is_taken_over_without_losing_a_connection() {
    for form in ["native", "nft", "legacy"] {
        let netns = Netns::new();
        netns.sh("ip link add d0 type veth peer name d1; ip link set d0 up; ip link set d1 up; ip addr add 192.0.2.1/24 dev d0");
        match form {
            "native" => drop(netns.sh_with("nft -f -", NFT_RULES)),
            variant => program_iptables(&netns, variant),
        }
        let (stop, served) = (AtomicBool::new(false), AtomicU32::new(0));
        let listener = netns.run(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 15001)).unwrap());
        let remote = SocketAddr::from((Ipv4Addr::new(192, 0, 2, 9), 80));
        std::thread::scope(|scope| {
            scope.spawn(|| serve_echo(scope, &listener, &stop));
            let mut kept = netns.run(|| dial(remote));
            let client = scope.spawn(|| {
                netns.run(|| {
                    while !stop.load(Ordering::Relaxed) {
                        echo(&mut dial(remote));
                        served.fetch_add(1, Ordering::Relaxed);
                    }
                });
            });
            let progress = |more: u32| {
                let until = served.load(Ordering::Relaxed) + more;
                while served.load(Ordering::Relaxed) < until && !client.is_finished() {
                    std::thread::yield_now();
                }
            };
            progress(100);
            let sockets = netns.sockets();
            let desired = Desired::Ambient(AmbientOptions::default());
            apply(&sockets, &desired).unwrap();
            progress(20);
            let removed = remove(&netns, &legacy_sockets_of(&netns, form), Scope::Pod);
            progress(100);
            echo(&mut kept);
            assert!(!removed.is_empty());
            assert!(!client.is_finished(), "{form}: a connection failed");
            stop.store(true, Ordering::Relaxed);
            client.join().unwrap();
            let _ = netns.run(|| TcpStream::connect((Ipv4Addr::LOCALHOST, 15001)));
        });
        let rules = netns.sh("nft list ruleset; iptables-legacy-save; ip6tables-legacy-save");
        assert!(
            rules.contains("table inet sluice") && !rules.contains("istio") && !rules.contains("ISTIO"),
            "{rules}"
        );
    }
}

fn serve_echo<'scope>(
    scope: &'scope std::thread::Scope<'scope, '_>,
    listener: &TcpListener,
    stop: &AtomicBool,
) {
    while !stop.load(Ordering::Relaxed) {
        let (mut stream, _) = listener.accept().unwrap();
        scope.spawn(move || {
            let mut byte = [0];
            while stream.read(&mut byte).is_ok_and(|length| length == 1) && stream.write_all(&byte).is_ok() {}
        });
    }
}

fn dial(remote: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(&remote, Duration::from_secs(3)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
    stream
}

fn echo(stream: &mut TcpStream) {
    stream.write_all(b"x").unwrap();
    stream.read_exact(&mut [0]).unwrap();
}

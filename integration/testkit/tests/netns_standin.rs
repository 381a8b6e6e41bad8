//! The stand-in relays, through the rules that Istio's own agent would have made, fed to nft by hand. Needs root.
#![expect(clippy::unwrap_used, reason = "a step that fails is the test's failure")]

#[path = "support/agent.rs"]
mod agent;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use prost::Message;
use sluice_proto::pb::zds::workload_request::Payload;
use sluice_proto::pb::zds::{KeepWorkload, WorkloadResponse};
use sluice_testkit::incumbent::{self, Iptables};
use sluice_testkit::node::Node;
use sluice_testkit::pod::Pod;
use sluice_testkit::process::{self, Process, Spawn};
use sluice_testkit::standin::{self, Behaviour, Control};
use sluice_testkit::traffic::client::{Load, LoadOptions, datagram, fetch};
use sluice_testkit::traffic::dns;
use sluice_testkit::traffic::server::EchoServer;

use crate::agent::{Agent, add};

const SOON: Duration = Duration::from_secs(3);

struct Rig {
    node: Node,
    agent: Agent,
    control: Control,
    proxy: Process,
}

impl Rig {
    /// A node with a connected stand-in whose snapshot holds `pods`.
    fn start(node: Node, args: &[&str], pods: &[&Pod]) -> Self {
        let mut agent = Agent::listen(&node);
        let (zds, control) = (node.dir().join("zds.sock"), node.dir().join("control.sock"));
        let proxy = Spawn::binary("standin-proxy")
            .unwrap()
            .args([
                "--zds".as_ref(),
                zds.as_os_str(),
                "--control".as_ref(),
                control.as_os_str(),
            ])
            .args(args)
            .place(node.place_with(&sluice_testkit::netns::Netns::new().unwrap()))
            .log(node.dir().join("proxy.log"))
            .start()
            .unwrap();
        agent.accept();
        for pod in pods {
            assert_eq!(agent.add(pod), "");
        }
        assert_eq!(agent.snapshot_sent(), "");
        let control = Control::new(control);
        proxy
            .wait_ready(SOON, || control.counts().is_ok_and(|report| report.ready))
            .unwrap();
        Self {
            node,
            agent,
            control,
            proxy,
        }
    }
}

fn redirect(pod: &Pod) {
    incumbent::program_nft(pod.netns()).unwrap();
}

fn at(ip: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(ip, port)
}

#[test]
fn outbound_connection_reaches_its_original_destination_through_the_proxy() {
    let node = Node::new().unwrap();
    let client = node.pod("client").dual_stack().create().unwrap();
    let server = node.pod("server").dual_stack().create().unwrap();
    let app = EchoServer::start(server.netns(), 8080).unwrap();
    redirect(&client);
    let rig = Rig::start(node, &[], &[&client]);
    for ipv6 in [false, true] {
        let target = at(server.address(ipv6), app.port());
        let seen = fetch(client.netns(), target, SOON).unwrap();
        assert_eq!((seen.peer.ip(), seen.local), (client.address(ipv6), target));
    }
    let counts = rig.control.counts().unwrap().workloads[client.uid()].counts;
    assert_eq!((counts.outbound, counts.inbound, counts.failed), (2, 0, 0));
}

#[test]
fn application_sees_the_client_address_of_a_captured_inbound_connection() {
    let node = Node::new().unwrap();
    let server = node.pod("server").dual_stack().create().unwrap();
    let client = node.pod("client").dual_stack().create().unwrap();
    let app = EchoServer::start(server.netns(), 8080).unwrap();
    redirect(&server);
    let rig = Rig::start(node, &[], &[&server]);
    for ipv6 in [false, true] {
        let target = at(server.address(ipv6), app.port());
        let seen = fetch(client.netns(), target, SOON).unwrap();
        assert_eq!((seen.peer.ip(), seen.local), (client.address(ipv6), target));
        // UDP is not the proxy's business.
        assert_eq!(
            datagram(client.netns(), target, SOON).unwrap().ip(),
            client.address(ipv6)
        );
    }
    let counts = rig.control.counts().unwrap().workloads[server.uid()].counts;
    assert_eq!((counts.outbound, counts.inbound, counts.failed), (0, 2, 0));
}

#[test]
fn dns_queries_are_answered_by_the_proxy() {
    let node = Node::new().unwrap();
    let pod = node.pod("resolver").dual_stack().create().unwrap();
    redirect(&pod);
    let rig = Rig::start(node, &[], &[&pod]);
    for (ipv6, tcp) in [(false, false), (false, true), (true, false), (true, true)] {
        // Nothing listens there: only a captured query is answered.
        let server = at(
            if ipv6 {
                "fd00:10:244::fe".parse().unwrap()
            } else {
                Ipv4Addr::new(10, 244, 0, 254).into()
            },
            53,
        );
        let answer = dns::query(pod.netns(), server, "app.example", ipv6, tcp, SOON).unwrap();
        let marker: IpAddr = if ipv6 {
            standin::DNS_MARKER_V6.into()
        } else {
            standin::DNS_MARKER_V4.into()
        };
        assert_eq!(answer, [marker], "IPv6 {ipv6}, TCP {tcp}");
    }
    let counts = rig.control.counts().unwrap().workloads[pod.uid()].counts;
    assert_eq!((counts.dns_udp, counts.dns_tcp), (2, 2));
}

#[test]
fn connection_between_two_held_pods_goes_through_the_tunnel_port() {
    let node = Node::new().unwrap();
    let client = node.pod("client").dual_stack().create().unwrap();
    let server = node.pod("server").dual_stack().create().unwrap();
    let app = EchoServer::start(server.netns(), 8080).unwrap();
    redirect(&client);
    redirect(&server);
    let rig = Rig::start(node, &["--tunnel"], &[&client, &server]);
    for ipv6 in [false, true] {
        let seen = fetch(client.netns(), at(server.address(ipv6), app.port()), SOON).unwrap();
        assert_eq!(seen.peer.ip(), client.address(ipv6));
    }
    let report = rig.control.counts().unwrap();
    assert_eq!(report.workloads[client.uid()].counts.outbound, 2);
    let counts = report.workloads[server.uid()].counts;
    assert_eq!((counts.tunnel, counts.inbound), (2, 0));
}

#[test]
fn deleted_pod_is_let_go_at_once_and_steady_load_shows_the_gap() {
    let node = Node::new().unwrap();
    let server = node.pod("server").create().unwrap();
    let client = node.pod("client").create().unwrap();
    let app = EchoServer::start(server.netns(), 8080).unwrap();
    redirect(&server);
    let rig = Rig::start(node, &[], &[&server]);
    let load = Load::start(client.netns(), LoadOptions::new(at(server.ip(), app.port()))).unwrap();
    load.wait_answered(100, SOON).unwrap();
    load.report().nothing_failed().unwrap();
    assert_eq!(rig.agent.del(&server), "");
    sluice_testkit::wait::poll_true("new and kept requests fail", SOON, || {
        let failures = load.report().failures;
        failures.iter().any(|f| f.kept) && failures.iter().any(|f| !f.kept)
    })
    .unwrap();
    assert_eq!(rig.agent.add(&server), "");
    load.wait_answered(300, Duration::from_secs(10)).unwrap();
    let report = load.stop();
    assert_eq!(report.seen_as.keys().copied().collect::<Vec<_>>(), [client.ip()]);
    assert!(report.kept_answered > 0 && report.new_answered > 0);
}

#[test]
fn misbehaviour_is_done_as_told_and_reported() {
    let node = Node::new().unwrap();
    let pods: Vec<Pod> = (0..6)
        .map(|i| node.pod(&format!("p{i}")).create().unwrap())
        .collect();
    let mut rig = Rig::start(node, &["--no-listeners"], &[&pods[0]]);
    let behaviour = Behaviour::default()
        .nack(pods[1].uid(), "no")
        .garbage("default/p2")
        .twice(&format!("add:{}", pods[3].uid()))
        .delay_ms(pods[4].uid(), 50)
        .close(pods[5].uid());
    rig.control.behave(behaviour).unwrap();
    assert_eq!(rig.agent.add(&pods[1]), "no");
    assert_eq!(
        rig.control.counts().unwrap().pending.keys().collect::<Vec<_>>(),
        [pods[1].uid()]
    );
    assert_eq!(
        rig.agent.del(&pods[1]),
        "no",
        "the key is the UID, whatever the kind"
    );
    rig.agent.send(add(&pods[2]), Some(&pods[2]));
    assert!(WorkloadResponse::decode(&rig.agent.answer()[..]).is_err());
    assert_eq!(rig.agent.add(&pods[3]), "");
    assert_eq!(rig.agent.answer(), [0x0a, 0x00], "the surplus answer");
    assert_eq!(rig.agent.add(&pods[4]), "");
    rig.agent.send(add(&pods[5]), Some(&pods[5]));
    assert_eq!(rig.agent.answer(), [0u8; 0], "closed");
    rig.agent.accept();
    assert_eq!(
        rig.agent.ask(
            Payload::Keep(KeepWorkload {
                uid: pods[0].uid().into()
            }),
            None
        ),
        ""
    );
    assert_eq!(rig.agent.snapshot_sent(), "");
    let report = rig.control.report().unwrap();
    let told: Vec<_> = report
        .messages
        .iter()
        .map(|m| (m.connection, m.kind.as_str(), m.answer.as_str()))
        .collect();
    let expected = [
        (1, "add", "ack"),
        (1, "snapshot_sent", "ack"),
        (1, "add", "nack: no"),
        (1, "del", "nack: no"),
        (1, "add", "garbage"),
        (1, "add", "twice"),
        (1, "add", "ack"),
        (1, "add", "none"),
        (2, "keep", "ack"),
        (2, "snapshot_sent", "ack"),
    ];
    assert_eq!(told, expected);
    assert_eq!(report.messages[0].netns_inode, Some(pods[0].netns().inode()));
    assert_eq!(
        report.workloads.keys().collect::<Vec<_>>(),
        [pods[0].uid()],
        "what the snapshot did not name is gone"
    );
}

#[test]
fn silent_standin_answers_again_when_told_to() {
    let node = Node::new().unwrap();
    let (a, b) = (node.pod("a").create().unwrap(), node.pod("b").create().unwrap());
    let rig = Rig::start(node, &["--no-listeners"], &[]);
    rig.control.behave(Behaviour::default().silent(a.uid())).unwrap();
    rig.agent.send(add(&a), Some(&a));
    rig.agent.send(add(&b), Some(&b));
    let early = nix::sys::socket::recv(
        std::os::fd::AsRawFd::as_raw_fd(rig.agent.connection.as_ref().unwrap()),
        &mut [0; 16],
        nix::sys::socket::MsgFlags::MSG_DONTWAIT,
    );
    assert_eq!(early, Err(nix::errno::Errno::EAGAIN));
    rig.control.behave(Behaviour::default()).unwrap();
    assert_eq!(
        (rig.agent.answer(), rig.agent.answer()),
        (vec![0x0a, 0], vec![0x0a, 0])
    );
}

#[test]
fn many_pods_need_few_threads() {
    let node = Node::new().unwrap();
    let pods: Vec<Pod> = (0..60)
        .map(|i| node.pod(&format!("p{i}")).create().unwrap())
        .collect();
    let rig = Rig::start(node, &[], &pods.iter().collect::<Vec<_>>());
    let status = rig.proxy.status().unwrap();
    assert!(status.threads() <= 8, "{} threads", status.threads());
    let own: std::collections::BTreeSet<_> = status.thread_netns().unwrap().into_values().collect();
    assert_eq!(own.len(), 1, "no thread stays in a pod");
    assert!(
        rig.control
            .counts()
            .unwrap()
            .workloads
            .values()
            .all(|w| w.listening)
    );
    assert!(rig.proxy.terminate(SOON).unwrap().success());
    let _ = &rig.node;
}

#[test]
fn iptables_rules_of_the_incumbent_bring_traffic_too() {
    let node = Node::new().unwrap();
    let nft = node.pod("nft").dual_stack().create().unwrap();
    let legacy = node.pod("legacy").dual_stack().create().unwrap();
    incumbent::program_iptables(nft.netns(), Iptables::Nft, true).unwrap();
    incumbent::program_iptables(legacy.netns(), Iptables::Legacy, true).unwrap();
    let app = EchoServer::start(legacy.netns(), 8080).unwrap();
    let rig = Rig::start(node, &[], &[&nft, &legacy]);
    for ipv6 in [false, true] {
        let seen = fetch(nft.netns(), at(legacy.address(ipv6), app.port()), SOON).unwrap();
        assert_eq!(seen.peer.ip(), nft.address(ipv6));
    }
    let report = rig.control.counts().unwrap();
    assert_eq!(report.workloads[nft.uid()].counts.outbound, 2);
    assert_eq!(report.workloads[legacy.uid()].counts.inbound, 2);
}

#[test]
fn nothing_keeps_a_deleted_pod_alive() {
    let node = Node::new().unwrap();
    let pod = node.pod("short").create().unwrap();
    let (uid, ifname) = (pod.uid().to_owned(), pod.host_ifname().to_owned());
    let rig = Rig::start(node, &[], &[&pod]);
    assert_eq!(rig.agent.del(&pod), "");
    assert!(!rig.control.counts().unwrap().workloads.contains_key(&uid));
    pod.delete().unwrap();
    sluice_testkit::wait::poll_true("veth is gone", SOON, || {
        !rig.node.interfaces().unwrap().contains(&ifname)
    })
    .unwrap();
}

#[test]
fn own_queries_of_the_proxy_are_not_captured_and_use_conntrack_zone_1() {
    let node = Node::new().unwrap();
    let pod = node.pod("resolver").create().unwrap();
    let upstream = node.pod("dns").create().unwrap();
    let answer = (Ipv4Addr::new(198, 51, 100, 7), "2001:db8::7".parse().unwrap());
    let server = dns::DnsServer::start(upstream.netns(), at(upstream.ip(), 53), answer.0, answer.1).unwrap();
    redirect(&pod);
    let rig = Rig::start(
        node,
        &["--dns-upstream", &at(upstream.ip(), 53).to_string()],
        &[&pod],
    );
    let nowhere = at(Ipv4Addr::new(10, 244, 0, 254).into(), 53);
    assert_eq!(
        dns::query(pod.netns(), nowhere, "app.example", false, false, SOON).unwrap(),
        [IpAddr::from(answer.0)]
    );
    assert_eq!(server.queries(), 1);
    assert_eq!(
        rig.control.counts().unwrap().workloads[pod.uid()].counts.dns_udp,
        1
    );
    let zone = process::text(&pod.netns().into(), "conntrack", &["-L", "-w", "1"], b"").unwrap();
    assert!(zone.contains(&format!("dst={} ", upstream.ip())), "{zone}");
}

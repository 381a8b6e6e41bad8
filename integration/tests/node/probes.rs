//! The host's probes reach enrolled pods from a source the pods know, whatever happens to the host's rules.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value;
use sluice_integration::manifests::PodOptions;
use sluice_integration::mesh::{Mesh, MeshOptions};
use sluice_integration::rule_monitor::RuleMonitor;
use sluice_integration::scene::{APP_PORT, PATIENCE, Scene, mesh_pod};
use sluice_integration::uds_http::get;
use sluice_proto::pb::workload::PodState;
use sluice_testkit::netns::{Netns, Place};
use sluice_testkit::node::Node;
use sluice_testkit::pod::Pod;
use sluice_testkit::process::{json, text};
use sluice_testkit::traffic::client::fetch;
use sluice_testkit::traffic::server::EchoServer;
use sluice_testkit::wait::{poll_true, poll_until};

/// The source addresses of probes, as Istio's agent uses them.
const PROBE_V4: &str = "169.254.7.127";
const PROBE_V6: &str = "fd16:9254:7127:1337:ffff:ffff:ffff:ffff";
/// What repairs of host rules are counted by, in alphabetical order.
const REASONS: [&str; 5] = [
    "addresses-missing",
    "leftovers",
    "rules-changed",
    "table-changed",
    "table-missing",
];
/// Host rules are back by then.
const BOUND: Duration = Duration::from_secs(5);

fn nft(netns: &Netns, command: &str) {
    let words: Vec<&str> = command.split(' ').collect();
    text(&Place::from(netns), "nft", &words, b"").unwrap();
}

/// Whether an address is an element of any set in the host's netns.
fn in_probe_set(netns: &Netns, address: IpAddr) -> bool {
    let sets = json(&Place::from(netns), "nft", &["-j", "list", "sets"]).unwrap();
    let holds = |set: &Value| {
        set["elem"]
            .as_array()
            .is_some_and(|all| all.iter().any(|e| e == &address.to_string()))
    };
    sets["nftables"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|object| object.get("set"))
        .any(holds)
}

/// A request from the host to the pod; gives the source address that the application saw.
fn probe(node: &Node, address: IpAddr) -> std::io::Result<IpAddr> {
    fetch(
        node.netns(),
        SocketAddr::new(address, APP_PORT),
        Duration::from_secs(3),
    )
    .map(|seen| seen.peer.ip())
}

fn probe_works(node: &Node, pod: &Pod) {
    for address in pod.addresses() {
        let expected: IpAddr = if address.is_ipv4() { PROBE_V4 } else { PROBE_V6 }
            .parse()
            .unwrap();
        let mut last = None;
        let outcome = poll_until("probe comes from the probe address", BOUND, || {
            last = Some(probe(node, *address));
            matches!(last, Some(Ok(seen)) if seen == expected).then_some(())
        });
        outcome.unwrap_or_else(|late| panic!("{late}: {last:?}"));
    }
}

#[test]
fn an_address_stays_in_the_probe_set_through_restarts_although_the_api_lists_none() {
    let scene = Scene::start().unwrap();
    let without = PodOptions {
        without_addresses: true,
        ..PodOptions::default()
    };
    scene.mesh.manifests.pod(&scene.server, &without).unwrap();
    let host = scene.mesh.node().netns().clone();
    assert!(in_probe_set(&host, scene.server.ip()));
    let monitor = RuleMonitor::start(&host, scene.mesh.node().dir(), "host").unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let (stopped, sampled, address) = (stop.clone(), host.clone(), scene.server.ip());
    let sampler = std::thread::spawn(move || {
        let mut missing = 0;
        let mut samples = 0;
        while !stopped.load(Ordering::Relaxed) {
            samples += 1;
            missing += u32::from(!in_probe_set(&sampled, address));
            std::thread::sleep(Duration::from_millis(10));
        }
        (samples, missing)
    });
    for _ in 0..5 {
        scene.mesh.executor.kill().unwrap();
        scene.mesh.broker.restart().unwrap();
        scene.mesh.executor.start_again().unwrap();
        scene.mesh.wait_serving().unwrap();
        scene
            .mesh
            .wait_state(&scene.server, PodState::Enrolled, PATIENCE)
            .unwrap();
    }
    stop.store(true, Ordering::Relaxed);
    let (samples, missing) = sampler.join().unwrap();
    assert!(
        samples > 10 && missing == 0,
        "missing in {missing} of {samples} samples"
    );
    // What samples cannot see either: nothing was removed in between.
    let heard = monitor.stop().unwrap();
    assert!(
        !heard
            .iter()
            .any(|line| line.contains("delete") || line.contains("flush")),
        "{heard:?}"
    );
    scene.mesh.del(&scene.server).unwrap().ok().unwrap();
    poll_true("the address leaves with the pod", BOUND, || {
        !in_probe_set(&host, scene.server.ip())
    })
    .unwrap();
}

/// How often host rules were repaired, by what was found.
fn repairs(mesh: &Mesh) -> BTreeMap<String, u64> {
    let text = get(&mesh.run.http_socket(), "/metrics").unwrap().body;
    let counter = |line: &str| {
        let (reason, value) = line
            .strip_prefix("host_rules_repaired_total{reason=\"")?
            .split_once("\"} ")?;
        Some((reason.to_owned(), value.parse().unwrap()))
    };
    text.lines().filter_map(counter).collect()
}

/// Chain and handle of a rule of ours, as nft names it.
fn first_rule(host: &Netns) -> String {
    let table = ["-j", "-a", "list", "table", "inet", "sluice-host"];
    let listed = json(&Place::from(host), "nft", &table).unwrap();
    let objects = listed["nftables"].as_array().unwrap();
    let rule = objects.iter().find_map(|object| object.get("rule")).unwrap();
    format!("{} handle {}", rule["chain"].as_str().unwrap(), rule["handle"])
}

#[test]
fn host_rules_that_others_change_are_back_within_five_seconds_and_counted_by_what_was_found() {
    let scene = Scene::start().unwrap();
    let host = scene.mesh.node().netns().clone();
    probe_works(scene.mesh.node(), &scene.server);
    let repaired = || repairs(&scene.mesh);
    assert!(repaired().keys().map(String::as_str).eq(REASONS));
    let our_table = || {
        text(
            &Place::from(&host),
            "nft",
            &["-s", "list", "table", "inet", "sluice-host"],
            b"",
        )
    };
    let before = our_table().unwrap();
    let delete_rule = format!("delete rule inet sluice-host {}", first_rule(&host));
    let damages = [
        ("rules-changed", delete_rule.as_str()),
        ("table-missing", "delete table inet sluice-host"),
        ("table-missing", "flush ruleset"),
        ("table-changed", "add chain inet sluice-host others"),
        ("table-changed", "add table inet sluice-host { flags dormant ; }"),
        ("addresses-missing", "flush set inet sluice-host probes-v4"),
    ];
    for (reason, damage) in damages {
        let mut expected = repaired();
        *expected.get_mut(reason).unwrap() += 1;
        nft(&host, damage);
        poll_true("host rules are back", BOUND, || {
            our_table().is_ok_and(|now| now == before)
        })
        .unwrap();
        probe_works(scene.mesh.node(), &scene.server);
        poll_true("the repair is counted", BOUND, || repaired() == expected)
            .unwrap_or_else(|late| panic!("{reason}: {late}: {:?}, expected {expected:?}", repaired()));
    }
}

#[test]
fn probes_keep_their_source_whatever_masquerades_pods_before_or_after_us() {
    for tool in ["iptables-legacy", "iptables-nft"] {
        let node = Node::new().unwrap();
        let masquerade = |netns: &Netns| {
            let rule = [
                "-t",
                "nat",
                "-I",
                "POSTROUTING",
                "1",
                "-d",
                "10.244.0.0/16",
                "-j",
                "MASQUERADE",
            ];
            text(&Place::from(netns), tool, &rule, b"").unwrap();
        };
        masquerade(node.netns());
        let mesh = Mesh::start_on(node, MeshOptions::default()).unwrap();
        mesh.manifests.namespace("default", "ambient").unwrap();
        let pod = mesh_pod(&mesh, "probed").unwrap();
        let _app = EchoServer::start(pod.netns(), APP_PORT).unwrap();
        probe_works(mesh.node(), &pod);
        masquerade(mesh.node().netns());
        probe_works(mesh.node(), &pod);
        let captured = mesh.control().counts().unwrap().workloads[pod.uid()]
            .counts
            .inbound;
        assert_eq!(captured, 0, "a probe went through the proxy");
    }
}

#[test]
fn probes_work_where_there_is_only_ipv6() {
    let mesh = Mesh::start().unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    let pod = mesh.node().pod("six").families(false, true).create().unwrap();
    mesh.manifests.pod(&pod, &PodOptions::default()).unwrap();
    mesh.add(&pod).unwrap().ok().unwrap();
    let _app = EchoServer::start(pod.netns(), APP_PORT).unwrap();
    probe_works(mesh.node(), &pod);
    assert_eq!(
        mesh.control().counts().unwrap().workloads[pod.uid()]
            .counts
            .inbound,
        0
    );
    // A policy that admits probes needs one address, and nothing else of the node's.
    let policy = format!(
        "table inet netpol {{ chain input {{ type filter hook input priority 0;
            ip6 saddr {PROBE_V6}/128 tcp dport {APP_PORT} accept; tcp dport {APP_PORT} drop; }}
        }}"
    );
    text(&Place::from(pod.netns()), "nft", &["-f", "-"], policy.as_bytes()).unwrap();
    probe_works(mesh.node(), &pod);
    let other = mesh.node().pod("other").families(false, true).create().unwrap();
    let target = SocketAddr::new(pod.ip(), APP_PORT);
    fetch(other.netns(), target, Duration::from_secs(3)).unwrap_err();
}

#[test]
fn an_address_that_another_pod_still_holds_goes_to_the_one_that_is_added() {
    let mesh = Mesh::start().unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    let old = mesh_pod(&mesh, "old").unwrap();
    // The runtime lost the old sandbox without a DEL, and the primary plugin gave its address away.
    let link = ["link", "set", old.host_ifname(), "down"];
    text(mesh.node().place(), "ip", &link, b"").unwrap();
    let new = mesh
        .node()
        .pod("new")
        .addresses(old.addresses())
        .create()
        .unwrap();
    mesh.manifests.pod(&new, &PodOptions::default()).unwrap();
    mesh.add(&new).unwrap().ok().unwrap();
    mesh.wait_state(&new, PodState::Enrolled, PATIENCE).unwrap();
    let log = mesh.executor.log_text();
    let told = log.lines().find(|line| line.contains("changed its owner"));
    let told = told.unwrap_or_else(|| panic!("{log}"));
    assert!(
        told.contains("WARN") && told.contains(old.uid()) && told.contains(new.uid()),
        "{told}"
    );
    let _app = EchoServer::start(new.netns(), APP_PORT).unwrap();
    probe_works(mesh.node(), &new);
    // A late DEL of the old one takes nothing from the new one.
    mesh.del(&old).unwrap().ok().unwrap();
    assert!(in_probe_set(mesh.node().netns(), new.ip()));
    probe_works(mesh.node(), &new);
    mesh.del(&new).unwrap().ok().unwrap();
    assert!(!in_probe_set(mesh.node().netns(), new.ip()));
}

#[test]
fn sets_and_chains_of_our_name_but_another_type_are_replaced() {
    let node = Node::new().unwrap();
    let left = "table inet sluice-host {
        set probes-v4 { type ipv4_addr . inet_service; flags interval; comment \"left\"; }
        set probes-v6 { type ether_addr; }
        chain postrouting { type filter hook postrouting priority 5; }
    }";
    text(&Place::from(node.netns()), "nft", &["-f", "-"], left.as_bytes()).unwrap();
    let mesh = Mesh::start_on(node, MeshOptions::default()).unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    let pod = mesh_pod(&mesh, "probed").unwrap();
    let _app = EchoServer::start(pod.netns(), APP_PORT).unwrap();
    probe_works(mesh.node(), &pod);
    let table = text(
        &Place::from(mesh.node().netns()),
        "nft",
        &["list", "table", "inet", "sluice-host"],
        b"",
    )
    .unwrap();
    assert!(
        !table.contains("left") && !table.contains("ether_addr"),
        "{table}"
    );
    assert!(
        !table.contains("comment"),
        "a comment is an extension that not every kernel has"
    );
}

#[test]
fn a_pod_added_before_any_proxy_is_whole_once_one_comes() {
    let mut mesh = Mesh::start_with(MeshOptions {
        without_proxy: true,
        ..MeshOptions::default()
    })
    .unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    let pod = mesh.node().pod("early").create().unwrap();
    mesh.manifests.pod(&pod, &PodOptions::default()).unwrap();
    let running = mesh.node().pod("running").namespace("other").create().unwrap();
    mesh.manifests.pod(&running, &PodOptions::default()).unwrap();
    mesh.add(&running).unwrap().ok().unwrap();
    mesh.manifests
        .pod(&running, &PodOptions::mode("ambient"))
        .unwrap();
    let outcome = std::thread::scope(|scope| {
        let chain = mesh.chain().unwrap();
        let pod = &pod;
        let adding = scope.spawn(move || chain.add(&pod.into(), Some(&pod.prev_result("1.0.0"))));
        mesh.wait_state(pod, PodState::Pending, PATIENCE).unwrap();
        mesh.start_proxy().unwrap();
        adding.join().unwrap()
    });
    outcome.unwrap().ok().unwrap();
    for pod in [&pod, &running] {
        mesh.wait_state(pod, PodState::Enrolled, PATIENCE).unwrap();
        assert!(in_probe_set(mesh.node().netns(), pod.ip()));
        assert!(mesh.control().counts().unwrap().workloads[pod.uid()].listening);
        let _app = EchoServer::start(pod.netns(), APP_PORT).unwrap();
        probe_works(mesh.node(), pod);
    }
}

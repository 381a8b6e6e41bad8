//! Pods that are unlike others, and tools that read what we wrote.

use std::net::SocketAddr;
use std::time::Duration;

use sluice_integration::adds::mesh_with;
use sluice_integration::kernel_state::NetnsState;
use sluice_integration::manifests::PodOptions;
use sluice_integration::mesh::{Mesh, MeshOptions};
use sluice_integration::scene::{APP_PORT, PATIENCE, mesh_pod};
use sluice_proto::pb::workload::PodState;
use sluice_testkit::netns::Place;
use sluice_testkit::pod::Pod;
use sluice_testkit::process::{json, text};
use sluice_testkit::traffic::client::fetch;
use sluice_testkit::traffic::server::EchoServer;

const ANSWER: Duration = Duration::from_secs(5);

fn start() -> Mesh {
    mesh_with(MeshOptions::default()).unwrap()
}

#[test]
fn common_tools_can_list_what_is_there() {
    let mesh = start();
    let options = PodOptions::default().annotation("istio.io/reroute-virtual-interfaces", "vif0,vif1");
    let pod = mesh.node().pod("web").dual_stack().create().unwrap();
    mesh.manifests.pod(&pod, &options).unwrap();
    mesh.add(&pod).unwrap().ok().unwrap();
    for (place, table) in [
        (Place::from(pod.netns()), "sluice"),
        (mesh.node().place().clone(), "sluice-host"),
    ] {
        let listing = text(&place, "nft", &["list", "ruleset"], b"").unwrap();
        assert!(listing.contains(table), "{listing}");
        assert!(json(&place, "nft", &["-j", "list", "ruleset"]).unwrap()["nftables"].is_array());
        text(&place, "nft", &["-a", "list", "table", "inet", table], b"").unwrap();
        for tool in ["iptables-nft-save", "ip6tables-nft-save", "iptables-nft"] {
            let args: &[&str] = if tool == "iptables-nft" {
                &["-L", "-n"]
            } else {
                &[]
            };
            text(&place, tool, args, b"").unwrap();
        }
        // What nft wrote it can read again: no expression that it shows only in part.
        text(&place, "nft", &["-c", "-f", "-"], listing.as_bytes()).unwrap();
    }
}

#[test]
fn a_pod_with_ipv6_switched_off_joins_the_mesh() {
    let mesh = start();
    let pod = mesh.node().pod("v4-only").disable_ipv6().create().unwrap();
    mesh.manifests.pod(&pod, &PodOptions::default()).unwrap();
    let before = NetnsState::of(pod.netns()).unwrap();
    mesh.add(&pod).unwrap().ok().unwrap();
    mesh.wait_state(&pod, PodState::Enrolled, PATIENCE).unwrap();
    assert_eq!(mesh.describe(&pod).unwrap().differences, Vec::<String>::new());
    let app = EchoServer::start(mesh.node().netns(), APP_PORT).unwrap();
    fetch(
        pod.netns(),
        SocketAddr::from(([10, 244, 0, 1], app.port())),
        ANSWER,
    )
    .unwrap();
    let counts = mesh.control().counts().unwrap().workloads[pod.uid()].counts;
    assert_eq!((counts.outbound, counts.failed), (1, 0));
    mesh.del(&pod).unwrap().ok().unwrap();
    assert_eq!(NetnsState::of(pod.netns()).unwrap(), before);
}

#[test]
fn a_pod_without_ipv6_loopback_address_joins_the_mesh() {
    let mesh = start();
    let pod = mesh.node().pod("no-v6-lo").create().unwrap();
    text(
        &pod.netns().into(),
        "ip",
        &["-6", "addr", "del", "::1/128", "dev", "lo"],
        b"",
    )
    .unwrap();
    mesh.manifests.pod(&pod, &PodOptions::default()).unwrap();
    mesh.add(&pod).unwrap().ok().unwrap();
    mesh.wait_state(&pod, PodState::Enrolled, PATIENCE).unwrap();
}

/// The pod's rules without what differs between pods: nothing but addresses would.
fn rules(pod: &Pod) -> String {
    text(&pod.netns().into(), "nft", &["-s", "list", "ruleset"], b"").unwrap()
}

#[test]
fn hostile_annotations_reach_no_rule_and_hurt_nobody() {
    let mesh = start();
    let reference = rules(&mesh_pod(&mesh, "reference").unwrap());
    let long = "x".repeat(5_000);
    let many = (0..10_000)
        .map(|i| format!("if{i}"))
        .collect::<Vec<_>>()
        .join(",");
    for (i, (key, value)) in [
        (
            "istio.io/reroute-virtual-interfaces",
            "eth0\" accept; flush ruleset; \"",
        ),
        (
            "istio.io/reroute-virtual-interfaces",
            "$(reboot),`id`,;drop,../../etc/passwd, ,\u{0}nul",
        ),
        ("istio.io/reroute-virtual-interfaces", long.as_str()),
        ("istio.io/reroute-virtual-interfaces", "sixteen-letters!"),
        ("istio.io/reroute-virtual-interfaces", "\u{202e}ifv,ünicode"),
        ("ambient.istio.io/bypass-inbound-capture", "true\naccept"),
        ("ambient.istio.io/bypass-inbound-capture", "yes"),
        ("ambient.istio.io/dns-capture", "-1"),
        ("ambient.istio.io/dns-capture", long.as_str()),
        ("ambient.istio.io/redirection", "enabled"),
    ]
    .into_iter()
    .enumerate()
    {
        let pod = mesh.node().pod(&format!("hostile-{i}")).create().unwrap();
        mesh.manifests
            .pod(&pod, &PodOptions::default().annotation(key, value))
            .unwrap();
        mesh.add(&pod).unwrap().ok().unwrap();
        mesh.wait_state(&pod, PodState::Enrolled, PATIENCE).unwrap();
        assert_eq!(rules(&pod), reference, "{key}: {value:.80}");
        mesh.del(&pod).unwrap().ok().unwrap();
    }
    // Valid, but far too many: the first few count.
    let pod = mesh.node().pod("many").create().unwrap();
    let options = PodOptions::default().annotation("istio.io/reroute-virtual-interfaces", &many);
    mesh.manifests.pod(&pod, &options).unwrap();
    mesh.add(&pod).unwrap().ok().unwrap();
    let named = rules(&pod).matches("iifname \"if").count();
    assert!((1..=64).contains(&named), "{named} rules: {}", rules(&pod));
    let warnings = mesh
        .broker
        .log_text()
        .lines()
        .filter(|line| line.contains("is ignored"))
        .count();
    assert!(warnings > 0, "{}", mesh.broker.log_text());
    assert!(mesh.broker.log_text().lines().all(|line| line.len() < 4_000));
}

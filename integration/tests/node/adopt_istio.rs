//! Taking a node over from Istio's agent: its rules give way to ours without a lost request.

use sluice_integration::manifests::PodOptions;
use sluice_integration::mesh::{Mesh, MeshOptions};
use sluice_integration::scene::{APP_PORT, PATIENCE, Scene, mesh_pod};
use sluice_proto::pb::workload::PodState;
use sluice_testkit::incumbent::{Iptables, program_iptables, program_nft};
use sluice_testkit::netns::{Netns, Place};
use sluice_testkit::node::Node;
use sluice_testkit::process::{output, text};
use sluice_testkit::traffic::client::{LoadOptions, fetch};
use sluice_testkit::traffic::server::EchoServer;
use sluice_testkit::wait::poll_true;

/// Everything that Istio could have left, whichever tool it used.
fn all_rules(netns: &Netns) -> String {
    let place = Place::from(netns);
    let mut all = text(&place, "nft", &["-s", "list", "ruleset"], b"").unwrap();
    for tool in [
        "iptables-legacy-save",
        "ip6tables-legacy-save",
        "iptables-nft-save",
        "ip6tables-nft-save",
    ] {
        all += &text(&place, tool, &[], b"").unwrap();
    }
    all
}

fn has_istio(netns: &Netns) -> bool {
    let rules = all_rules(netns);
    rules.contains("ISTIO_") || rules.contains("istio-")
}

type Program = fn(&Netns);

const VARIANTS: [(&str, Program); 3] = [
    ("nft", |netns| program_nft(netns).unwrap()),
    ("iptables-nft", |netns| {
        program_iptables(netns, Iptables::Nft, true).unwrap();
    }),
    ("iptables-legacy", |netns| {
        program_iptables(netns, Iptables::Legacy, true).unwrap();
    }),
];

#[test]
fn an_added_pod_with_istios_rules_has_only_ours_afterwards() {
    let mesh = Mesh::start().unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    let server = mesh_pod(&mesh, "server").unwrap();
    let app = EchoServer::start(server.netns(), APP_PORT).unwrap();
    for (name, program) in VARIANTS {
        let pod = mesh.node().pod(name).create().unwrap();
        program(pod.netns());
        assert!(has_istio(pod.netns()));
        mesh.manifests.pod(&pod, &PodOptions::default()).unwrap();
        mesh.add(&pod).unwrap().ok().unwrap();
        mesh.wait_state(&pod, PodState::Enrolled, PATIENCE).unwrap();
        assert!(!has_istio(pod.netns()), "{name}: {}", all_rules(pod.netns()));
        fetch(pod.netns(), (server.ip(), app.port()).into(), PATIENCE).unwrap();
        assert!(
            mesh.control().counts().unwrap().workloads[pod.uid()]
                .counts
                .outbound
                > 0
        );
    }
}

/// A node as it is while it is moved over: rules of Istio in the pods, a proxy that serves them, none of our state.
fn taken_over_without_loss(program: Program) {
    let scene = Scene::start().unwrap();
    for pod in [&scene.client, &scene.server] {
        pod.start_process().unwrap();
    }
    scene.mesh.executor.kill().unwrap();
    scene.mesh.broker.kill().unwrap();
    for pod in [&scene.client, &scene.server] {
        let place = Place::from(pod.netns());
        text(&place, "nft", &["delete", "table", "inet", "sluice"], b"").unwrap();
        for family in ["-4", "-6"] {
            output(&place, "ip", &[family, "rule", "del", "lookup", "100"], b"").unwrap();
            output(&place, "ip", &[family, "route", "flush", "table", "100"], b"").unwrap();
        }
        program(pod.netns());
    }
    std::fs::remove_dir_all(scene.mesh.run.sandboxes()).unwrap();
    let captured = || {
        scene.mesh.control().counts().unwrap().workloads[scene.client.uid()]
            .counts
            .outbound
    };
    let options = LoadOptions {
        kept: 5,
        ..scene.steady().only_new(100)
    };
    let load = scene.load(options).unwrap();
    assert!(captured() > 0, "Istio's rules do not redirect");
    scene.mesh.executor.start_again().unwrap();
    scene.mesh.broker.start_again().unwrap();
    scene.mesh.wait_serving().unwrap();
    scene.wait_enrolled().unwrap();
    for pod in [&scene.client, &scene.server] {
        poll_true("Istio's rules are gone", PATIENCE, || !has_istio(pod.netns())).unwrap();
    }
    let before = captured();
    load.wait_answered(50, PATIENCE).unwrap();
    assert!(captured() > before, "our rules do not redirect");
    let report = load.stop();
    report.nothing_failed().unwrap();
    // A gap would not fail a request: it would go around the proxy.
    let (made, captured) = (report.new_answered, captured());
    assert!(
        captured >= made,
        "of {made} new connections {captured} went through the proxy"
    );
}

#[test]
fn running_pods_with_istios_nftables_rules_are_taken_over_without_loss() {
    taken_over_without_loss(VARIANTS[0].1);
}

#[test]
fn running_pods_with_istios_iptables_nft_rules_are_taken_over_without_loss() {
    taken_over_without_loss(VARIANTS[1].1);
}

#[test]
fn running_pods_with_istios_iptables_legacy_rules_are_taken_over_without_loss() {
    taken_over_without_loss(VARIANTS[2].1);
}

/// Host leftovers of an earlier agent, as `iptables-restore` input.
const POSTRT: &str = "*nat\n:ISTIO_POSTRT - [0:0]\n-A ISTIO_POSTRT -m owner --socket-exists -p tcp -m set --match-set istio-inpod-probes-v4 dst -j SNAT --to-source 169.254.7.127\n";

fn host_with_leftovers(tool: &str, extra: &str) -> Node {
    let node = Node::new().unwrap();
    for (name, family) in [
        ("istio-inpod-probes-v4", "inet"),
        ("istio-inpod-probes-v6", "inet6"),
    ] {
        text(
            node.place(),
            "ipset",
            &["create", name, "hash:ip", "family", family, "comment"],
            b"",
        )
        .unwrap();
    }
    let input = format!("{POSTRT}{extra}COMMIT\n");
    text(
        node.place(),
        &format!("{tool}-restore"),
        &["--noflush"],
        input.as_bytes(),
    )
    .unwrap();
    node
}

#[test]
fn host_rules_of_an_earlier_agent_are_taken_over_and_those_of_others_stay() {
    for tool in ["iptables-legacy", "iptables-nft"] {
        for (extra, foreign) in [
            ("", false),
            ("-A POSTROUTING -j ISTIO_POSTRT\n", false),
            (
                "-A POSTROUTING -j ISTIO_POSTRT\n-A ISTIO_POSTRT -d 203.0.113.7/32 -j RETURN\n",
                true,
            ),
        ] {
            let mesh = Mesh::start_on(host_with_leftovers(tool, extra), MeshOptions::default()).unwrap();
            mesh.manifests.namespace("default", "ambient").unwrap();
            let pod = mesh_pod(&mesh, "probed").unwrap();
            let app = EchoServer::start(pod.netns(), APP_PORT).unwrap();
            let seen = fetch(mesh.node().netns(), (pod.ip(), app.port()).into(), PATIENCE).unwrap();
            assert_eq!(seen.peer.ip().to_string(), "169.254.7.127", "{tool} {extra:?}");
            let saved = || text(mesh.node().place(), &format!("{tool}-save"), &["-t", "nat"], b"").unwrap();
            if foreign {
                assert!(
                    saved().contains("203.0.113.7"),
                    "a foreign rule was removed: {}",
                    saved()
                );
                poll_true("it is logged", PATIENCE, || {
                    let log = mesh.executor.log_text();
                    log.lines()
                        .any(|line| line.contains("foreign rule") && line.contains("ISTIO_POSTRT"))
                })
                .unwrap();
            } else {
                poll_true("old rules are gone", PATIENCE, || {
                    !saved().contains("ISTIO_POSTRT")
                })
                .unwrap();
                let sets = text(mesh.node().place(), "ipset", &["list", "-n"], b"").unwrap();
                assert!(!sets.contains("istio-"), "{sets}");
            }
        }
    }
}

#[test]
fn the_host_table_of_istios_nftables_backend_is_taken_over() {
    let node = Node::new().unwrap();
    let table = "table inet istio-ambient-nat {
        set istio-inpod-probes-v4 { type ipv4_addr; flags interval; }
        chain postrouting { type nat hook postrouting priority srcnat; jump istio-postrt; }
        chain istio-postrt { meta l4proto tcp ip daddr @istio-inpod-probes-v4 snat ip to 169.254.7.127; }
    }";
    text(
        node.place(),
        "nft",
        &["-f", "-"],
        table
            .replace(
                "postrouting { type nat hook postrouting priority srcnat; jump istio-postrt; }",
                "postrouting { type nat hook postrouting priority srcnat; }",
            )
            .as_bytes(),
    )
    .unwrap();
    let mesh = Mesh::start_on(node, MeshOptions::default()).unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    mesh_pod(&mesh, "probed").unwrap();
    poll_true("the old table is gone", PATIENCE, || {
        !has_istio(mesh.node().netns())
    })
    .unwrap();
}

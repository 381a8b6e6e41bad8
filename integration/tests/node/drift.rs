//! Damage to an enrolled pod is seen, told and mended within 30 s, and nobody else notices.

use std::time::{Duration, Instant};

use serde_json::Value;
use sluice_integration::descriptors::wait_let_go;
use sluice_integration::kernel_state::sandbox_files;
use sluice_integration::manifests::PodOptions;
use sluice_integration::mesh::{Mesh, MeshOptions};
use sluice_integration::netns_state::{redirects, rules_of};
use sluice_integration::rule_monitor::RuleMonitor;
use sluice_integration::scene::{APP_PORT, PATIENCE, Scene, mesh_pod};
use sluice_integration::watch::PodWatch;
use sluice_proto::pb::workload::{Pod as PodStatus, PodState};
use sluice_testkit::netns::Place;
use sluice_testkit::pod::Pod;
use sluice_testkit::process::{json, text};
use sluice_testkit::traffic::client::fetch;
use sluice_testkit::traffic::server::EchoServer;
use sluice_testkit::wait::poll_true;

/// Any damage is mended by then, with the intervals that are the default.
const BOUND: Duration = Duration::from_secs(30);
/// What is heard of is mended after the next look, which comes within 5 s.
const HEARD: Duration = Duration::from_secs(8);

fn nft(pod: &Pod, command: &[&str]) {
    text(&Place::from(pod.netns()), "nft", command, b"").unwrap();
}

/// The objects of one kind in the pod's ruleset.
fn objects(pod: &Pod, kind: &str) -> Vec<Value> {
    let ruleset = json(&Place::from(pod.netns()), "nft", &["-j", "-a", "list", "ruleset"]).unwrap();
    ruleset["nftables"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|object| object.get(kind))
        .cloned()
        .collect()
}

/// Damages the client's netns and waits for its repair, with everything that must not happen meanwhile.
fn is_mended(damage: impl FnOnce(&Pod)) {
    is_mended_within(BOUND, MeshOptions::default(), damage);
}

fn never_in_turns() -> MeshOptions {
    let arguments = ["--full-drift-interval-ms", "3600000"];
    MeshOptions {
        executor: arguments.map(String::from).to_vec(),
        ..MeshOptions::default()
    }
}

/// [`is_mended`] of damage to routing, while nobody looks at what is not said to have changed.
fn is_heard_of(command: &str) {
    is_mended_within(HEARD, never_in_turns(), |pod| {
        text(&Place::from(pod.netns()), "sh", &["-ec", command], b"").unwrap();
    });
}

fn is_mended_within(bound: Duration, options: MeshOptions, damage: impl FnOnce(&Pod)) {
    let scene = Scene::start_with(options).unwrap();
    let before = rules_of(scene.client.netns()).unwrap();
    let neighbour = RuleMonitor::start(scene.server.netns(), scene.mesh.node().dir(), "neighbour").unwrap();
    let watch = PodWatch::start(&scene.mesh).unwrap();
    scene.mesh.control().forget_messages().unwrap();
    let repaired = || scene.mesh.node_status().unwrap().executor.unwrap().repaired_pods;
    let counted = repaired();
    damage(&scene.client);
    assert_ne!(
        rules_of(scene.client.netns()).unwrap(),
        before,
        "the damage did nothing"
    );
    poll_true("rules are as before", bound, || {
        rules_of(scene.client.netns()).is_ok_and(|now| now == before)
    })
    .unwrap();
    watch.wait_withdrawn_and_back(&scene.client, PATIENCE).unwrap();
    assert!(repaired() > counted, "the repair was not counted");
    fetch(scene.client.netns(), scene.target(), PATIENCE).unwrap();
    neighbour.silent().unwrap();
    assert!(
        watch
            .reports(&scene.server)
            .iter()
            .all(|report| report.state() == PodState::Enrolled)
    );
    let told: Vec<_> = scene
        .mesh
        .control()
        .report()
        .unwrap()
        .messages
        .into_iter()
        .filter(|m| m.uid == scene.server.uid())
        .collect();
    assert!(told.is_empty(), "ztunnel was told of a healthy pod: {told:?}");
}

#[test]
fn a_flushed_table_is_mended() {
    is_mended(|pod| {
        let nat = objects(pod, "chain")
            .into_iter()
            .find(|chain| chain["type"] == "nat")
            .unwrap();
        nft(
            pod,
            &[
                "flush",
                "table",
                nat["family"].as_str().unwrap(),
                nat["table"].as_str().unwrap(),
            ],
        );
    });
}

#[test]
fn a_deleted_rule_is_mended() {
    is_mended(|pod| {
        let rules = objects(pod, "rule");
        let rule = rules
            .iter()
            .find(|rule| rule.to_string().contains("15001"))
            .unwrap();
        let word = |key: &str| rule[key].as_str().unwrap();
        let handle = rule["handle"].to_string();
        nft(
            pod,
            &[
                "delete",
                "rule",
                word("family"),
                word("table"),
                word("chain"),
                "handle",
                &handle,
            ],
        );
    });
}

#[test]
fn a_flushed_ruleset_is_mended() {
    is_mended(|pod| nft(pod, &["flush", "ruleset"]));
}

#[test]
fn a_deleted_routing_rule_is_mended() {
    is_heard_of("ip -4 rule del lookup 100");
}

#[test]
fn a_deleted_route_is_mended() {
    is_heard_of("ip -4 route flush table 100");
}

#[test]
fn deleted_ipv6_routing_is_mended() {
    is_heard_of("ip -6 rule del lookup 100; ip -6 route flush table 100");
}

/// The kernel takes such routes away without a word about them.
#[test]
fn a_route_that_went_with_the_loopback_interface_is_mended() {
    is_heard_of("ip link set lo down; ip link set lo up");
}

/// What acts alike for the packet that the kernel is asked about is not the same: hearing of a change makes everything be read.
#[test]
fn a_routing_rule_that_was_narrowed_is_mended() {
    let scene = Scene::start_with(never_in_turns()).unwrap();
    let place = Place::from(scene.client.netns());
    let narrow =
        "ip -4 rule add pref 32764 fwmark 0x111/0xfff to 192.0.2.0/24 lookup 100; ip -4 rule del pref 32764";
    text(&place, "sh", &["-ec", narrow], b"").unwrap();
    let ours = || {
        let rules = text(&place, "ip", &["-4", "rule", "show", "pref", "32764"], b"");
        rules.is_ok_and(|rules| rules.contains("from all fwmark 0x111/0xfff lookup 100"))
    };
    assert!(!ours(), "the damage did nothing");
    poll_true("the rule is there again", HEARD, ours).unwrap();
}

/// Replaces the netns of an enrolled pod by another under the same UID and waits until that is enrolled instead.
fn moves(replace: impl FnOnce(&Mesh, Pod) -> Pod) {
    let mesh = Mesh::start().unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    let old = mesh_pod(&mesh, "moved").unwrap();
    let healthy = mesh_pod(&mesh, "healthy").unwrap();
    let neighbour = RuleMonitor::start(healthy.netns(), mesh.node().dir(), "healthy").unwrap();
    let watch = PodWatch::start(&mesh).unwrap();
    mesh.control().forget_messages().unwrap();
    let (inode, veth) = (old.netns().inode(), old.host_ifname().to_owned());
    let new = replace(&mesh, old);
    let enrolled = || {
        mesh.pod_state(&new).is_some_and(|s| {
            s.state() == PodState::Enrolled && s.netns.is_some_and(|n| n.inode == new.netns().inode())
        })
    };
    poll_true("the new netns is enrolled", BOUND, enrolled).unwrap();
    let interfaces = || mesh.node().interfaces().unwrap();
    poll_true("the old netns is gone", BOUND, || !interfaces().contains(&veth)).unwrap();
    // The kernel gives a number that is free again to the next netns.
    if new.netns().inode() != inode {
        wait_let_go(&mesh, inode, &veth, BOUND).unwrap();
    }
    assert!(
        watch
            .states(&new)
            .iter()
            .any(|state| *state != PodState::Enrolled),
        "status was never withdrawn"
    );
    assert!(redirects(new.netns()).unwrap());
    let held = mesh.control().counts().unwrap();
    assert_eq!(held.workloads[new.uid()].netns_inode, new.netns().inode());
    let mut told = mesh.control().report().unwrap().messages;
    told.retain(|message| message.uid == healthy.uid());
    assert!(told.is_empty(), "{told:?}");
    neighbour.silent().unwrap();
}

#[test]
fn a_second_add_of_a_pod_in_another_netns_replaces_the_first() {
    moves(|mesh, old| {
        let new = mesh.node().pod("moved").uid(old.uid()).create().unwrap();
        old.delete().unwrap();
        mesh.manifests.pod(&new, &PodOptions::default()).unwrap();
        mesh.add(&new).unwrap().ok().unwrap();
        new
    });
}

#[test]
fn a_pod_that_comes_back_in_another_netns_without_an_add_is_found_there() {
    moves(|mesh, old| {
        let uid = old.uid().to_owned();
        text(
            mesh.node().place(),
            "ip",
            &["link", "del", old.host_ifname()],
            b"",
        )
        .unwrap();
        old.delete().unwrap();
        let new = mesh.node().pod("moved").uid(&uid).create().unwrap();
        mesh.manifests.pod(&new, &PodOptions::default()).unwrap();
        new.start_process().unwrap();
        new
    });
}

#[test]
fn a_proxy_that_comes_back_with_empty_memory_is_given_every_pod_without_touching_rules() {
    let mut scene = Scene::start().unwrap();
    let dir = scene.mesh.node().dir();
    let monitors =
        [&scene.client, &scene.server].map(|pod| RuleMonitor::start(pod.netns(), dir, pod.name()).unwrap());
    scene.mesh.proxy.take().unwrap().kill().unwrap();
    for pod in [&scene.client, &scene.server] {
        let status = scene.mesh.wait_state(pod, PodState::Pending, BOUND).unwrap();
        assert_eq!(status.reason, "no-proxy");
    }
    scene.mesh.start_proxy().unwrap();
    scene.wait_enrolled().unwrap();
    let report = scene.mesh.control().report().unwrap();
    for pod in [&scene.client, &scene.server] {
        let kinds: Vec<_> = report
            .messages
            .iter()
            .filter(|m| m.uid == pod.uid())
            .map(|m| m.kind.as_str())
            .collect();
        assert_eq!(kinds, ["add"], "a new proxy must be given the netns");
    }
    fetch(scene.client.netns(), scene.target(), PATIENCE).unwrap();
    for monitor in monitors {
        monitor.silent().unwrap();
    }
}

#[test]
fn a_pod_whose_netns_appears_late_is_enrolled_as_soon_as_it_is_there() {
    let mesh = Mesh::start().unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    let other = mesh_pod(&mesh, "other").unwrap();
    let before = mesh_pod(&mesh, "rebooted").unwrap();
    let uid = before.uid().to_owned();
    // As after a reboot without drain: the API still lists the pod, its sandbox is gone, and the agent starts anew.
    mesh.executor.kill().unwrap();
    mesh.broker.kill().unwrap();
    before.delete().unwrap();
    std::fs::remove_dir_all(mesh.run.sandboxes()).unwrap();
    mesh.executor.start_again().unwrap();
    mesh.broker.start_again().unwrap();
    mesh.wait_serving().unwrap();
    let of_uid = || status_of(&mesh, &uid);
    poll_true("the pod is broken: netns-not-found", PATIENCE, || {
        of_uid()
            .is_some_and(|status| status.state() == PodState::Broken && status.reason == "netns-not-found")
    })
    .unwrap();
    let retries = of_uid().unwrap().retries;
    poll_true("it is searched for again", PATIENCE, || {
        of_uid().is_some_and(|status| status.retries > retries)
    })
    .unwrap();
    let kept = |m: &sluice_testkit::standin::ZdsMessage| m.uid == uid && m.kind == "keep";
    assert!(
        !mesh.control().report().unwrap().messages.iter().any(kept),
        "keep without a netns"
    );
    let late = mesh.node().pod("rebooted").uid(&uid).create().unwrap();
    mesh.manifests.pod(&late, &PodOptions::default()).unwrap();
    let _app = EchoServer::start(other.netns(), APP_PORT).unwrap();
    late.start_process().unwrap();
    mesh.wait_state(&late, PodState::Enrolled, Duration::from_secs(5))
        .unwrap();
    assert!(redirects(late.netns()).unwrap());
    assert!(!mesh.control().report().unwrap().messages.iter().any(kept));
}

/// What is told of the pod of this UID, whose sandbox may be gone.
fn status_of(mesh: &Mesh, uid: &str) -> Option<PodStatus> {
    let of_uid = |status: &PodStatus| status.pod.as_ref().is_some_and(|pod| pod.uid == uid);
    mesh.pods().unwrap().into_iter().find(of_uid)
}

#[test]
fn a_recorded_pod_whose_netns_appears_after_40_s_is_enrolled_within_5_s() {
    let mesh = Mesh::start().unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    let before = mesh_pod(&mesh, "rebooted").unwrap();
    let (uid, addresses) = (before.uid().to_owned(), before.addresses().to_vec());
    mesh.executor.kill().unwrap();
    mesh.broker.kill().unwrap();
    before.delete().unwrap();
    assert_eq!(sandbox_files(&mesh).unwrap().len(), 1, "the pod is on record");
    mesh.executor.start_again().unwrap();
    mesh.broker.start_again().unwrap();
    mesh.wait_serving().unwrap();
    let of_uid = || status_of(&mesh, &uid);
    // Whatever pauses grow while nothing is found, they must not grow beyond what the pod can wait for.
    let until = Instant::now() + Duration::from_secs(40);
    poll_true("40 s pass", 2 * BOUND, || {
        assert_ne!(of_uid().map(|status| status.state()), Some(PodState::Enrolled));
        Instant::now() >= until
    })
    .unwrap();
    let lost = of_uid().unwrap();
    assert_eq!(
        (lost.state(), lost.reason.as_str()),
        (PodState::Broken, "netns-not-found"),
        "{lost:?}"
    );
    // Nobody is told: no ADD, no change of the manifest.
    let late = mesh
        .node()
        .pod("rebooted")
        .uid(&uid)
        .addresses(&addresses)
        .create()
        .unwrap();
    late.start_process().unwrap();
    mesh.wait_state(&late, PodState::Enrolled, Duration::from_secs(5))
        .unwrap();
    assert!(redirects(late.netns()).unwrap());
    let told = mesh.control().report().unwrap().messages;
    assert!(!told.iter().any(|m| m.uid == uid && m.kind == "keep"));
    assert!(lost.retries > 10, "{lost:?}");
}

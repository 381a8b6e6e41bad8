//! Leaving the mesh loses nothing, coming back neither, and nobody is touched while no proxy is there.

use std::time::Duration;

use sluice_integration::manifests::PodOptions;
use sluice_integration::mesh::{Mesh, MeshOptions};
use sluice_integration::netns_state::{redirects, rules_of};
use sluice_integration::scene::{APP_PORT, PATIENCE, Scene, mesh_pod, turn};
use sluice_integration::uds_http::get;
use sluice_proto::pb::workload::PodState;
use sluice_testkit::pod::Pod;
use sluice_testkit::standin::Behaviour;
use sluice_testkit::traffic::client::{Load, LoadOptions};
use sluice_testkit::traffic::server::EchoServer;
use sluice_testkit::wait::poll_true;

/// 200 requests a second over new connections and 20 kept connections; a busy machine may take 5 s to answer.
fn load(scene: &Scene) -> Load {
    let options = LoadOptions {
        timeout: Duration::from_secs(5),
        ..LoadOptions::new(scene.target())
    };
    let load = scene.load(options).unwrap();
    poll_true("kept connections are open", PATIENCE, || {
        open(scene, &scene.client) >= 20
    })
    .unwrap();
    load
}

fn open(scene: &Scene, pod: &Pod) -> u64 {
    scene
        .mesh
        .control()
        .counts()
        .unwrap()
        .workloads
        .get(pod.uid())
        .map_or(0, |held| held.counts.open)
}

fn captured(scene: &Scene, pod: &Pod) -> u64 {
    scene
        .mesh
        .control()
        .counts()
        .unwrap()
        .workloads
        .get(pod.uid())
        .map_or(0, |held| held.counts.outbound + held.counts.inbound)
}

fn out(scene: &Scene, pod: &Pod) {
    scene.mesh.manifests.pod(pod, &PodOptions::mode("none")).unwrap();
}

fn back(scene: &Scene, pod: &Pod) {
    scene.mesh.manifests.pod(pod, &PodOptions::default()).unwrap();
}

/// New connections of a pod that leaves go around the proxy: its count stands still while the load goes on.
fn goes_direct(scene: &Scene, load: &Load, pod: &Pod) {
    let mut before = captured(scene, pod);
    poll_true("new connections are direct", PATIENCE, || {
        load.wait_answered(40, PATIENCE).unwrap();
        std::mem::replace(&mut before, captured(scene, pod)) == before
    })
    .unwrap();
}

fn leaves_without_loss(pick: impl Fn(&Scene) -> &Pod) {
    let _turn = turn();
    let scene = Scene::start().unwrap();
    let pod = pick(&scene);
    let load = load(&scene);
    out(&scene, pod);
    scene.mesh.wait_state(pod, PodState::Draining, PATIENCE).unwrap();
    goes_direct(&scene, &load, pod);
    assert!(open(&scene, pod) >= 20, "kept connections left the proxy");
    assert_eq!(scene.mesh.pod_state(pod).unwrap().state(), PodState::Draining);
    let report = load.stop();
    report.nothing_failed().unwrap();
    report.kept_pace(200).unwrap();
    // With the kept connections ended, so does leaving, well before the drain's 60 s.
    scene.mesh.wait_state(pod, PodState::Out, PATIENCE).unwrap();
    let plain = scene.mesh.node().pod("plain").create().unwrap();
    poll_true("the proxy was told", PATIENCE, || {
        !scene
            .mesh
            .control()
            .counts()
            .unwrap()
            .workloads
            .contains_key(pod.uid())
    })
    .unwrap();
    let rules = |pod: &Pod| {
        rules_of(pod.netns())
            .unwrap()
            .replace(&pod.ip().to_string(), "ADDRESS")
    };
    assert_eq!(rules(pod), rules(&plain));
}

#[test]
fn a_client_that_leaves_the_mesh_loses_no_request_and_keeps_its_connections() {
    leaves_without_loss(|scene| &scene.client);
}

#[test]
fn a_server_that_leaves_the_mesh_loses_no_request_and_keeps_its_connections() {
    leaves_without_loss(|scene| &scene.server);
}

#[test]
fn leaving_ends_after_the_drain_although_connections_are_kept() {
    let _turn = turn();
    let options = MeshOptions {
        broker: vec!["--drain-seconds".into(), "2".into()],
        ..MeshOptions::default()
    };
    let scene = Scene::start_with(options).unwrap();
    let load = load(&scene);
    out(&scene, &scene.client);
    scene
        .mesh
        .wait_state(&scene.client, PodState::Out, Duration::from_secs(12))
        .unwrap();
    assert!(!redirects(scene.client.netns()).unwrap());
    let report = load.stop();
    let of_new: Vec<_> = report.failures.iter().filter(|failure| !failure.kept).collect();
    assert!(of_new.is_empty(), "new connections failed: {of_new:?}");
}

#[test]
fn a_pod_that_comes_back_while_it_drains_loses_nothing() {
    let _turn = turn();
    let scene = Scene::start().unwrap();
    let load = load(&scene);
    for _ in 0..5 {
        out(&scene, &scene.client);
        scene
            .mesh
            .wait_state(&scene.client, PodState::Draining, PATIENCE)
            .unwrap();
        goes_direct(&scene, &load, &scene.client);
        back(&scene, &scene.client);
        scene
            .mesh
            .wait_state(&scene.client, PodState::Enrolled, PATIENCE)
            .unwrap();
        let before = captured(&scene, &scene.client);
        poll_true("new connections are captured", PATIENCE, || {
            captured(&scene, &scene.client) > before + 20
        })
        .unwrap();
    }
    assert!(open(&scene, &scene.client) >= 20);
    load.stop().nothing_failed().unwrap();
}

#[test]
fn a_namespaces_label_takes_its_pods_out_and_in_without_loss() {
    let _turn = turn();
    let scene = Scene::start().unwrap();
    let load = scene.load(scene.steady()).unwrap();
    for _ in 0..3 {
        scene.mesh.manifests.namespace("default", "").unwrap();
        for pod in [&scene.client, &scene.server] {
            scene.mesh.wait_state(pod, PodState::Out, PATIENCE).unwrap();
            assert!(!redirects(pod.netns()).unwrap());
        }
        load.wait_answered(40, PATIENCE).unwrap();
        scene.mesh.manifests.namespace("default", "ambient").unwrap();
        scene.wait_enrolled().unwrap();
        load.wait_answered(40, PATIENCE).unwrap();
    }
    load.stop().nothing_failed().unwrap();
}

#[test]
fn a_running_pod_is_not_touched_while_no_proxy_is_ready() {
    let mut mesh = Mesh::start_with(MeshOptions {
        without_proxy: true,
        ..MeshOptions::default()
    })
    .unwrap();
    mesh.manifests.namespace("default", "").unwrap();
    let pod = mesh.node().pod("waiting").create().unwrap();
    let peer = mesh.node().pod("peer").create().unwrap();
    mesh.manifests.pod(&pod, &PodOptions::default()).unwrap();
    mesh.add(&pod).unwrap().ok().unwrap();
    let _app = EchoServer::start(peer.netns(), APP_PORT).unwrap();
    let before = rules_of(pod.netns()).unwrap();
    let load = Load::start(
        pod.netns(),
        LoadOptions::new((peer.ip(), APP_PORT).into()).only_new(100),
    )
    .unwrap();
    load.wait_answered(20, PATIENCE).unwrap();
    mesh.manifests.pod(&pod, &PodOptions::mode("ambient")).unwrap();
    let status = mesh.wait_state(&pod, PodState::Pending, PATIENCE).unwrap();
    assert_eq!(status.reason, "no-proxy");
    load.wait_answered(100, PATIENCE).unwrap();
    assert_eq!(rules_of(pod.netns()).unwrap(), before, "the pod was touched");
    assert_eq!(mesh.pod_state(&pod).unwrap().reason, "no-proxy");
    mesh.start_proxy().unwrap();
    mesh.wait_state(&pod, PodState::Enrolled, PATIENCE).unwrap();
    let captured = || {
        mesh.control().counts().unwrap().workloads[pod.uid()]
            .counts
            .outbound
    };
    poll_true("traffic is captured", PATIENCE, || captured() > 0).unwrap();
    load.stop().nothing_failed().unwrap();
}

#[test]
fn the_node_is_ready_before_its_old_pods_are_reconciled() {
    let mesh = Mesh::start().unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    let pods: Vec<Pod> = (0..8)
        .map(|n| mesh_pod(&mesh, &format!("old-{n}")).unwrap())
        .collect();
    mesh.control()
        .behave(Behaviour::default().delay_ms("add", 700).delay_ms("keep", 700))
        .unwrap();
    mesh.broker.restart().unwrap();
    mesh.wait_serving().unwrap();
    let ready = || get(&mesh.run.http_socket(), "/readyz").is_ok_and(|response| response.status == 200);
    poll_true("the node is ready", PATIENCE, ready).unwrap();
    let enrolled = pods
        .iter()
        .filter(|pod| {
            mesh.pod_state(pod)
                .is_some_and(|s| s.state() == PodState::Enrolled)
        })
        .count();
    assert!(enrolled < pods.len(), "readiness waited for all old pods");
    mesh.control().behave(Behaviour::default()).unwrap();
    for pod in &pods {
        mesh.wait_state(pod, PodState::Enrolled, PATIENCE).unwrap();
    }
}

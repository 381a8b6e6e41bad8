//! ADD: who passes, who waits, who is refused, and that nobody stands in another's way.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use sluice_integration::adds::{add_together, declared, mesh_with, refused};
use sluice_integration::descriptors::{LET_GO, wait_let_go};
use sluice_integration::kernel_state::{NetnsState, assert_netns_is, probe_addresses, sandbox_files};
use sluice_integration::manifests::PodOptions;
use sluice_integration::mesh::{Mesh, MeshOptions};
use sluice_integration::scene::{APP_PORT, PATIENCE, mesh_pod};
use sluice_integration::uds_http::{get, metric};
use sluice_proto::pb::workload::PodState;
use sluice_testkit::cni::Attachment;
use sluice_testkit::pod::Pod;
use sluice_testkit::standin::Behaviour;
use sluice_testkit::traffic::client::fetch;
use sluice_testkit::traffic::server::EchoServer;
use sluice_testkit::wait::poll_true;

/// How often the proxy was told to add each pod, by connection and UID.
fn adds(mesh: &Mesh) -> BTreeMap<(u32, String), usize> {
    let mut adds = BTreeMap::new();
    for message in mesh.control().report().unwrap().messages {
        if message.kind == "add" {
            *adds.entry((message.connection, message.uid)).or_default() += 1;
        }
    }
    adds
}

#[test]
fn without_an_executor_no_pod_passes() {
    let mesh = mesh_with(MeshOptions::default()).unwrap();
    let pod = declared(&mesh, "web").unwrap();
    mesh.executor.kill().unwrap();
    let outcome = mesh.add(&pod).unwrap();
    let error = refused(&outcome, "PLG-CONN", "plugin", &pod);
    assert_eq!(error.code, 11);
    assert!(
        outcome.last().elapsed < Duration::from_secs(4),
        "{:?}",
        outcome.last().elapsed
    );
    mesh.executor.start_again().unwrap();
    mesh.wait_serving().unwrap();
    mesh.add(&pod).unwrap().ok().unwrap();
}

#[test]
fn without_a_broker_no_pod_passes() {
    let mesh = mesh_with(MeshOptions::default()).unwrap();
    let pod = declared(&mesh, "web").unwrap();
    let before = NetnsState::of(pod.netns()).unwrap();
    mesh.broker.kill().unwrap();
    let error = refused(&mesh.add(&pod).unwrap(), "BRK-NONE", "netns-executor", &pod);
    assert_eq!(error.code, 11);
    assert_netns_is(&pod, &before);
    mesh.broker.start_again().unwrap();
    mesh.wait_serving().unwrap();
    mesh.add(&pod).unwrap().ok().unwrap();
    mesh.wait_state(&pod, PodState::Enrolled, PATIENCE).unwrap();
}

#[test]
fn a_pod_that_nobody_knows_is_refused() {
    let mesh = mesh_with(MeshOptions::default()).unwrap();
    let pod = mesh.node().pod("ghost").create().unwrap();
    let before = NetnsState::of(pod.netns()).unwrap();
    let error = refused(&mesh.add(&pod).unwrap(), "BRK-POD", "ambient-broker", &pod);
    assert_eq!(error.code, 11);
    assert_netns_is(&pod, &before);
    assert!(sandbox_files(&mesh).unwrap().is_empty());
}

#[test]
fn a_pod_whose_manifest_comes_late_is_decided_by_it() {
    let mesh = mesh_with(MeshOptions::default()).unwrap();
    for (name, options, expected) in [
        ("late", PodOptions::default(), PodState::Enrolled),
        ("late-plain", PodOptions::mode("none"), PodState::Out),
    ] {
        let pod = mesh.node().pod(name).create().unwrap();
        std::thread::scope(|scope| {
            let add = scope.spawn(|| mesh.add(&pod).unwrap());
            poll_true("the ADD has reached the executor", PATIENCE, || {
                !sandbox_files(&mesh).unwrap().is_empty()
            })
            .unwrap();
            mesh.manifests.pod(&pod, &options).unwrap();
            add.join().unwrap().ok().unwrap();
        });
        mesh.wait_state(&pod, expected, PATIENCE).unwrap();
        mesh.del(&pod).unwrap().ok().unwrap();
    }
}

#[test]
fn adds_before_any_proxy_wait_for_one() {
    let mut mesh = mesh_with(MeshOptions {
        without_proxy: true,
        ..MeshOptions::default()
    })
    .unwrap();
    let pods: Vec<Pod> = (0..20)
        .map(|i| declared(&mesh, &format!("early-{i}")).unwrap())
        .collect();
    let running: Vec<_> = pods.iter().map(|pod| mesh.start_add(pod).unwrap()).collect();
    poll_true("all ADDs wait", PATIENCE, || {
        mesh.pods()
            .unwrap()
            .iter()
            .filter(|pod| pod.state() == PodState::Pending)
            .count()
            == pods.len()
    })
    .unwrap();
    mesh.start_proxy().unwrap();
    for plugin in running {
        let execution = plugin.wait().unwrap();
        assert!(execution.status.success(), "{}", execution.stdout);
    }
    let adds = adds(&mesh);
    assert_eq!(adds.len(), pods.len(), "{adds:?}");
    assert!(adds.values().all(|times| *times == 1), "{adds:?}");
    let app = EchoServer::start(mesh.node().netns(), APP_PORT).unwrap();
    let target = SocketAddr::from(([10, 244, 0, 1], app.port()));
    for pod in &pods {
        mesh.wait_state(pod, PodState::Enrolled, PATIENCE).unwrap();
        fetch(pod.netns(), target, Duration::from_secs(5)).unwrap();
        let counts = mesh.control().counts().unwrap().workloads[pod.uid()].counts;
        assert_eq!(counts.outbound, 1, "{}", pod.name());
        let warnings = mesh
            .broker
            .log_text()
            .lines()
            .filter(|line| line.contains("WARN") && line.contains(pod.uid()))
            .count();
        assert!(warnings <= 1, "{warnings} warnings about {}", pod.name());
    }
}

#[test]
fn one_pod_that_the_proxy_never_answers_for_delays_no_other() {
    let mesh = mesh_with(MeshOptions::default()).unwrap();
    let pods: Vec<Pod> = (0..50)
        .map(|i| declared(&mesh, &format!("web-{i}")).unwrap())
        .collect();
    let stuck = &pods[20];
    mesh.control()
        .behave(Behaviour::default().silent(&format!("add:{}", stuck.uid())))
        .unwrap();
    let begun = Instant::now();
    let all: Vec<&Pod> = pods.iter().collect();
    let outcomes = std::thread::scope(|scope| {
        let adding = scope.spawn(|| add_together(&mesh, &all).unwrap());
        // What waits shows while it waits: longer than any answer takes, shorter than the deadline of 4 s.
        poll_true("the oldest waiter shows", PATIENCE, || {
            let metrics = get(&mesh.run.http_socket(), "/metrics").unwrap().body;
            let value = |name| metric(&metrics, name).unwrap();
            value("zds_oldest_waiter_seconds") > 1.5 && value("zds_queue_depth") >= 1.0
        })
        .unwrap();
        adding.join().unwrap()
    });
    for (pod, outcome) in pods.iter().zip(&outcomes) {
        if pod.uid() != stuck.uid() {
            assert!(outcome.succeeded(), "{}: {}", pod.name(), outcome.last().stdout);
            assert!(
                outcome.last().elapsed < Duration::from_secs(10),
                "{:?}",
                outcome.last().elapsed
            );
            mesh.wait_state(pod, PodState::Enrolled, PATIENCE).unwrap();
        }
    }
    println!("50 ADDs, one stuck: {:?}", begun.elapsed());
    let error = refused(&outcomes[20], "ZT-TIME", "ambient-broker", stuck);
    for part in [stuck.uid(), "waiting for ztunnel ack", " s"] {
        assert!(error.msg.contains(part), "{part:?} in {}", error.msg);
    }
}

#[test]
fn the_same_add_twice_is_one_add() {
    let mesh = mesh_with(MeshOptions::default()).unwrap();
    let pod = declared(&mesh, "web").unwrap();
    mesh.add(&pod).unwrap().ok().unwrap();
    let once = NetnsState::of(pod.netns()).unwrap();
    let again = mesh.add(&pod).unwrap().ok().unwrap();
    assert_eq!(again.result, Some(pod.prev_result("1.0.0")));
    assert_netns_is(&pod, &once);
    let concurrent = declared(&mesh, "twin").unwrap();
    for outcome in add_together(&mesh, &[&concurrent; 4]).unwrap() {
        let outcome = outcome.ok().unwrap();
        assert_eq!(outcome.result, Some(concurrent.prev_result("1.0.0")));
    }
    let twin = NetnsState::of(concurrent.netns()).unwrap();
    let expected = once
        .text()
        .replace(&pod.ip().to_string(), &concurrent.ip().to_string());
    assert_eq!(twin.text(), expected, "as after one ADD");
    let other = Attachment {
        ifname: "net1".to_owned(),
        ..Attachment::from(&pod)
    };
    let second = mesh
        .chain()
        .unwrap()
        .add(&other, Some(&pod.prev_result("1.0.0")))
        .unwrap()
        .ok()
        .unwrap();
    assert_eq!(second.result, Some(pod.prev_result("1.0.0")));
    assert_netns_is(&pod, &once);
    for pod in [&pod, &concurrent] {
        assert_eq!(adds(&mesh)[&(1, pod.uid().to_owned())], 1);
    }
    let addresses = [pod.ip(), concurrent.ip()].into();
    assert_eq!(probe_addresses(&mesh).unwrap(), addresses);
    // The DEL of the other interface takes nothing with it.
    mesh.chain().unwrap().del(&other, None).unwrap().ok().unwrap();
    assert_netns_is(&pod, &once);
    assert_eq!(probe_addresses(&mesh).unwrap(), addresses);
}

#[test]
fn of_several_sandboxes_of_one_pod_only_the_last_counts() {
    let mut mesh = mesh_with(MeshOptions::default()).unwrap();
    let uid = sluice_testkit::pod::random_uuid().unwrap();
    let sandbox = |mesh: &Mesh| {
        let pod = mesh.node().pod("web").uid(&uid).create().unwrap();
        mesh.manifests.pod(&pod, &PodOptions::default()).unwrap();
        pod
    };
    mesh.control()
        .behave(Behaviour::default().nack(&format!("add:{uid}"), "no room"))
        .unwrap();
    let first = sandbox(&mesh);
    refused(&mesh.add(&first).unwrap(), "ZT-NACK", "ztunnel", &first);
    // While the proxy is away, the runtime gives up waiting, as it does after its own time-out.
    mesh.proxy.take().unwrap().kill().unwrap();
    let second = sandbox(&mesh);
    let plugin = mesh.start_add(&second).unwrap();
    mesh.wait_state(&second, PodState::Pending, PATIENCE).unwrap();
    plugin.kill();
    plugin.wait().unwrap();
    mesh.start_proxy().unwrap();
    let third = sandbox(&mesh);
    mesh.add(&third).unwrap().ok().unwrap();
    mesh.wait_state(&third, PodState::Enrolled, PATIENCE).unwrap();
    let inodes = [first.netns().inode(), second.netns().inode()];
    let interfaces = [first.host_ifname().to_owned(), second.host_ifname().to_owned()];
    drop((first, second));
    for (inode, interface) in inodes.iter().zip(&interfaces) {
        wait_let_go(&mesh, *inode, interface, LET_GO).unwrap();
    }
    let only_the_third_was_added = |mesh: &Mesh| {
        let mut messages = mesh.control().report().unwrap().messages;
        messages.retain(|message| message.kind == "add");
        let told: Vec<_> = messages.iter().map(|message| message.netns_inode).collect();
        assert_eq!(told, [Some(third.netns().inode())], "{messages:?}");
    };
    only_the_third_was_added(&mesh);
    // Also what a proxy that comes later is told.
    mesh.proxy.as_ref().unwrap().restart().unwrap();
    mesh.control().wait_ready(PATIENCE).unwrap();
    only_the_third_was_added(&mesh);
    let other = mesh_pod(&mesh, "other").unwrap();
    mesh.del(&other).unwrap().ok().unwrap();
}

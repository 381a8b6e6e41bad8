//! What proxies do wrong, or too late, or not at all, and what the broker makes of it.

use std::time::Instant;

use sluice_integration::manifests::PodOptions;
use sluice_integration::proxies::{Handoff, node_without_proxy, wait_told};
use sluice_integration::raw_ztunnel::{Kind, RawZtunnel};
use sluice_integration::scene::{APP_PORT, PATIENCE, mesh_pod};
use sluice_proto::paths::DEADLINES;
use sluice_proto::pb::workload::PodState;
use sluice_testkit::pod::Pod;
use sluice_testkit::traffic::client::fetch;
use sluice_testkit::traffic::server::EchoServer;
use sluice_testkit::wait::poll_true;

#[test]
fn a_late_answer_is_never_taken_for_that_of_the_next_message() {
    let mesh = node_without_proxy().unwrap();
    let peer = RawZtunnel::connect(&mesh.run.zds_socket()).unwrap();
    peer.hello(1).unwrap();
    assert_eq!(peer.receive(PATIENCE).unwrap().unwrap().0, Kind::SnapshotSent);
    peer.ack().unwrap();
    let (late, next) = (
        mesh.node().pod("late").create().unwrap(),
        mesh.node().pod("next").create().unwrap(),
    );
    for pod in [&late, &next] {
        mesh.manifests.pod(pod, &PodOptions::default()).unwrap();
    }
    std::thread::scope(|scope| {
        let begun = Instant::now();
        let adding = scope.spawn(|| mesh.add(&late).unwrap());
        let (kind, _) = peer.receive(PATIENCE).unwrap().unwrap();
        assert_eq!(kind, Kind::Add);
        let more = peer.receive(PATIENCE).unwrap();
        assert!(more.is_none(), "sent although an answer was due: {more:?}");
        // Counted from before the message was sent: nothing that holds this thread up makes it look shorter.
        let waited = begun.elapsed();
        assert!(waited >= DEADLINES.zds, "closed after {waited:?}");
        assert!(peer.ack().is_err(), "a late answer was still taken");
        let outcome = adding.join().unwrap();
        let told = &outcome.last().stdout;
        assert!(!outcome.succeeded(), "an ADD without an answer passed");
        // Not by the later deadline of the ADD itself.
        assert!(
            told.contains("waiting for ztunnel ack") && told.contains("ZT-TIME"),
            "{told}"
        );
    });
    let good = Handoff::ready(&mesh, "good").unwrap();
    mesh.add(&next).unwrap().ok().unwrap();
    wait_told(&good.control, "add", &next).unwrap();
}

#[test]
fn another_protocol_version_is_refused_and_said_once() {
    for version in [0, 99] {
        let mesh = node_without_proxy().unwrap();
        for _ in 0..5 {
            let peer = RawZtunnel::connect(&mesh.run.zds_socket()).unwrap();
            peer.hello(version).unwrap();
            assert!(
                peer.receive(PATIENCE).unwrap().is_none(),
                "version {version} was served"
            );
        }
        let log = mesh.broker.log_text();
        let told = format!("ZDS version {version}, ours is 1");
        assert_eq!(log.matches(&told).count(), 1, "{told:?} in\n{log}");
        let status = mesh.node_status().unwrap().zds_socket;
        let told = format!("version {version}, ours is 1");
        assert!(status.contains(&told), "{told:?} is not in {status:?}");
        poll_true("nobody is counted", PATIENCE, || {
            mesh.node_status().unwrap().zds.is_empty()
        })
        .unwrap();
        let good = Handoff::ready(&mesh, "good").unwrap();
        let pod = mesh_pod(&mesh, "pod").unwrap();
        wait_told(&good.control, "add", &pod).unwrap();
    }
}

#[test]
fn pods_added_before_any_proxy_are_each_given_once() {
    const PODS: usize = 20;
    let mut mesh = node_without_proxy().unwrap();
    let pods: Vec<Pod> = (0..PODS)
        .map(|n| mesh.node().pod(&format!("early-{n}")).create().unwrap())
        .collect();
    for pod in &pods {
        mesh.manifests.pod(pod, &PodOptions::default()).unwrap();
    }
    let chain = &mesh.chain().unwrap();
    std::thread::scope(|scope| {
        let adding: Vec<_> = pods
            .iter()
            .map(|pod| scope.spawn(move || chain.add(&pod.into(), Some(&pod.prev_result("1.0.0")))))
            .collect();
        poll_true("all are pending", PATIENCE, || {
            mesh.pods()
                .is_ok_and(|known| known.iter().filter(|p| p.state() == PodState::Pending).count() == PODS)
        })
        .unwrap();
        mesh.start_proxy().unwrap();
        for added in adding {
            added.join().unwrap().unwrap().ok().unwrap();
        }
    });
    let report = mesh.control().report().unwrap();
    let app = EchoServer::start(pods[0].netns(), APP_PORT).unwrap();
    for pod in &pods {
        mesh.wait_state(pod, PodState::Enrolled, PATIENCE).unwrap();
        for connection in 1..=report.connections {
            let adds = report
                .messages
                .iter()
                .filter(|m| m.kind == "add" && m.uid == pod.uid() && m.connection == connection)
                .count();
            assert_eq!(adds, 1, "{} on connection {connection}", pod.name());
        }
        if pod.uid() != pods[0].uid() {
            fetch(pod.netns(), (pods[0].ip(), app.port()).into(), PATIENCE).unwrap();
        }
    }
    let log = mesh.broker.log_text();
    for pod in &pods {
        let lines = log
            .lines()
            .filter(|line| (line.contains("WARN") || line.contains("ERROR")) && line.contains(pod.uid()))
            .count();
        assert!(lines <= 1, "{lines} lines about {}", pod.name());
    }
}

#[test]
fn a_socket_that_nobody_ever_connected_to_is_described() {
    const LABEL: &str = "system_u:object_r:container_file_t:s0:c1,c2";
    let mesh = node_without_proxy().unwrap();
    let socket = mesh.run.zds_socket();
    let path = socket.display().to_string();
    let has = |label: &str| {
        let described = mesh.node_status().unwrap().zds_socket;
        for part in [
            &path,
            "mode 0660",
            "owner 64807:",
            "0 peers ever connected for ",
            label,
        ] {
            assert!(described.contains(part), "{part:?} is not in {described:?}");
        }
    };
    has("no SELinux label");
    // As SELinux would; a file system keeps it without a policy too. The kernel ends it with a zero byte.
    let value = [LABEL.as_bytes(), b"\0"].concat();
    rustix::fs::setxattr(
        &socket,
        "security.selinux",
        &value,
        rustix::fs::XattrFlags::empty(),
    )
    .unwrap();
    has(&format!("label {LABEL}"));
}

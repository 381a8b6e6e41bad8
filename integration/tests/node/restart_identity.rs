//! After a restart of everything a netns is recognised by what it is, not by its number.

use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use sluice_integration::mesh::Mesh;
use sluice_integration::netns_state::rules_of;
use sluice_integration::rule_monitor::RuleMonitor;
use sluice_integration::scene::{PATIENCE, mesh_pod};
use sluice_proto::pb::workload::PodState;
use sluice_testkit::netns::{Netns, Place};
use sluice_testkit::process::text;
use sluice_testkit::wait::{poll_true, poll_until};

/// A new netns whose inode number is `inode`, which was just given back: the kernel does that when it gets round to it.
fn reuse(inode: u64) -> Netns {
    poll_until("the inode number is re-used", PATIENCE, || {
        Netns::with_inode(inode).unwrap()
    })
    .unwrap()
}

#[test]
fn a_netns_with_a_reused_inode_number_at_the_same_path_is_refused_after_a_double_restart() {
    let mut mesh = Mesh::start().unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    let healthy = mesh_pod(&mesh, "healthy").unwrap();
    let pod = mesh_pod(&mesh, "replaced").unwrap();
    let (uid, ip, path, inode, cookie) = (
        pod.uid().to_owned(),
        pod.ip(),
        pod.netns_path().to_owned(),
        pod.netns().inode(),
        pod.netns().cookie().unwrap(),
    );
    mesh.executor.kill().unwrap();
    mesh.broker.kill().unwrap();
    mesh.proxy.take().unwrap().kill().unwrap();
    pod.delete().unwrap();
    let other = reuse(inode);
    assert_ne!(other.cookie().unwrap(), cookie);
    // The same path, number, interface name and address: only the cookie tells them apart.
    let place = Place::from(&other);
    for args in [
        &["link", "set", "lo", "up"][..],
        &["link", "add", "eth0", "type", "veth", "peer", "name", "peer0"],
        &["link", "set", "peer0", "up"],
        &["addr", "add", &format!("{ip}/16"), "dev", "eth0"],
        &["link", "set", "eth0", "up"],
    ] {
        text(&place, "ip", args, b"").unwrap();
    }
    std::fs::write(&path, "").unwrap();
    let source = format!("/proc/{}/fd/{}", std::process::id(), other.as_fd().as_raw_fd());
    text(
        mesh.node().place(),
        "mount",
        &["--bind", &source, path.to_str().unwrap()],
        b"",
    )
    .unwrap();
    let before = rules_of(&other).unwrap();
    let monitor = RuleMonitor::start(&other, mesh.node().dir(), "other").unwrap();
    mesh.executor.start_again().unwrap();
    mesh.broker.start_again().unwrap();
    mesh.wait_serving().unwrap();
    mesh.start_proxy().unwrap();
    mesh.wait_state(&healthy, PodState::Enrolled, PATIENCE).unwrap();
    let told = || {
        mesh.pods()
            .unwrap()
            .into_iter()
            .find(|status| status.pod.as_ref().is_some_and(|pod| pod.uid == uid))
    };
    poll_true("the pod is reported", PATIENCE, || {
        told().is_some_and(|status| matches!(status.state(), PodState::Broken | PodState::Pending))
    })
    .unwrap();
    // Beyond several attempts of the executor to find lost namespaces, which are 2 s apart.
    let until = std::time::Instant::now() + Duration::from_secs(6);
    poll_true("time passes", PATIENCE, || {
        assert_ne!(told().unwrap().state(), PodState::Enrolled);
        std::time::Instant::now() >= until
    })
    .unwrap();
    assert_eq!(rules_of(&other).unwrap(), before);
    assert!(!mesh.control().counts().unwrap().workloads.contains_key(&uid));
    let reason = told().unwrap();
    assert!(!reason.reason.is_empty(), "{reason:?}");
    monitor.silent().unwrap();
}

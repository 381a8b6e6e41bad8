//! What is gone is let go of: no descriptor, no interface and no rule outlives its pod by more than 2 s.

use sluice_integration::descriptors::{LET_GO, wait_let_go};
use sluice_integration::mesh::Mesh;
use sluice_integration::scene::{PATIENCE, mesh_pod};
use sluice_testkit::cni::Attachment;
use sluice_testkit::netns::Place;
use sluice_testkit::pod::Pod;
use sluice_testkit::process::json;
use sluice_testkit::process::text;
use sluice_testkit::wait::poll_true;

fn node() -> Mesh {
    let mesh = Mesh::start().unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    mesh
}

/// Ends a pod in some way and asserts that nothing of it is left, while another pod is not touched.
fn is_let_go(mesh: &Mesh, end: impl FnOnce(&Pod, &Pod)) {
    let other = mesh_pod(mesh, "other").unwrap();
    let pod = mesh_pod(mesh, "leaving").unwrap();
    let (inode, veth, uid, ip) = (
        pod.netns().inode(),
        pod.host_ifname().to_owned(),
        pod.uid().to_owned(),
        pod.ip(),
    );
    end(&pod, &other);
    pod.delete().unwrap();
    wait_let_go(mesh, inode, &veth, LET_GO).unwrap();
    let held = || mesh.control().counts().unwrap().workloads;
    poll_true("the proxy was told", PATIENCE, || !held().contains_key(&uid)).unwrap();
    let sets = || {
        json(&Place::from(mesh.node().netns()), "nft", &["-j", "list", "sets"])
            .unwrap()
            .to_string()
    };
    poll_true("the probe set forgets", PATIENCE, || {
        !sets().contains(&format!("\"{ip}\""))
    })
    .unwrap();
    assert!(held().contains_key(other.uid()) && sets().contains(&format!("\"{}\"", other.ip())));
    poll_true("one sandbox is left", PATIENCE, || {
        mesh.node_status().unwrap().executor.unwrap().sandboxes == 1
    })
    .unwrap();
}

#[test]
fn a_deleted_attachment_is_let_go() {
    let mesh = node();
    is_let_go(&mesh, |pod, _| drop(mesh.del(pod).unwrap().ok().unwrap()));
}

#[test]
fn a_delete_without_a_netns_path_lets_go_all_the_same() {
    let mesh = node();
    is_let_go(&mesh, |pod, _| {
        let attachment = Attachment {
            netns: String::new(),
            ..Attachment::from(pod)
        };
        mesh.chain()
            .unwrap()
            .del(&attachment, None)
            .unwrap()
            .ok()
            .unwrap();
    });
}

#[test]
fn what_the_runtime_no_longer_lists_is_let_go() {
    let mesh = node();
    is_let_go(&mesh, |_, other| {
        mesh.chain_with("1.1.0", Vec::new())
            .unwrap()
            .gc(&[Attachment::from(other)])
            .unwrap()
            .ok()
            .unwrap();
    });
}

/// The runtime forgets to tell; the source does not.
#[test]
fn a_deleted_pod_is_let_go_without_a_delete() {
    let mesh = node();
    is_let_go(&mesh, |pod, _| mesh.manifests.delete_pod(pod).unwrap());
}

#[test]
fn a_pod_whose_interface_vanishes_is_let_go() {
    let mesh = node();
    is_let_go(&mesh, |pod, _| {
        let link = ["link", "del", pod.host_ifname()];
        text(mesh.node().place(), "ip", &link, b"").unwrap();
    });
}

#[test]
fn a_delete_that_found_no_executor_is_made_up_for_when_it_is_back() {
    let mesh = node();
    is_let_go(&mesh, |pod, _| {
        mesh.executor.kill().unwrap();
        mesh.del(pod).unwrap().ok().unwrap();
        assert_eq!(
            std::fs::read_dir(mesh.run.tombstones()).unwrap().count(),
            1,
            "no tombstone"
        );
        mesh.executor.start_again().unwrap();
        mesh.wait_serving().unwrap();
    });
    assert_eq!(
        std::fs::read_dir(mesh.run.tombstones()).unwrap().count(),
        0,
        "the tombstone stays"
    );
}

#[test]
fn an_enrolled_pods_netns_can_be_removed_at_any_time() {
    let mesh = node();
    let pod = mesh_pod(&mesh, "pod").unwrap();
    let path = pod.netns_path().to_owned();
    // As `ip netns del` and the runtimes do it: lazily.
    text(
        mesh.node().place(),
        "umount",
        &["--lazy", path.to_str().unwrap()],
        b"",
    )
    .unwrap();
    std::fs::remove_file(&path).unwrap();
    for process in sluice_integration::descriptors::processes(&mesh) {
        let mounts = std::fs::read_to_string(format!("/proc/{}/mountinfo", process.pid())).unwrap();
        assert!(
            !mounts.contains(path.to_str().unwrap()),
            "{} still has the mount",
            process.name()
        );
    }
    mesh.del(&pod).unwrap().ok().unwrap();
    let (inode, veth) = (pod.netns().inode(), pod.host_ifname().to_owned());
    drop(pod);
    wait_let_go(&mesh, inode, &veth, LET_GO).unwrap();
}

//! Nobody keeps a netns: not after DEL, not when it is removed under our feet.

use std::path::Path;
use std::time::Duration;

use sluice_integration::adds::mesh_with;
use sluice_integration::descriptors::{LET_GO, all_processes, holders, wait_let_go};
use sluice_integration::kernel_state::{Traces, sandbox_files};
use sluice_integration::manifests::PodOptions;
use sluice_integration::mesh::{Mesh, MeshOptions};
use sluice_integration::scene::{PATIENCE, mesh_pod};
use sluice_testkit::netns::Place;
use sluice_testkit::process::text;
use sluice_testkit::wait::poll_true;

fn start() -> Mesh {
    mesh_with(MeshOptions::default()).unwrap()
}

#[test]
fn two_seconds_after_del_nobody_holds_the_netns() {
    let mesh = start();
    let traces = Traces::of(&mesh).unwrap();
    for mode in ["ambient", "none"] {
        let pod = mesh.node().pod(mode).dual_stack().create().unwrap();
        mesh.manifests.pod(&pod, &PodOptions::mode(mode)).unwrap();
        mesh.add(&pod).unwrap().ok().unwrap();
        let inode = pod.netns().inode();
        let held = holders(&mesh, inode).unwrap();
        let names = |name: &str| held.iter().any(|holder| holder.starts_with(name));
        assert!(
            names("netns-executor") && names("standin-proxy") == (mode == "ambient"),
            "{held:?}"
        );
        assert!(!names("netns-opener"), "{held:?}");
        mesh.del(&pod).unwrap().ok().unwrap();
        let interface = pod.host_ifname().to_owned();
        // The sandbox itself may stay as long as the runtime likes; only we must let go.
        poll_true("nobody holds it", LET_GO, || {
            holders(&mesh, inode).unwrap().is_empty()
        })
        .unwrap_or_else(|late| panic!("{mode}: {late}: {:?}", holders(&mesh, inode)));
        pod.delete().unwrap();
        wait_let_go(&mesh, inode, &interface, LET_GO).unwrap();
    }
    traces.wait_restored(&mesh, PATIENCE).unwrap();
}

/// As `ip netns del` and container runtimes do: unmount (`MNT_DETACH`) and unlink.
fn removed(place: &Place, path: &Path) {
    text(place, "umount", &["--lazy", &path.display().to_string()], b"").unwrap();
    place.run(|| std::fs::remove_file(path)).unwrap();
}

#[test]
fn the_netns_of_an_enrolled_pod_can_be_removed_at_any_time() {
    let mesh = start();
    // While it is enrolled.
    let pod = mesh_pod(&mesh, "enrolled").unwrap();
    removed(mesh.node().place(), pod.netns_path());
    mesh.del(&pod).unwrap().ok().unwrap();
    // While it is being added.
    let pod = mesh.node().pod("adding").create().unwrap();
    mesh.manifests.pod(&pod, &PodOptions::default()).unwrap();
    let before = sandbox_files(&mesh).unwrap();
    let plugin = mesh.start_add(&pod).unwrap();
    poll_true("the ADD has reached the executor", PATIENCE, || {
        sandbox_files(&mesh).unwrap() != before
    })
    .unwrap();
    removed(mesh.node().place(), pod.netns_path());
    // It has what it needs already: either answer is right, none may hang.
    assert!(plugin.wait().unwrap().elapsed < Duration::from_secs(11));
    mesh.del(&pod).unwrap().ok().unwrap();
    assert_eq!(sandbox_files(&mesh).unwrap(), before);
}

#[test]
fn nobody_mounts_or_inherits_the_netns_directory() {
    let mesh = start();
    let pod = mesh_pod(&mesh, "web").unwrap();
    let directory = mesh.node().netns_dir().display().to_string();
    let mounts = |pid: &str| {
        let table = std::fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
        table.lines().filter(|line| line.contains(&directory)).count()
    };
    // The one mount of the pod's netns, in the node's own mount namespace, which the services share here.
    for (name, pid) in all_processes(&mesh).unwrap() {
        assert_eq!(mounts(&pid.to_string()), 1, "{name}");
    }
    mesh.del(&pod).unwrap().ok().unwrap();
    pod.delete().unwrap();
    for (name, pid) in all_processes(&mesh).unwrap() {
        assert_eq!(mounts(&pid.to_string()), 0, "{name}");
    }
}

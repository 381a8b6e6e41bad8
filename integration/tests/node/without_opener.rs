//! A node without an opener: the plugin hands over what only it can reach, in the ADDs that come anyway.

use sluice_integration::adds::mesh_with;
use sluice_integration::kernel_state::probe_addresses;
use sluice_integration::manifests::PodOptions;
use sluice_integration::mesh::{Mesh, MeshOptions, SOON};
use sluice_integration::netns_state::redirects;
use sluice_integration::scene::mesh_pod;
use sluice_proto::pb::workload::PodState;
use sluice_proto::wanted::Wanted;
use sluice_testkit::wait::poll_true;

fn start() -> Mesh {
    mesh_with(MeshOptions {
        without_opener: true,
        executor: vec!["--no-opener".to_owned()],
        ..MeshOptions::default()
    })
    .unwrap()
}

fn lacks_nothing(mesh: &Mesh) -> bool {
    Wanted::read(&mesh.run.wanted()).unwrap().is_empty()
}

#[test]
fn the_first_add_brings_the_hosts_namespace_along() {
    let mesh = start();
    assert!(Wanted::read(&mesh.run.wanted()).unwrap().host);
    let pod = mesh_pod(&mesh, "web").unwrap();
    mesh.wait_state(&pod, PodState::Enrolled, SOON).unwrap();
    let probed = probe_addresses(&mesh).unwrap();
    for address in pod.addresses() {
        assert!(probed.contains(address), "{address} not in {probed:?}");
    }
    let executor = mesh.node_status().unwrap().executor.unwrap();
    assert!(executor.host_reachable && !executor.opener_connected);
    poll_true("nothing is lacking", SOON, || lacks_nothing(&mesh)).unwrap();
}

#[test]
fn after_a_restart_the_next_add_brings_the_namespaces_of_all_pods_along() {
    let mesh = start();
    let pods: Vec<_> = ["one", "two", "three"]
        .map(|name| mesh_pod(&mesh, name).unwrap())
        .into();
    mesh.executor.kill().unwrap();
    mesh.executor.start_again().unwrap();
    mesh.wait_serving().unwrap();
    let wanted = Wanted::read(&mesh.run.wanted()).unwrap();
    assert!(wanted.host);
    assert_eq!(wanted.sandboxes.len(), pods.len(), "{wanted:?}");
    mesh_pod(&mesh, "next").unwrap();
    for pod in &pods {
        mesh.wait_state(pod, PodState::Enrolled, SOON).unwrap();
    }
    poll_true("nothing is lacking", SOON, || lacks_nothing(&mesh)).unwrap();
    // The executor can work in it again.
    mesh.manifests.pod(&pods[0], &PodOptions::mode("none")).unwrap();
    poll_true("nothing is redirected any more", SOON, || {
        redirects(pods[0].netns()).is_ok_and(|redirects| !redirects)
    })
    .unwrap();
}

#[test]
fn a_running_pod_is_enrolled_although_its_connections_cannot_be_listed() {
    let mesh = start();
    let pod = mesh.node().pod("web").create().unwrap();
    mesh.manifests.pod(&pod, &PodOptions::mode("none")).unwrap();
    mesh.add(&pod).unwrap().ok().unwrap();
    mesh.manifests.pod(&pod, &PodOptions::mode("ambient")).unwrap();
    mesh.wait_state(&pod, PodState::Enrolled, SOON).unwrap();
    let executor = mesh.node_status().unwrap().executor.unwrap();
    assert_eq!(executor.unlisted_enrolments, 1);
}

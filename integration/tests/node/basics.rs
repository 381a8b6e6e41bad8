//! One pod through the whole product.

use std::net::SocketAddr;
use std::time::Duration;

use sluice_integration::mesh::{Mesh, SOON};
use sluice_proto::pb::workload::PodState;
use sluice_testkit::netns::Place;
use sluice_testkit::process;
use sluice_testkit::traffic::client::fetch;
use sluice_testkit::traffic::server::EchoServer;

use sluice_integration::manifests::PodOptions;

#[test]
fn a_mesh_pods_traffic_goes_through_the_proxy_and_a_plain_pods_does_not() {
    let mesh = Mesh::start().unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    let client = mesh.node().pod("client").dual_stack().create().unwrap();
    let server = mesh.node().pod("server").dual_stack().create().unwrap();
    let plain = mesh.node().pod("plain").dual_stack().create().unwrap();
    mesh.manifests.pod(&client, &PodOptions::default()).unwrap();
    mesh.manifests.pod(&server, &PodOptions::default()).unwrap();
    let outsider = mesh.node().pod("outsider").dual_stack().create().unwrap();
    mesh.manifests.pod(&plain, &PodOptions::mode("none")).unwrap();
    mesh.manifests.pod(&outsider, &PodOptions::mode("none")).unwrap();
    for pod in [&client, &server, &plain, &outsider] {
        mesh.add(pod).unwrap().ok().unwrap();
    }
    mesh.wait_state(&client, PodState::Enrolled, SOON).unwrap();
    mesh.wait_state(&server, PodState::Enrolled, SOON).unwrap();
    let _app = EchoServer::start(server.netns(), 8080).unwrap();
    for (from, to) in client.addresses().iter().zip(server.addresses()) {
        let target = SocketAddr::new(*to, 8080);
        let seen = fetch(client.netns(), target, Duration::from_secs(3)).unwrap();
        assert_eq!(seen.peer.ip(), *from);
    }
    let families = u64::try_from(client.addresses().len()).unwrap();
    let report = mesh.control().report().unwrap();
    assert_eq!(report.workloads[client.uid()].counts.outbound, families);
    assert_eq!(report.workloads[server.uid()].counts.inbound, families);

    let _outside = EchoServer::start(outsider.netns(), 8080).unwrap();
    for (from, to) in plain.addresses().iter().zip(outsider.addresses()) {
        let seen = fetch(plain.netns(), SocketAddr::new(*to, 8080), Duration::from_secs(3)).unwrap();
        assert_eq!(seen.peer.ip(), *from);
    }
    let report = mesh.control().report().unwrap();
    let held: Vec<_> = report.workloads.keys().map(String::as_str).collect();
    for pod in [&plain, &outsider] {
        assert!(!held.contains(&pod.uid()), "{} is with the proxy", pod.name());
        let rules = process::text(&Place::from(pod.netns()), "nft", &["list", "ruleset"], &[]).unwrap();
        assert_eq!(rules.trim(), "", "rules in {}", pod.name());
    }
}

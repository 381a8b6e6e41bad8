//! The plugin as a network of its own, called in the order in which Multus calls networks: the cluster's first, by a chain in
//! which Sluice is not, then for a pod that names it ours, under the name of a further interface and without the result of the first.
//! Behind the real `bridge` and `host-local` plugins.

use std::net::IpAddr;
use std::path::Path;

use serde_json::{Value, json};
use sluice_integration::adds::{mesh_with, refused};
use sluice_integration::descriptors::{LET_GO, wait_let_go};
use sluice_integration::kernel_state::{probe_addresses, sandbox_files};
use sluice_integration::manifests::PodOptions;
use sluice_integration::mesh::{Mesh, MeshOptions};
use sluice_integration::scene::PATIENCE;
use sluice_proto::pb::workload::PodState;
use sluice_testkit::cni::{Attachment, Chain};
use sluice_testkit::netns::Place;
use sluice_testkit::pod::Pod;
use sluice_testkit::process::{binary, json, text};

use crate::cni_chain::{assert_in_the_mesh, loopback};

/// The two networks of a node with Multus.
struct Networks {
    cluster: Chain,
    ours: Chain,
}

impl Networks {
    fn of(mesh: &Mesh) -> Self {
        let data = mesh.node().dir().join("leases");
        let bridge = Chain::bridge_plugin("cni1", "10.88.0.0/24", &data);
        let conf = configuration(mesh);
        let word = |key: &str| conf[key].as_str().unwrap().to_owned();
        let plugin = binary("sluice-cni").unwrap();
        let ours = Chain::new(
            mesh.node().place(),
            &word("name"),
            &word("cniVersion"),
            vec![conf.clone()],
        );
        Self {
            cluster: Chain::new(mesh.node().place(), "podnet", "1.0.0", vec![bridge]),
            ours: ours.bin_dir(plugin.parent().unwrap()),
        }
    }
}

/// The file that the installer would write on this node, taken from its plan.
fn configuration(mesh: &Mesh) -> Value {
    let root = mesh.node().dir().join("installer");
    let (net, bin) = (root.join("net.d"), root.join("bin"));
    for directory in [&net, &bin] {
        std::fs::create_dir_all(directory).unwrap();
    }
    let plugin = binary("sluice-cni").unwrap();
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let args = [
        ("--run-dir", mesh.run.root()),
        ("--cni-net-dir", &net),
        ("--cni-bin-dir", &bin),
        ("--source-dir", plugin.parent().unwrap()),
    ];
    let args = args.map(|(flag, value)| [flag.to_owned(), path(value)]).concat();
    let mut command = vec!["plan", "--mode", "stand-alone"];
    command.extend(args.iter().map(String::as_str));
    let installer = path(&binary("installer").unwrap());
    let plan = text(mesh.node().place(), &installer, &command, b"").unwrap();
    let added = plan.lines().filter(|line| !line.starts_with("+++"));
    let added: String = added.filter_map(|line| line.strip_prefix('+')).collect();
    serde_json::from_str(&added).unwrap_or_else(|error| panic!("{error}: {plan}"))
}

/// A pod in the cluster's network, and what that network said.
struct Sandbox {
    pod: Pod,
    result: Value,
    address: IpAddr,
    host_ifname: String,
}

fn sandbox(mesh: &Mesh, networks: &Networks, name: &str) -> Sandbox {
    let pod = mesh.node().pod(name).create_unwired().unwrap();
    let options = PodOptions {
        without_addresses: true,
        ..PodOptions::default()
    };
    mesh.manifests.pod(&pod, &options).unwrap();
    loopback(mesh, &pod);
    let added = networks
        .cluster
        .add(&Attachment::from(&pod), None)
        .unwrap()
        .ok()
        .unwrap();
    let result = added.result.unwrap();
    let address = result["ips"][0]["address"].as_str().unwrap();
    let address = address.split('/').next().unwrap().parse().unwrap();
    let names = result["interfaces"].as_array().unwrap().iter();
    let mut names = names.map(|interface| interface["name"].as_str().unwrap().to_owned());
    let host_ifname = names.find(|name| name.starts_with("veth")).unwrap();
    Sandbox {
        pod,
        result,
        address,
        host_ifname,
    }
}

/// As Multus names the first further network of a pod.
fn further(pod: &Pod) -> Attachment {
    Attachment {
        ifname: "net1".to_owned(),
        ..Attachment::from(pod)
    }
}

fn interfaces(pod: &Pod) -> Vec<String> {
    let links = json(&Place::from(pod.netns()), "ip", &["-j", "link"]).unwrap();
    let links = links.as_array().unwrap().iter();
    links
        .map(|link| link["ifname"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn pods_that_name_the_network_are_enrolled_before_they_start_and_others_are_not_asked_about() {
    let mesh = mesh_with(MeshOptions::default()).unwrap();
    let networks = Networks::of(&mesh);
    let [client, server] = ["client", "server"].map(|name| sandbox(&mesh, &networks, name));
    // So far nobody has called us.
    assert!(sandbox_files(&mesh).unwrap().is_empty());
    for added in [&client, &server] {
        let before = interfaces(&added.pod);
        let outcome = networks
            .ours
            .add(&further(&added.pod), None)
            .unwrap()
            .ok()
            .unwrap();
        assert_eq!(outcome.result, Some(json!({ "cniVersion": "0.4.0" })));
        assert_eq!(interfaces(&added.pod), before);
        mesh.wait_state(&added.pod, PodState::Enrolled, PATIENCE).unwrap();
    }
    // Addresses are read from the interface, since nobody told them.
    assert_in_the_mesh(
        &mesh,
        (&client.pod, client.address),
        (&server.pod, server.address),
    );

    for added in [client, server] {
        let attachment = further(&added.pod);
        let own = json!({ "cniVersion": "0.4.0" });
        networks
            .ours
            .check(&attachment, Some(&own))
            .unwrap()
            .ok()
            .unwrap();
        networks.ours.del(&attachment, Some(&own)).unwrap().ok().unwrap();
        let first = Attachment::from(&added.pod);
        networks
            .cluster
            .del(&first, Some(&added.result))
            .unwrap()
            .ok()
            .unwrap();
        let inode = added.pod.netns().inode();
        added.pod.delete().unwrap();
        wait_let_go(&mesh, inode, &added.host_ifname, LET_GO).unwrap();
    }
    assert!(probe_addresses(&mesh).unwrap().is_empty());
    assert!(sandbox_files(&mesh).unwrap().is_empty());
}

#[test]
fn a_result_of_the_primary_is_passed_on_and_the_pod_enrolled_the_same() {
    let mesh = mesh_with(MeshOptions::default()).unwrap();
    let networks = Networks::of(&mesh);
    let added = sandbox(&mesh, &networks, "web");
    let outcome = networks
        .ours
        .add(&further(&added.pod), Some(&added.result))
        .unwrap()
        .ok()
        .unwrap();
    assert_eq!(outcome.result, Some(added.result));
    mesh.wait_state(&added.pod, PodState::Enrolled, PATIENCE).unwrap();
    assert_eq!(probe_addresses(&mesh).unwrap(), [added.address].into());
    // A second time, as for a pod that names the network twice.
    let again = Attachment {
        ifname: "net2".to_owned(),
        ..further(&added.pod)
    };
    networks.ours.add(&again, None).unwrap().ok().unwrap();
    assert_eq!(sandbox_files(&mesh).unwrap().len(), 1);
}

#[test]
fn without_the_primarys_interface_the_pod_is_refused() {
    let mesh = mesh_with(MeshOptions::default()).unwrap();
    let networks = Networks::of(&mesh);
    let pod = mesh.node().pod("early").create_unwired().unwrap();
    mesh.manifests.pod(&pod, &PodOptions::default()).unwrap();
    let outcome = networks.ours.add(&further(&pod), None).unwrap();
    let error = refused(&outcome, "EXE-GONE", "netns-executor", &pod);
    assert!(error.msg.contains("no interface eth0 yet"), "{error:?}");
    assert!(sandbox_files(&mesh).unwrap().is_empty());
}

//! Behind the real `bridge` and `host-local` plugins, as on a node. Needs root and containernetworking-plugins.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use sluice_integration::adds::mesh_with;
use sluice_integration::descriptors::{LET_GO, wait_let_go};
use sluice_integration::kernel_state::{probe_addresses, sandbox_files};
use sluice_integration::manifests::PodOptions;
use sluice_integration::mesh::{Mesh, MeshOptions};
use sluice_integration::scene::{APP_PORT, PATIENCE};
use sluice_proto::pb::workload::PodState;
use sluice_testkit::cni::{Attachment, Chain};
use sluice_testkit::pod::Pod;
use sluice_testkit::traffic::client::fetch;
use sluice_testkit::traffic::server::EchoServer;

const ANSWER: Duration = Duration::from_secs(5);

struct Added {
    pod: Pod,
    result: Value,
    address: IpAddr,
    host_ifname: String,
}

/// A pod whose interface and address come from the chain; its manifest has no address yet, as on a node.
fn add(mesh: &Mesh, chain: &Chain, name: &str) -> Added {
    let pod = mesh.node().pod(name).create_unwired().unwrap();
    mesh.manifests
        .pod(
            &pod,
            &PodOptions {
                without_addresses: true,
                ..PodOptions::default()
            },
        )
        .unwrap();
    loopback(mesh, &pod);
    let result = chain
        .add(&Attachment::from(&pod), None)
        .unwrap()
        .ok()
        .unwrap()
        .result
        .unwrap();
    let text = result["ips"][0]["address"].as_str().unwrap();
    let address = text.split('/').next().unwrap().parse().unwrap();
    let interfaces = result["interfaces"].as_array().unwrap();
    let veth = interfaces
        .iter()
        .find(|i| i["name"].as_str().unwrap().starts_with("veth"))
        .unwrap();
    let host_ifname = veth["name"].as_str().unwrap().to_owned();
    mesh.wait_state(&pod, PodState::Enrolled, PATIENCE).unwrap();
    Added {
        pod,
        result,
        address,
        host_ifname,
    }
}

/// What runtimes do before anything else.
pub(crate) fn loopback(mesh: &Mesh, pod: &Pod) {
    let plugins = vec![json!({ "type": "loopback" })];
    let chain = Chain::new(mesh.node().place(), "cni-loopback", "0.3.1", plugins);
    let attachment = Attachment {
        ifname: "lo".to_owned(),
        ..Attachment::from(pod)
    };
    chain.add(&attachment, None).unwrap().ok().unwrap();
}

/// Two enrolled pods: their addresses are known, what one asks of the other goes through the proxy on both sides, and the host's
/// probes come from the probe address.
pub(crate) fn assert_in_the_mesh(mesh: &Mesh, client: (&Pod, IpAddr), server: (&Pod, IpAddr)) {
    assert_eq!(probe_addresses(mesh).unwrap(), [client.1, server.1].into());
    let app = EchoServer::start(server.0.netns(), APP_PORT).unwrap();
    let target = SocketAddr::new(server.1, app.port());
    let seen = fetch(client.0.netns(), target, ANSWER).unwrap();
    assert_eq!((seen.peer.ip(), seen.local), (client.1, target));
    let probe = fetch(mesh.node().netns(), target, ANSWER).unwrap();
    assert_eq!(probe.peer.ip(), IpAddr::from([169, 254, 7, 127]));
    let workloads = mesh.control().counts().unwrap().workloads;
    let (sent, received) = (workloads[client.0.uid()].counts, workloads[server.0.uid()].counts);
    assert_eq!((sent.outbound, received.inbound), (1, 1));
}

fn leases(data: &Path) -> usize {
    let network = data.join(sluice_integration::mesh::NETWORK);
    let names = std::fs::read_dir(network)
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    names
        .filter(|name| name.to_string_lossy().parse::<IpAddr>().is_ok())
        .count()
}

fn through_the_chain(version: &str) {
    let mesh = mesh_with(MeshOptions::default()).unwrap();
    let data = mesh.node().dir().join("leases");
    let bridge = Chain::bridge_plugin("cni1", "10.88.0.0/24", &data);
    let chain = mesh.chain_with(version, vec![bridge]).unwrap();
    let (client, server) = (add(&mesh, &chain, "client"), add(&mesh, &chain, "server"));
    assert_eq!(client.result["cniVersion"], version);
    assert_in_the_mesh(
        &mesh,
        (&client.pod, client.address),
        (&server.pod, server.address),
    );
    for added in [client, server] {
        let attachment = Attachment::from(&added.pod);
        chain
            .check(&attachment, Some(&added.result))
            .unwrap()
            .ok()
            .unwrap();
        chain.del(&attachment, Some(&added.result)).unwrap().ok().unwrap();
        let inode = added.pod.netns().inode();
        added.pod.delete().unwrap();
        wait_let_go(&mesh, inode, &added.host_ifname, LET_GO).unwrap();
    }
    assert_eq!(leases(&data), 0);
    assert!(probe_addresses(&mesh).unwrap().is_empty());
    assert!(sandbox_files(&mesh).unwrap().is_empty());
}

#[test]
fn pods_of_the_real_bridge_plugin_are_added_talk_and_go() {
    through_the_chain("1.0.0");
}

#[test]
fn the_same_in_an_older_version_of_the_specification() {
    through_the_chain("0.4.0");
}

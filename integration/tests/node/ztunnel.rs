//! The same traffic through a real ztunnel, where `ZTUNNEL_BIN` names one. It must be built with its `testing` feature, because
//! certificates come from its built-in CA. `make test` runs these tests if `ZTUNNEL_BIN` is set and lists them as ignored otherwise.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use sluice_integration::manifests::PodOptions;
use sluice_integration::mesh::{Mesh, MeshOptions, SOON};
use sluice_proto::pb::workload::PodState;
use sluice_testkit::netns::Netns;
use sluice_testkit::pod::Pod;
use sluice_testkit::process::{Process, Spawn};
use sluice_testkit::traffic::client::{Load, LoadOptions, fetch};
use sluice_testkit::traffic::server::EchoServer;

const NODE: &str = "local";
const READINESS_PORT: u16 = 15021;
const STATS_PORT: u16 = 15020;

struct Ztunnel {
    process: Process,
    netns: Netns,
}

impl Ztunnel {
    fn start(mesh: &Mesh, pods: &[&Pod]) -> Self {
        let program = PathBuf::from(std::env::var_os("ZTUNNEL_BIN").expect("ZTUNNEL_BIN names a ztunnel"));
        let workloads: Vec<_> = pods.iter().map(|pod| workload(pod)).collect();
        let config = mesh.node().dir().join("ztunnel.yaml");
        let document = serde_json::json!({ "workloads": workloads, "policies": [], "services": [] });
        std::fs::write(&config, document.to_string()).unwrap();
        let netns = Netns::new().unwrap();
        netns.run(|| {
            let route = sluice_testkit::netlink::RouteSocket::open().unwrap();
            route.set_up(1, true).unwrap();
        });
        let process = Spawn::program("ztunnel", program)
            .env("INPOD_UDS", mesh.run.zds_socket())
            .env("LOCAL_XDS_PATH", &config)
            .env("XDS_ADDRESS", "")
            .env("FAKE_CA", "true")
            .env("NODE_NAME", NODE)
            .env("PROXY_MODE", "shared")
            .env("RUST_LOG", "info")
            .place(mesh.node().place_with(&netns))
            .log(mesh.node().dir().join("ztunnel.log"))
            .start()
            .unwrap();
        Self { process, netns }
    }

    fn http(&self, port: u16, path: &str) -> std::io::Result<String> {
        self.netns.run(|| {
            let mut stream = TcpStream::connect(("127.0.0.1", port))?;
            stream.set_read_timeout(Some(Duration::from_secs(2)))?;
            write!(
                stream,
                "GET {path} HTTP/1.1\r\nhost: ztunnel\r\nconnection: close\r\n\r\n"
            )?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        })
    }

    fn wait_ready(&self) {
        let ready = || {
            self.http(READINESS_PORT, "/healthz/ready")
                .is_ok_and(|answer| answer.contains(" 200 "))
        };
        self.process.wait_ready(SOON, ready).unwrap();
    }

    /// Connections that ztunnel says it opened between the pods, with mutual TLS.
    fn opened_with_mtls(&self) -> u64 {
        let metrics = self.http(STATS_PORT, "/metrics").unwrap();
        metrics
            .lines()
            .filter(|line| line.starts_with("istio_tcp_connections_opened_total{"))
            .filter(|line| line.contains("connection_security_policy=\"mutual_tls\""))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
            .sum()
    }
}

fn workload(pod: &Pod) -> serde_json::Value {
    let ips: Vec<_> = pod.addresses().iter().map(IpAddr::to_string).collect();
    serde_json::json!({
        "uid": format!("cluster1//v1/Pod/{}/{}", pod.namespace(), pod.name()),
        "name": pod.name(), "namespace": pod.namespace(), "serviceAccount": "default",
        "workloadIps": ips, "protocol": "HBONE", "node": NODE, "network": "", "services": {},
    })
}

fn node_with_two_pods() -> (Mesh, Pod, Pod) {
    let mesh = Mesh::start_with(MeshOptions {
        without_proxy: true,
        ..MeshOptions::default()
    })
    .unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    let client = mesh.node().pod("client").dual_stack().create().unwrap();
    let server = mesh.node().pod("server").dual_stack().create().unwrap();
    mesh.manifests.pod(&client, &PodOptions::default()).unwrap();
    mesh.manifests.pod(&server, &PodOptions::default()).unwrap();
    (mesh, client, server)
}

#[test]
#[ignore = "needs ZTUNNEL_BIN"]
fn a_real_ztunnel_takes_the_pods_and_carries_their_traffic_with_mutual_tls() {
    let (mesh, client, server) = node_with_two_pods();
    let ztunnel = Ztunnel::start(&mesh, &[&client, &server]);
    for pod in [&client, &server] {
        mesh.add(pod).unwrap().ok().unwrap();
        mesh.wait_state(pod, PodState::Enrolled, SOON).unwrap();
    }
    ztunnel.wait_ready();
    let _app = EchoServer::start(server.netns(), 8080).unwrap();
    for (from, to) in client.addresses().iter().zip(server.addresses()) {
        let seen = fetch(client.netns(), SocketAddr::new(*to, 8080), SOON)
            .unwrap_or_else(|error| panic!("{to}: {error}\n{}", ztunnel.process.log_text()));
        assert_eq!(
            seen.peer.ip(),
            *from,
            "the application sees the client's own address"
        );
    }
    assert!(ztunnel.opened_with_mtls() >= 2, "{}", ztunnel.process.log_text());
}

#[test]
#[ignore = "needs ZTUNNEL_BIN"]
fn a_real_ztunnel_survives_restarts_of_the_agent_and_lets_a_pod_leave_without_loss() {
    let (mesh, client, server) = node_with_two_pods();
    let ztunnel = Ztunnel::start(&mesh, &[&client, &server]);
    for pod in [&client, &server] {
        mesh.add(pod).unwrap().ok().unwrap();
    }
    ztunnel.wait_ready();
    let _app = EchoServer::start(server.netns(), 8080).unwrap();
    let load = Load::start(
        client.netns(),
        LoadOptions::new(SocketAddr::new(server.ip(), 8080)),
    )
    .unwrap();
    load.wait_answered(100, SOON).unwrap();
    mesh.broker.kill().unwrap();
    mesh.executor.kill().unwrap();
    mesh.executor.start_again().unwrap();
    mesh.broker.start_again().unwrap();
    mesh.wait_serving().unwrap();
    for pod in [&client, &server] {
        mesh.wait_state(pod, PodState::Enrolled, SOON).unwrap();
    }
    ztunnel.wait_ready();
    mesh.manifests.pod(&client, &PodOptions::mode("none")).unwrap();
    mesh.wait_state(&client, PodState::Draining, SOON).unwrap();
    let answered = load.report().new_answered;
    load.wait_answered(answered + 200, SOON).unwrap();
    load.report().nothing_failed().unwrap();
    drop(load);
    mesh.wait_state(&client, PodState::Out, SOON).unwrap();
    let before = ztunnel.opened_with_mtls();
    fetch(client.netns(), SocketAddr::new(server.ip(), 8080), SOON).unwrap();
    assert_eq!(ztunnel.opened_with_mtls(), before, "a pod that left goes direct");
}

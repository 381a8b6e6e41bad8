//! Pods that run already: found by their processes, never mistaken for another.

use sluice_integration::manifests::PodOptions;
use sluice_integration::mesh::{Mesh, MeshOptions};
use sluice_integration::netns_state::{redirects, rules_of};
use sluice_integration::rule_monitor::RuleMonitor;
use sluice_integration::scene::{APP_PORT, PATIENCE, mesh_pod};
use sluice_integration::uds_http::{Response, get, metric, post};
use sluice_proto::pb::workload::PodState;
use sluice_testkit::cgroup::PodCgroup;
use sluice_testkit::netns::{Netns, Place};
use sluice_testkit::pod::Pod;
use sluice_testkit::process::{Process, Spawn, text};
use sluice_testkit::traffic::client::fetch;
use sluice_testkit::traffic::server::EchoServer;
use sluice_testkit::wait::poll_true;

fn node() -> Mesh {
    let mesh = Mesh::start().unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    mesh
}

/// A process that counts as one of the pod's by its cgroup but is in another netns. It comes first, and so ends before its
/// cgroup is removed.
fn stray(pod: &Pod, container: &str, netns: &Netns) -> (Process, PodCgroup) {
    let cgroup = PodCgroup::create(pod.uid(), container).unwrap();
    let process = Spawn::program("stray", "/bin/sleep")
        .arg("infinity")
        .place(Place::from(netns))
        .cgroup(&cgroup)
        .start()
        .unwrap();
    (process, cgroup)
}

#[test]
fn a_running_pod_is_found_among_processes_that_mislead() {
    let mesh = node();
    let pod = mesh.node().pod("running").create().unwrap();
    let neighbour = mesh.node().pod("neighbour").create().unwrap();
    let elsewhere = [Netns::new().unwrap(), Netns::new().unwrap()];
    let mut strays = vec![
        stray(&pod, "in-the-neighbour", neighbour.netns()),
        stray(&pod, "unshared-with-a-lower-pid", &elsewhere[0]),
        stray(&pod, "monitor-in-the-host", mesh.node().netns()),
    ];
    pod.start_process().unwrap();
    strays.push(stray(&pod, "unshared-with-a-higher-pid", &elsewhere[1]));
    neighbour.start_process().unwrap();
    let host = || text(mesh.node().place(), "nft", &["-s", "list", "ruleset"], b"").unwrap();
    let untouched = [neighbour.netns(), &elsewhere[0], &elsewhere[1]]
        .map(|netns| (netns.clone(), rules_of(netns).unwrap()));
    mesh.manifests.pod(&neighbour, &PodOptions::mode("none")).unwrap();
    mesh.manifests.pod(&pod, &PodOptions::default()).unwrap();
    let status = mesh.wait_state(&pod, PodState::Enrolled, PATIENCE).unwrap();
    assert_eq!(status.netns.unwrap().inode, pod.netns().inode());
    let app = EchoServer::start(neighbour.netns(), APP_PORT).unwrap();
    fetch(pod.netns(), (neighbour.ip(), app.port()).into(), PATIENCE).unwrap();
    assert!(
        mesh.control().counts().unwrap().workloads[pod.uid()]
            .counts
            .outbound
            > 0
    );
    for (netns, before) in untouched {
        assert_eq!(
            rules_of(&netns).unwrap(),
            before,
            "rules in a netns that is not the pod's"
        );
    }
    assert!(!host().contains("redirect"), "the host was programmed");
}

#[test]
fn only_misleading_processes_enrol_nobody() {
    let mesh = node();
    let pod = mesh.node().pod("lost").create().unwrap();
    let neighbour = mesh_pod(&mesh, "neighbour").unwrap();
    let monitor = RuleMonitor::start(neighbour.netns(), mesh.node().dir(), "neighbour").unwrap();
    let _strays = [
        stray(&pod, "in-the-neighbour", neighbour.netns()),
        stray(&pod, "in-the-host", mesh.node().netns()),
    ];
    mesh.manifests.pod(&pod, &PodOptions::default()).unwrap();
    let status = mesh.wait_state(&pod, PodState::Broken, PATIENCE).unwrap();
    assert_eq!(status.reason, "netns-not-found");
    poll_true("it is tried again", PATIENCE, || {
        mesh.pod_state(&pod).unwrap().retries > status.retries + 1
    })
    .unwrap();
    assert!(!redirects(mesh.node().netns()).unwrap());
    monitor.silent().unwrap();
}

#[test]
fn a_pod_without_an_address_stays_pending_and_untouched() {
    let mesh = node();
    let pod = mesh.node().pod("unwired").create_unwired().unwrap();
    pod.start_process().unwrap();
    let before = rules_of(pod.netns()).unwrap();
    mesh.manifests.pod(&pod, &PodOptions::default()).unwrap();
    mesh.wait_state(&pod, PodState::Pending, PATIENCE).unwrap();
    let other = mesh_pod(&mesh, "other").unwrap();
    mesh.wait_state(&other, PodState::Enrolled, PATIENCE).unwrap();
    assert_eq!(mesh.pod_state(&pod).unwrap().state(), PodState::Pending);
    assert_eq!(rules_of(pod.netns()).unwrap(), before);
}

/// What Istio's plugin posts (its `CNIPluginAddEvent`, Go's JSON).
fn event(pod: &Pod) -> String {
    let ips: Vec<_> = pod.addresses().iter().map(|ip| serde_json::json!({ "Interface": 2, "Address": { "IP": ip.to_string(), "Mask": "//8AAA==" }, "Gateway": "10.244.0.1" })).collect();
    serde_json::json!({ "Netns": pod.netns_path(), "PodName": pod.name(), "PodNamespace": pod.namespace(), "IPs": ips }).to_string()
}

fn cmdadd(mesh: &Mesh, body: &str) -> Response {
    let socket = mesh.run.compatibility_socket();
    poll_true("the socket is there", PATIENCE, || socket.exists()).unwrap();
    post(&socket, "/cmdadd", body).unwrap()
}

fn with_istio_plugin() -> MeshOptions {
    MeshOptions {
        broker: vec!["--istio-cni".into()],
        ..MeshOptions::default()
    }
}

#[test]
fn istios_plugin_enrols_a_pod_and_hears_what_is_wrong() {
    let mesh = Mesh::start_with(with_istio_plugin()).unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    let pod = mesh.node().pod("theirs").dual_stack().create().unwrap();
    mesh.manifests.pod(&pod, &PodOptions::default()).unwrap();
    let answer = cmdadd(&mesh, &event(&pod));
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(mesh.pod_state(&pod).unwrap().state(), PodState::Enrolled);
    assert!(redirects(pod.netns()).unwrap());
    assert!(mesh.control().counts().unwrap().workloads.contains_key(pod.uid()));
    for body in [
        "",
        "{",
        "[]",
        r#"{"Netns":"../../x","PodName":"theirs","PodNamespace":"default"}"#,
    ] {
        assert_eq!(cmdadd(&mesh, body).status, 400, "{body:?}");
    }
    let unknown = mesh.node().pod("unknown").create().unwrap();
    assert_eq!(cmdadd(&mesh, &event(&unknown)).status, 500);
    let plain = mesh.node().pod("plain").create().unwrap();
    mesh.manifests.pod(&plain, &PodOptions::mode("none")).unwrap();
    let refused = cmdadd(&mesh, &event(&plain));
    assert!(
        refused.status == 500 && refused.body.contains("not eligible"),
        "{refused:?}"
    );
    assert!(!redirects(plain.netns()).unwrap());
    let text = get(&mesh.run.http_socket(), "/metrics").unwrap().body;
    let count = |code: u16| {
        metric(
            &text,
            &format!("istio_cni_plugin_requests_total{{response_code=\"{code}\"}}"),
        )
    };
    assert_eq!(
        (count(200), count(400), count(500)),
        (Some(1.0), Some(4.0), Some(2.0)),
        "{text}"
    );
}

/// With the broker's production uid and filter.
#[test]
fn sockets_that_another_agent_removes_at_its_end_are_made_again() {
    let mesh = Mesh::start_with(with_istio_plugin()).unwrap();
    let sockets = [
        mesh.run.compatibility_socket(),
        mesh.run.http_socket(),
        mesh.run.workload_socket(),
    ];
    for socket in &sockets {
        std::fs::remove_file(socket).unwrap();
    }
    for socket in &sockets {
        poll_true("the socket is there again", PATIENCE, || socket.exists()).unwrap();
    }
    assert_eq!(cmdadd(&mesh, "").status, 400);
    assert_eq!(get(&mesh.run.http_socket(), "/readyz").unwrap().status, 200);
}

#[test]
fn istios_plugin_is_told_that_there_is_no_opener() {
    let mesh = Mesh::start_with(MeshOptions {
        without_opener: true,
        ..with_istio_plugin()
    })
    .unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    let pod = mesh.node().pod("theirs").create().unwrap();
    mesh.manifests.pod(&pod, &PodOptions::default()).unwrap();
    let answer = cmdadd(&mesh, &event(&pod));
    assert_eq!(answer.status, 501, "{}", answer.body);
    assert!(!redirects(pod.netns()).unwrap());
}

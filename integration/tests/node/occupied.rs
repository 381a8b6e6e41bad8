//! Where somebody listens already a process of ours does not start: it ends, and says whose the place is.

use std::path::Path;
use std::time::Duration;

use sluice_integration::mesh::{Mesh, SOON};
use sluice_integration::scene::mesh_pod;
use sluice_proto::paths::BROKER_UID;
use sluice_testkit::netns::Netns;
use sluice_testkit::node::Node;
use sluice_testkit::process::{Identity, Process, Spawn};
use sluice_testkit::traffic::server::EchoServer;

/// A process that does not start has ended by then.
const BOUND: Duration = Duration::from_secs(5);

/// The line that tells why a second process has ended.
fn told(process: &Process, what: &str) {
    let log = process.log_text();
    assert!(
        log.lines().any(|line| line.contains(what)),
        "{what} is not in\n{log}"
    );
}

#[test]
fn a_second_executor_or_broker_ends_and_the_first_goes_on() {
    let mesh = Mesh::start().unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    let taken = |process: &Process, uid: u32, socket: &Path| {
        let status = process.rival(BOUND).unwrap();
        assert_eq!(status.code(), Some(1), "{}", process.name());
        told(
            process,
            &format!(
                "cannot bind socket {}: process {} (uid {uid}) listens there",
                socket.display(),
                process.pid()
            ),
        );
        assert!(process.is_running());
    };
    taken(&mesh.executor, 0, &mesh.run.cni_socket());
    taken(&mesh.broker, BROKER_UID, &mesh.run.workload_socket());
    // Neither the table nor a socket was touched.
    mesh_pod(&mesh, "added").unwrap();

    // A place whose owner has died is free.
    mesh.executor.restart().unwrap();
    mesh.broker.restart().unwrap();
    mesh.wait_serving().unwrap();
    mesh_pod(&mesh, "after").unwrap();
}

/// A broker of a node of its own, with its run directories, in `netns`.
pub(crate) fn broker(node: &Node, netns: &Netns, args: &[&str]) -> Process {
    let run = node.run_dir();
    let manifests = node.dir().join("manifests");
    std::fs::create_dir_all(&manifests).unwrap();
    Spawn::binary("ambient-broker")
        .unwrap()
        .arg("--run-dir")
        .arg(run.root())
        .arg("--manifests")
        .arg(&manifests)
        .args(args)
        .place(node.place_with(netns))
        .identity(Identity::user(BROKER_UID))
        .log(node.dir().join("broker.log"))
        .start()
        .unwrap()
}

#[test]
fn a_port_that_is_taken_ends_the_broker_which_names_its_owner() {
    let (first, second) = (Node::new().unwrap(), Node::new().unwrap());
    let netns = Netns::new().unwrap();
    for node in [&first, &second] {
        node.prepare_run_dir().unwrap();
    }
    let listens = ["--listen", "127.0.0.1:15020"];
    let owner = broker(&first, &netns, &listens);
    let http = first.run_dir().http_socket();
    owner.wait_ready(SOON, || http.exists()).unwrap();
    let refused = broker(&second, &netns, &listens);
    assert_eq!(refused.wait(BOUND).unwrap().code(), Some(1));
    let pid = owner.pid();
    told(
        &refused,
        &format!("cannot listen on 127.0.0.1:15020, where process {pid} (uid {BROKER_UID}) listens: "),
    );

    // What another user has open may not be looked into, only whose it is.
    let _root = EchoServer::start(&netns, 15021).unwrap();
    let refused = broker(&second, &netns, &["--listen", "127.0.0.1:15021"]);
    assert_eq!(refused.wait(BOUND).unwrap().code(), Some(1));
    told(
        &refused,
        "cannot listen on 127.0.0.1:15021, where a process of uid 0 listens: ",
    );
}

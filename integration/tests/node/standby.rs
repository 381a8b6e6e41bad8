//! Two agents on one node, as during an upgrade: of each service the second stands by, and takes over when the first has
//! ended, however that came about.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};

use nix::sys::signal::Signal;
use sluice_integration::mesh::{Mesh, MeshOptions, SOON};
use sluice_integration::scene::mesh_pod;
use sluice_proto::paths::BROKER_UID;
use sluice_testkit::netns::Netns;
use sluice_testkit::node::Node;
use sluice_testkit::process::Process;

use crate::occupied::broker;
use crate::restart::{ends, survives_with};

/// How often the agent is replaced.
const TIMES: usize = 5;

fn standing_by() -> MeshOptions {
    let flag = vec!["--stand-by".to_owned()];
    MeshOptions {
        executor: flag.clone(),
        opener: flag.clone(),
        broker: flag,
        ..MeshOptions::default()
    }
}

fn services(mesh: &Mesh) -> [&Process; 3] {
    [&mesh.executor, &mesh.broker, mesh.opener.as_ref().unwrap()]
}

/// Starts another one of `process` and waits until it stands by.
fn successor(process: &Process) -> Process {
    let said = || process.log_text().matches("standing by").count();
    let before = said();
    let next = process.beside().unwrap();
    next.wait_ready(SOON, || said() > before).unwrap();
    next
}

#[test]
fn an_upgrade_to_an_agent_that_stands_by_fails_no_request_and_changes_no_rule() {
    survives_with(standing_by(), TIMES, |mesh| {
        let all = services(mesh);
        let next = all.map(successor);
        std::thread::scope(|scope| {
            for process in all {
                scope.spawn(|| ends(process));
            }
        });
        for (process, next) in all.into_iter().zip(next) {
            process.hand_over(next);
        }
    });
}

#[test]
fn whoever_stands_by_takes_over_from_a_process_that_is_killed() {
    survives_with(standing_by(), TIMES, |mesh| {
        for process in services(mesh) {
            let next = successor(process);
            process.kill().unwrap();
            process.hand_over(next);
        }
    });
}

#[test]
fn whoever_stands_by_leaves_the_node_alone_and_ends_when_asked() {
    let mesh = Mesh::start_with(standing_by()).unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    for process in services(&mesh) {
        let next = successor(process);
        mesh_pod(&mesh, &format!("beside-{}", process.name())).unwrap();
        next.terminate(SOON).unwrap();
        assert!(process.is_running(), "{}", process.name());
    }
    mesh_pod(&mesh, "after").unwrap();
}

/// Two containers of one pod share its network namespace, and with it the port of probes.
#[test]
fn a_spare_of_the_same_pod_takes_over_with_the_port() {
    let pod = tempfile::tempdir().unwrap();
    let lease = |container: &str| {
        let directory = pod.path().join(container);
        fs::create_dir(&directory).unwrap();
        ["--pod-lease".to_owned(), directory.display().to_string()]
    };
    fs::set_permissions(pod.path(), Permissions::from_mode(0o755)).unwrap();
    let mut options = standing_by();
    options.executor.extend(lease("executor"));
    options.broker.extend(lease("broker"));
    options
        .broker
        .extend(["--listen".to_owned(), "127.0.0.1:15020".to_owned()]);
    let mesh = Mesh::start_with(options).unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    for process in [&mesh.broker, &mesh.executor] {
        let spare = successor(process);
        process.kill().unwrap();
        process.hand_over(spare);
        mesh.wait_serving().unwrap();
        mesh_pod(&mesh, &format!("without-{}", process.name())).unwrap();
    }
}

/// The broker of the next agent may be there before the executor of the old one ends, and waits for just that.
#[test]
fn an_executor_waits_for_the_end_of_its_own_agents_broker_and_of_no_other() {
    for broker in ["own", "next"] {
        let named = |name: &str| ["--pod-name".to_owned(), name.to_owned()];
        let mut options = MeshOptions::default();
        options.executor.extend(named("own"));
        options
            .executor
            .extend(["--linger-seconds".to_owned(), "60".to_owned()]);
        options.broker.extend(named(broker));
        let mesh = Mesh::start_with(options).unwrap();
        mesh.manifests.namespace("default", "ambient").unwrap();
        mesh_pod(&mesh, "before").unwrap();
        mesh.executor.signal(Signal::SIGTERM).unwrap();
        if broker == "own" {
            mesh_pod(&mesh, "meanwhile").unwrap();
            ends(&mesh.broker);
        }
        assert!(mesh.executor.wait(SOON).unwrap().success(), "{broker}");
    }
}

/// As after a reboot: the kubelet has made the directories, and nobody has given them to the broker yet.
#[test]
fn a_broker_waits_until_it_may_make_its_sockets() {
    let node = Node::new().unwrap();
    let run = node.prepare_run_dir().unwrap();
    let directory = run.workload_socket().parent().unwrap().to_owned();
    let give = |group: u32, mode: u32| {
        chown(&directory, Some(0), Some(group)).unwrap();
        fs::set_permissions(&directory, Permissions::from_mode(mode)).unwrap();
    };
    give(0, 0o755);
    let broker = broker(&node, &Netns::new().unwrap(), &["--stand-by"]);
    let waits = || {
        broker
            .log_text()
            .contains("waiting for the installer to make a directory")
    };
    broker.wait_ready(SOON, waits).unwrap();
    assert!(broker.is_running() && !run.workload_socket().exists());
    give(BROKER_UID, 0o2770);
    broker
        .wait_ready(SOON, || run.workload_socket().exists())
        .unwrap();
}

//! What the kernel says of the running containers, beside what the chart on the API server says of them.
//!
//! Needs the cluster of `make cluster` (`KUBECONFIG`, kubectl on PATH). Its node's processes are seen through this machine's `/proc`.

use std::collections::BTreeSet;

use serde_json::Value;
use sluice_proto::paths::BROKER_UID;
use sluice_testkit::process::Capability;
use sluice_testkit::process::status::ProcStatus;

use crate::helm::{NAMESPACE, texts};
use crate::privileges::CONTAINERS;
use crate::release::{get, installed};

/// A running container: its processes, and what the API server has of it.
struct Running {
    name: String,
    /// Process 1, which only waits for the others.
    init: u32,
    /// The service itself.
    pids: Vec<u32>,
    spec: Value,
}

/// The processes whose cgroup is named for this container.
fn processes(id: &str) -> Vec<u32> {
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok())
        .filter(|pid| {
            std::fs::read_to_string(format!("/proc/{pid}/cgroup")).is_ok_and(|text| text.contains(id))
        })
        .collect()
}

fn running() -> Vec<Running> {
    installed();
    let selector = "app.kubernetes.io/name=sluice,app.kubernetes.io/component=node";
    let pods = get(&["pods", "--selector", selector]);
    let pods = pods["items"].as_array().unwrap();
    // One that is being replaced still has its processes.
    let pod = pods
        .iter()
        .find(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    let pod = pod.unwrap_or_else(|| panic!("no pod of the chart in {NAMESPACE}"));
    assert_eq!(
        pod["status"]["phase"], "Running",
        "no running pod of the chart in {NAMESPACE}"
    );
    let statuses = pod["status"]["containerStatuses"].as_array().unwrap();
    let containers = pod["spec"]["containers"].as_array().unwrap();
    containers
        .iter()
        .map(|spec| {
            let status = statuses
                .iter()
                .find(|status| status["name"] == spec["name"])
                .unwrap();
            let id = status["containerID"].as_str().unwrap_or_default();
            let id = id.rsplit('/').next().unwrap();
            let binary = spec["command"][0].as_str().unwrap().rsplit('/').next().unwrap();
            // Not a probe that happens to run, which is another process of the same binary.
            let serving = |pid: &u32| {
                let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                line.contains(&format!("/{binary}")) && !line.contains("healthcheck")
            };
            let is_first = |pid: &u32| {
                let status = ProcStatus::read(*pid).unwrap();
                status.field("NSpid").split_whitespace().next_back() == Some("1")
            };
            let (init, pids): (Vec<u32>, Vec<u32>) =
                processes(id).into_iter().filter(serving).partition(is_first);
            assert_eq!(init.len(), 1, "process 1 of {}", spec["name"]);
            assert!(!pids.is_empty(), "no service in {}", spec["name"]);
            Running {
                name: spec["name"].as_str().unwrap().to_owned(),
                init: init[0],
                pids,
                spec: spec.clone(),
            }
        })
        .collect()
}

/// As the kernel counts them, from as Kubernetes spells them.
fn capabilities(context: &Value) -> Vec<Capability> {
    let mut list: Vec<Capability> = texts(&context["capabilities"]["add"])
        .into_iter()
        .map(|name| format!("CAP_{name}").parse().unwrap())
        .collect();
    list.sort_by_key(Capability::index);
    list
}

fn threads(pid: u32) -> Vec<ProcStatus> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let ids = tasks.map(|task| task.unwrap().file_name().to_str().unwrap().parse().unwrap());
    ids.filter_map(|id| ProcStatus::read(id).ok()).collect()
}

#[test]
fn containers_run_with_what_the_chart_gives_them_and_nothing_more() {
    let running = running();
    assert_eq!(running.len(), CONTAINERS.len());
    for container in &running {
        let context = &container.spec["securityContext"];
        let given = capabilities(context);
        let uid = u32::try_from(context["runAsUser"].as_u64().unwrap()).unwrap();
        // Its own, the broker's, ztunnel's.
        let (own, broker) = (uid.to_string(), BROKER_UID.to_string());
        let allowed = [own.as_str(), broker.as_str(), "1337"];
        let mut held = Vec::new();
        for pid in container.pids.iter().chain([&container.init]) {
            let process = ProcStatus::read(*pid).unwrap();
            if *pid == container.init {
                // It has to have what the service that it starts again needs.
                assert_eq!(process.effective(), given, "process 1 of {}", container.name);
            } else {
                held.extend(process.effective());
            }
            for thread in threads(*pid) {
                let what = format!("{} ({pid}), thread {}", container.name, thread.field("Pid"));
                // The bounding set is what it could ever get back.
                assert_eq!(thread.bounding(), given, "{what}");
                assert_eq!(thread.permitted(), thread.effective(), "{what}");
                assert_eq!(thread.effective(), process.effective(), "{what}");
                assert_eq!(thread.uids(), [uid; 4], "{what}");
                let groups = thread.field("Groups").split_whitespace();
                let foreign: Vec<&str> = groups.filter(|gid| !allowed.contains(gid)).collect();
                assert!(foreign.is_empty(), "{what}: {foreign:?}");
                assert!(thread.no_new_privs(), "{what}");
                assert!(thread.has_seccomp_filter(), "{what}");
            }
        }
        // Between them the processes of a service hold each capability once: none is given in vain.
        held.sort_by_key(Capability::index);
        assert_eq!(held, given, "{}", container.name);
    }
    let of = |name: &str| running.iter().find(|container| container.name == name).unwrap();
    assert_eq!(of("netns-opener").pids.len(), 2, "the opener is two processes");
    assert_eq!(of("ambient-broker").pids.len(), 1);
}

#[test]
fn containers_share_the_pods_network_and_nothing_of_the_host() {
    let link = |pid: u32, namespace: &str| {
        let path = format!("/proc/{pid}/ns/{namespace}");
        std::fs::read_link(path).unwrap().display().to_string()
    };
    let running = running();
    let mut networks = BTreeSet::new();
    for pid in running.iter().flat_map(|container| &container.pids) {
        networks.insert(link(*pid, "net"));
        // The node's first process is the parent of the container runtime's shim.
        let node = ProcStatus::read(parent_of_shim(*pid)).unwrap();
        let node: u32 = node.field("Pid").parse().unwrap();
        for namespace in ["net", "pid", "mnt", "ipc", "uts"] {
            assert_ne!(link(*pid, namespace), link(node, namespace), "{pid} {namespace}");
        }
    }
    assert_eq!(networks.len(), 1, "{networks:?}");
}

/// The process that the runtime's shim of this process is a child of.
fn parent_of_shim(pid: u32) -> u32 {
    let parent = |pid: u32| -> u32 { ProcStatus::read(pid).unwrap().field("PPid").parse().unwrap() };
    let name = |pid: u32| ProcStatus::read(pid).unwrap().field("Name").to_owned();
    let mut at = pid;
    while !name(at).starts_with("containerd-shim") {
        at = parent(at);
        assert_ne!(at, 0, "no shim above {pid}");
    }
    parent(at)
}

#[test]
fn images_are_read_only_and_the_hosts_proc_is_seen_by_the_opener_alone() {
    for container in running() {
        let mounts = std::fs::read_to_string(format!("/proc/{}/mountinfo", container.pids[0])).unwrap();
        // proc_pid_mountinfo(5): the fifth field is the mount point, the sixth its options.
        let options = |point: &str| {
            mounts.lines().find_map(|line| {
                let fields: Vec<&str> = line.split(' ').collect();
                (fields[4] == point).then(|| fields[5].to_owned())
            })
        };
        assert!(options("/").unwrap().starts_with("ro"), "{}", container.name);
        let proc = options("/host/proc");
        assert_eq!(
            proc.is_some(),
            container.name == "netns-opener",
            "{}",
            container.name
        );
        if let Some(options) = proc {
            assert!(options.starts_with("ro"), "{options}");
        }
        let token = options("/run/secrets/kubernetes.io/serviceaccount")
            .or_else(|| options("/var/run/secrets/kubernetes.io/serviceaccount"));
        assert_eq!(
            token.is_some(),
            container.name.starts_with("ambient-broker"),
            "{}",
            container.name
        );
    }
}

#[test]
fn only_the_broker_listens_on_a_port() {
    let broker_port = |pid: u32| {
        // Rows of /proc/PID/net/tcp{,6} in state 0A (LISTEN), proc_pid_net(5); all containers share them.
        let mut ports = BTreeSet::new();
        for table in ["tcp", "tcp6", "udp", "udp6"] {
            let text = std::fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap();
            for row in text.lines().skip(1) {
                let fields: Vec<&str> = row.split_whitespace().collect();
                if fields[3] == "0A" || table.starts_with("udp") {
                    let port = fields[1].rsplit(':').next().unwrap();
                    ports.insert(u16::from_str_radix(port, 16).unwrap());
                }
            }
        }
        ports
    };
    for container in running() {
        assert_eq!(
            broker_port(container.pids[0]),
            BTreeSet::from([15014]),
            "{}",
            container.name
        );
    }
}

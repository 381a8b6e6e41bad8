//! A big cluster: what the agent keeps of it in memory.

use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::json;
use sluice_testkit::process;

use crate::api::Api;
use crate::harness::{Cluster, Mesh, Namespace, PATIENCE, eventually, on_cluster};
use crate::load::client_spec;
use crate::pods::deployment;
use crate::sluice::{Sluice, with_spare};
use crate::upgrade::kill_service;

/// Pods elsewhere in the cluster.
const PODS: usize = 10_000;
/// Namespaces with them. They stay until the cluster is taken down: to delete so many takes minutes.
const NAMESPACES: usize = 1_000;
/// Enrolled pods on the node; as many as it takes (`maxPods` of its kubelet) beside the agent and the proxy.
const LOCAL: usize = 250;
/// Requests at one time.
const CLIENTS: usize = 8;
const MIB: u64 = 1024 * 1024;

#[test]
fn ten_thousand_pods_elsewhere_cost_the_agent_hardly_any_memory() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let mesh = Namespace::create(cluster, "scale", Mesh::In)?;
        make_elsewhere()?;
        cluster.apply(&[deployment(&mesh, "many", LOCAL, &client_spec())])?;
        let pods = mesh.wait_ready(LOCAL, Duration::from_mins(10))?;
        sluice.ztunnel.wait_held(&pods, PATIENCE)?;
        // What start-up with all of them leaves behind counts, too.
        kill_service(cluster, &sluice, sluice.serving("ambient-broker")?)?;
        sluice.wait_recovered(PATIENCE)?;
        sluice.ztunnel.wait_held(&pods, PATIENCE)?;

        for (container, limit) in [
            ("ambient-broker", 32),
            ("installer", 8),
            ("netns-executor", 16),
            ("netns-opener", 16),
        ] {
            let used = resident(cluster, &sluice, container)?;
            println!(
                "{container}: {} KiB with {PODS} pods in the cluster, {LOCAL} enrolled here",
                used / 1024
            );
            ensure!(used <= limit * MIB, "{container} uses {used} bytes");
        }
        let peak = peak(cluster, &sluice.init_pid("installer")?)?;
        let binary = std::fs::metadata(process::binary("installer")?)?.len();
        println!("installer: {} KiB charged at most", peak / 1024);
        ensure!(
            peak <= binary + 16 * MIB,
            "the installer was charged {peak} bytes, its binary is {binary}"
        );
        delete_elsewhere()
    })
}

/// Resident memory in bytes of all processes of a container and its spare, process 1 included; what they share counts once.
fn resident(cluster: &Cluster, sluice: &Sluice<'_>, container: &'static str) -> anyhow::Result<u64> {
    let containers = with_spare(container).into_iter();
    let mut next: Vec<String> = containers
        .map(|name| sluice.init_pid(name))
        .collect::<anyhow::Result<_>>()?;
    let mut total = 0;
    while let Some(pid) = next.pop() {
        // proc_pid_smaps(5): Pss, in units of 1024 bytes.
        let line = cluster.node(&["grep", "^Pss:", &format!("/proc/{pid}/smaps_rollup")])?;
        let kibibytes = line.split_whitespace().nth(1).context("no Pss")?;
        total += kibibytes.parse::<u64>()? * 1024;
        let children = cluster.node(&["cat", &format!("/proc/{pid}/task/{pid}/children")])?;
        next.extend(children.split_whitespace().map(str::to_owned));
    }
    Ok(total)
}

/// The most memory in bytes that a process's cgroup was ever charged, its pages of files included (cgroups(7), either version).
fn peak(cluster: &Cluster, pid: &str) -> anyhow::Result<u64> {
    let below = |prefix: &str| format!("$(sed -n 's/^{prefix}//p' /proc/{pid}/cgroup)");
    let (first, second) = (below("[0-9]*:memory:"), below("0::"));
    let bytes = cluster.node_sh(&format!(
        "cat /sys/fs/cgroup/memory{first}/memory.max_usage_in_bytes 2>/dev/null || cat /sys/fs/cgroup{second}/memory.peak"
    ))?;
    bytes.trim().parse().context("bytes")
}

fn name(number: usize) -> String {
    format!("elsewhere-{number}")
}

/// Does something for each number below `count`, by several clients.
fn each(count: usize, act: impl Fn(&Api, usize) -> anyhow::Result<()> + Sync) -> anyhow::Result<()> {
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                let act = &act;
                scope.spawn(move || {
                    let api = Api::open()?;
                    (client..count)
                        .step_by(CLIENTS)
                        .try_for_each(|number| act(&api, number))
                })
            })
            .collect();
        clients
            .into_iter()
            .try_for_each(|client| client.join().map_err(|_| anyhow::anyhow!("a client panicked"))?)
    })
}

/// Pods that no scheduler looks at.
fn make_elsewhere() -> anyhow::Result<()> {
    each(NAMESPACES, |api, number| {
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name(number)}});
        match api.create("/api/v1/namespaces", &namespace) {
            // An earlier run made it.
            Err(error) if format!("{error:#}").contains("AlreadyExists") => Ok(()),
            other => other,
        }
    })
    .context("namespaces")?;
    each(PODS, |api, number| {
        let namespace = name(number % NAMESPACES);
        // Until the controller manager has made the namespace's service account, every pod is refused.
        let account = format!("/api/v1/namespaces/{namespace}/serviceaccounts/default");
        if number < NAMESPACES {
            eventually("default service account", PATIENCE, || {
                api.get(&account).map(Some)
            })?;
        }
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"generateName": "pod-", "labels": {"app": "web", "pod-template-hash": "5d4f8c7b9"}},
            "spec": {"schedulerName": "nobody", "containers": [{"name": "web", "image": "registry.example/web:1"}]},
        });
        api.create(&format!("/api/v1/namespaces/{namespace}/pods"), &pod)
    })
    .context("pods")
}

fn delete_elsewhere() -> anyhow::Result<()> {
    each(NAMESPACES, |api, number| {
        api.delete(&format!("/api/v1/namespaces/{}/pods", name(number)))
    })
}

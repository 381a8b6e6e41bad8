//! What Sluice adds to the creation of a sandbox by the kubelet, by the runtime's own log.

use std::time::{Duration, Instant};

use anyhow::ensure;
use serde_json::json;

use crate::harness::{Cluster, Mesh, Namespace, PATIENCE, eventually, on_cluster};
use crate::load::client_spec;
use crate::pods::deployment;
use crate::sandbox::{creation_times, quartiles};
use crate::sluice::Sluice;

/// How many turns of a pod of each kind.
const TURNS: usize = 45;
/// What a sandbox takes without any agent where the limits were set, in milliseconds; a node that takes longer for that, too, may take
/// longer for ours in the same proportion.
const REFERENCE: f64 = 71.0;
/// How many pods at once, and how many times with and without Sluice.
const MANY: usize = 30;
const MANY_TURNS: usize = 6;
/// The runtime's handler that makes sandboxes on the primary network alone (`containerd.toml.in`).
const UNCHAINED: &str = "unchained";

#[test]
fn a_sandbox_takes_hardly_longer_than_without_sluice() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let _sluice = Sluice::ensure(cluster)?;
        allow_unchained(cluster)?;
        let [without, plain, ambient] = measure(cluster)?;
        let [low, without, high] = quartiles(&without);
        println!("sandbox creation without, quartiles of {TURNS}: {low:.1}, {without:.1}, {high:.1} ms");
        for (what, times, limit) in [("outside the mesh", plain, 5.0), ("ambient", ambient, 8.0)] {
            let [low, middle, high] = quartiles(&times);
            println!("sandbox creation {what}, quartiles of {TURNS}: {low:.1}, {middle:.1}, {high:.1} ms");
            let more = middle - without;
            let limit = limit * (without / REFERENCE).max(1.0);
            ensure!(
                more <= limit,
                "{what}: {more:.1} ms more; at most {limit:.1} are allowed"
            );
        }
        Ok(())
    })
}

#[test]
fn thirty_pods_start_no_slower_than_without_sluice() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let _sluice = Sluice::ensure(cluster)?;
        allow_unchained(cluster)?;
        let mut times = [Vec::new(), Vec::new()];
        for turn in 0..MANY_TURNS {
            // By turns, and each first as often: a node that gets slower or faster meanwhile does not look like a difference.
            for place in 0..2 {
                let kind = (turn + place) % 2;
                times[kind].push(thirty(cluster, kind == 1)?);
            }
        }
        let [mut without, mut with] = times;
        println!("0 to {MANY} pods: {with:.1?} in the mesh, {without:.1?} without Sluice in the chain");
        with.sort();
        without.sort();
        // Noise is what those without differ by.
        let (middle, slowest) = (with[with.len() / 2], without[without.len() - 1]);
        ensure!(
            middle <= slowest,
            "{MANY} pods took {middle:?} in the middle, without Sluice {slowest:?} at most"
        );
        Ok(())
    })
}

/// How long a Deployment takes from no pod to all of them, in the mesh or on the primary network alone.
fn thirty(cluster: &Cluster, in_mesh: bool) -> anyhow::Result<Duration> {
    let (purpose, mesh) = if in_mesh {
        ("many-in", Mesh::In)
    } else {
        ("many-out", Mesh::Out)
    };
    let namespace = Namespace::create(cluster, purpose, mesh)?;
    let mut spec = client_spec();
    if !in_mesh {
        spec["runtimeClassName"] = UNCHAINED.into();
    }
    let started = Instant::now();
    cluster.apply(&[deployment(&namespace, "many", MANY, &spec)])?;
    // One watch: to list the pods again and again would take a core of the two, and what is measured would be the test.
    namespace.kubectl(&[
        "wait",
        "deployment/many",
        &format!("--for=jsonpath={{.status.readyReplicas}}={MANY}"),
        &format!("--timeout={}s", PATIENCE.as_secs()),
    ])?;
    let took = started.elapsed();
    namespace.kubectl(&["delete", "deployment", "many", "--timeout=90s"])?;
    eventually("the pods are gone", PATIENCE, || {
        let pods = namespace.get("pods")?;
        Ok(pods["items"].as_array().is_some_and(Vec::is_empty).then_some(()))
    })?;
    Ok(took)
}

/// Lets pods ask for the primary network alone.
fn allow_unchained(cluster: &Cluster) -> anyhow::Result<()> {
    cluster.apply(&[json!({
        "apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass",
        "metadata": {"name": UNCHAINED}, "handler": UNCHAINED,
    })])?;
    let network = cluster.node(&["cat", "/etc/cni/unchained.d/10-podnet.conflist"])?;
    ensure!(
        !network.contains("sluice"),
        "not the network without Sluice: {network}"
    );
    Ok(())
}

/// The times of sandboxes without Sluice, outside the mesh and in it, turn by turn: what a machine does that gets slower or
/// faster meanwhile happens to all three.
fn measure(cluster: &Cluster) -> anyhow::Result<[Vec<f64>; 3]> {
    let kinds = [
        ("without", Mesh::Out, Some(UNCHAINED)),
        ("plain", Mesh::Out, None),
        ("ambient", Mesh::In, None),
    ];
    let namespaces = kinds
        .iter()
        .map(|(purpose, mesh, _)| Namespace::create(cluster, purpose, *mesh))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let position = cluster.log("containerd")?.len();
    for turn in 0..TURNS {
        for place in 0..kinds.len() {
            // Each kind comes after each other one as often.
            let kind = (turn + place) % kinds.len();
            let (purpose, _, handler) = kinds[kind];
            let mut spec = client_spec();
            spec["runtimeClassName"] = handler.into();
            spec["restartPolicy"] = "Never".into();
            spec["containers"][0]["command"] = json!(["sleep", "0"]);
            let name = format!("speed-{purpose}-{turn}");
            namespaces[kind].create_pod(&name, &spec)?;
            namespaces[kind].wait_pod(&name, "has ended", PATIENCE, |pod| pod.phase == "Succeeded")?;
            // Each pod that stays makes the next sandbox slower: bridge, iptables and runtime have more to look through.
            namespaces[kind].delete_pod(&name)?;
        }
    }
    let log = cluster.log("containerd")?;
    let times = kinds.map(|(purpose, ..)| creation_times(&log[position..], &format!("speed-{purpose}-")));
    for (times, (purpose, ..)) in times.iter().zip(kinds) {
        ensure!(
            times.len() == TURNS,
            "{} of {TURNS} sandboxes {purpose} in the runtime's log",
            times.len()
        );
    }
    Ok(times)
}

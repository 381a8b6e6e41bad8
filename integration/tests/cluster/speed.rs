//! What Sluice adds to the creation of a sandbox by the kubelet, by the runtime's own log.

use std::time::{Duration, Instant};

use anyhow::ensure;

use crate::harness::{Cluster, Mesh, Namespace, PATIENCE, eventually, on_cluster};
use crate::load::client_spec;
use crate::pods::deployment;
use crate::sandbox::{creation_times, quartiles};
use crate::sluice::Sluice;

/// How many pods of each kind, one after the other.
const PODS: usize = 15;
/// How many pods at once.
const MANY: usize = 30;
/// Widest spread (milliseconds between the quartiles) of the measurement without Sluice that still tells something.
const NOISE: f64 = 25.0;

#[test]
fn a_sandbox_takes_hardly_longer_than_without_sluice() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        // Before and after, and the two kinds of pods by turns, so that a machine that gets slower or faster does not
        // look like a difference.
        sluice.uninstall()?;
        let [mut without] = measure(cluster, [("before", Mesh::Out)], PODS / 2)?;
        let sluice = Sluice::ensure(cluster)?;
        let [plain, ambient] = measure(cluster, [("plain", Mesh::Out), ("ambient", Mesh::In)], PODS)?;
        sluice.uninstall()?;
        let [after] = measure(cluster, [("after", Mesh::Out)], PODS - PODS / 2)?;
        without.extend(after);

        for (what, times) in [
            ("without", &without),
            ("outside the mesh", &plain),
            ("ambient", &ambient),
        ] {
            let [low, middle, high] = quartiles(times);
            println!("sandbox creation {what}, quartiles of {PODS}: {low:.1}, {middle:.1}, {high:.1} ms");
        }
        let [low, without, high] = quartiles(&without);
        let ([_, plain, _], [_, ambient, _]) = (quartiles(&plain), quartiles(&ambient));
        // A machine that is busy with other things would let anything pass, or nothing.
        ensure!(
            high - low <= NOISE,
            "without Sluice {low:.1} to {high:.1} ms: too noisy to tell"
        );
        ensure!(
            ambient - without <= 8.0,
            "ambient: {:.1} ms more",
            ambient - without
        );
        ensure!(
            plain - without <= 5.0,
            "outside the mesh: {:.1} ms more",
            plain - without
        );
        Ok(())
    })
}

#[test]
fn thirty_pods_start_no_slower_than_without_sluice() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let with = [
            thirty(cluster, "first", Mesh::In)?,
            thirty(cluster, "second", Mesh::In)?,
        ];
        sluice.uninstall()?;
        let without = [
            thirty(cluster, "third", Mesh::Out)?,
            thirty(cluster, "fourth", Mesh::Out)?,
        ];

        println!("0 to {MANY} pods: {with:.1?} in the mesh, {without:.1?} without Sluice");
        let (fastest, slowest) = (with[0].min(with[1]), without[0].max(without[1]));
        ensure!(
            fastest <= slowest,
            "{MANY} pods took {fastest:?} at best, without Sluice {slowest:?} at most"
        );
        Ok(())
    })
}

/// How long a Deployment takes from no pod to all of them.
fn thirty(cluster: &Cluster, purpose: &str, mesh: Mesh) -> anyhow::Result<Duration> {
    let namespace = Namespace::create(cluster, purpose, mesh)?;
    let started = Instant::now();
    cluster.apply(&[deployment(&namespace, "many", MANY, &client_spec())])?;
    namespace.wait_ready(MANY, PATIENCE)?;
    let took = started.elapsed();
    namespace.kubectl(&["delete", "deployment", "many", "--timeout=90s"])?;
    eventually("the pods are gone", PATIENCE, || {
        let pods = namespace.get("pods")?;
        Ok(pods["items"].as_array().is_some_and(Vec::is_empty).then_some(()))
    })?;
    Ok(took)
}

/// Makes so many pods of each kind, by turns and each when the one before has come and gone; the times of each kind's
/// sandboxes.
fn measure<const KINDS: usize>(
    cluster: &Cluster,
    kinds: [(&str, Mesh); KINDS],
    pods: usize,
) -> anyhow::Result<[Vec<f64>; KINDS]> {
    let namespaces = kinds
        .iter()
        .map(|(purpose, mesh)| Namespace::create(cluster, purpose, *mesh))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let position = cluster.log("containerd")?.len();
    for number in 0..pods {
        for ((purpose, _), namespace) in kinds.iter().zip(&namespaces) {
            let name = format!("speed-{purpose}-{number}");
            namespace.create_pod(&name, &client_spec())?;
            namespace.wait_pod(&name, "is Ready", PATIENCE, |pod| pod.ready)?;
            // Each pod that stays makes the next sandbox slower: bridge, iptables and runtime have more to look through.
            namespace.delete_pod(&name)?;
        }
    }
    let log = cluster.log("containerd")?;
    let times = kinds.map(|(purpose, _)| creation_times(&log[position..], &format!("speed-{purpose}-")));
    for (times, (purpose, _)) in times.iter().zip(kinds) {
        ensure!(
            times.len() == pods,
            "{} of {pods} sandboxes {purpose} in the runtime's log",
            times.len()
        );
    }
    Ok(times)
}

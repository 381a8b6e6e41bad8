//! What Sluice adds to the creation of a sandbox by the kubelet, by the runtime's own log.

use anyhow::ensure;

use crate::harness::{Cluster, Mesh, Namespace, PATIENCE, on_cluster};
use crate::load::client_spec;
use crate::pods::pod;
use crate::sandbox::{creation_times, quartiles};
use crate::sluice::Sluice;

/// How many pods, one after the other.
const PODS: usize = 15;
/// Widest spread (milliseconds between the quartiles) of the measurement without Sluice that still tells something.
const NOISE: f64 = 25.0;

#[test]
fn a_sandbox_takes_hardly_longer_than_without_sluice() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        sluice.uninstall()?;
        let without = measure(cluster, "floor", Mesh::Out)?;
        let _sluice = Sluice::ensure(cluster)?;
        let plain = measure(cluster, "plain", Mesh::Out)?;
        let ambient = measure(cluster, "ambient", Mesh::In)?;

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

fn measure(cluster: &Cluster, purpose: &str, mesh: Mesh) -> anyhow::Result<Vec<f64>> {
    let namespace = Namespace::create(cluster, purpose, mesh)?;
    let prefix = format!("speed-{purpose}");
    let position = cluster.log("containerd")?.len();
    for number in 0..PODS {
        let name = format!("{prefix}-{number}");
        cluster.apply(&[pod(&namespace, &name, &client_spec())])?;
        namespace.wait_pod(&name, "is Ready", PATIENCE, |pod| pod.ready)?;
    }
    let log = cluster.log("containerd")?;
    let times = creation_times(&log[position..], &prefix);
    ensure!(
        times.len() == PODS,
        "{} of {PODS} sandboxes in the runtime's log",
        times.len()
    );
    Ok(times)
}

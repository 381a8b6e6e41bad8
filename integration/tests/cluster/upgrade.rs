//! The agent is replaced or killed under load.

use std::time::{Duration, Instant};

use anyhow::ensure;

use crate::harness::{Cluster, PATIENCE, eventually, on_cluster};
use crate::scenario::busy;
use crate::sluice::{CONTAINERS, DAEMON_SET, NAMESPACE, Sluice};

/// From the start of a rolling upgrade until the new agent serves.
const ROLLOUT_LIMIT: Duration = Duration::from_secs(5);

#[test]
fn a_rolling_upgrade_costs_no_request_and_delays_no_pod() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let before = sluice.pod()?;

        let outcome = busy(&sluice, "upgrade", || {
            cluster.kubectl(&[
                "-n",
                NAMESPACE,
                "rollout",
                "restart",
                &format!("daemonset/{DAEMON_SET}"),
            ])?;
            eventually("another agent pod", PATIENCE, || {
                Ok((sluice.pod()? != before).then_some(()))
            })?;
            sluice.wait_recovered(PATIENCE)
        })?;

        outcome.print("rolling upgrade");
        outcome.assert_no_pod_delayed()?;
        ensure!(
            outcome.disturbance <= ROLLOUT_LIMIT,
            "the rollout took {:?}",
            outcome.disturbance
        );
        Ok(())
    })
}

#[test]
fn killing_each_container_twice_costs_no_request() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        for container in CONTAINERS {
            let outcome = busy(&sluice, &format!("kill-{container}"), || {
                for _ in 0..2 {
                    kill_and_wait(cluster, &sluice, container)?;
                }
                sluice.wait_recovered(PATIENCE)
            })?;
            outcome.print(&format!("kill -9 of {container}, twice"));
            outcome.assert_no_pod_delayed()?;
        }
        Ok(())
    })
}

/// Kills a container's process and waits until the kubelet has started it again.
fn kill_and_wait(cluster: &Cluster, sluice: &Sluice<'_>, container: &str) -> anyhow::Result<()> {
    let pid = sluice.container_pid(container)?;
    cluster.node(&["kill", "-KILL", &pid])?;
    let started = Instant::now();
    eventually(&format!("{container} runs again"), PATIENCE, || {
        Ok(sluice
            .container_pid(container)
            .ok()
            .filter(|now| *now != pid)
            .map(drop))
    })?;
    println!(
        "{container} is back after {:.1} s",
        started.elapsed().as_secs_f64()
    );
    Ok(())
}

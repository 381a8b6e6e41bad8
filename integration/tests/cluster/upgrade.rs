//! The agent is replaced or killed under load.

use std::time::Duration;

use anyhow::ensure;

use crate::harness::{Cluster, PATIENCE, eventually, on_cluster, time_factor};
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
            outcome.disturbance <= ROLLOUT_LIMIT * time_factor(),
            "the rollout took {:?}",
            outcome.disturbance
        );
        Ok(())
    })
}

#[test]
fn killing_each_service_twice_costs_no_request_and_delays_no_pod() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        for container in CONTAINERS {
            let init = sluice.init_pid(container)?;
            let outcome = busy(&sluice, &format!("kill-{container}"), || {
                for _ in 0..2 {
                    kill_service(cluster, &sluice, &init)?;
                    sluice.wait_recovered(PATIENCE)?;
                }
                Ok(())
            })?;
            outcome.print(&format!("kill -9 of {container}'s service, twice"));
            outcome.assert_no_pod_delayed()?;
            ensure!(
                sluice.init_pid(container)? == init,
                "the container of {container} was restarted"
            );
        }
        Ok(())
    })
}

/// Kills the service of a container and waits until its process 1 has started another.
pub(crate) fn kill_service(cluster: &Cluster, sluice: &Sluice<'_>, init: &str) -> anyhow::Result<()> {
    let service = sluice.service_pid(init)?;
    cluster.node(&["kill", "-KILL", &service])?;
    eventually("the service runs again", PATIENCE, || {
        Ok((sluice.service_pid(init)? != service).then_some(()))
    })
}

/// The first time, the kubelet starts a container again at once.
#[test]
fn killing_a_whole_container_costs_no_request_and_delays_no_pod() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        for container in CONTAINERS {
            let init = sluice.init_pid(container)?;
            let outcome = busy(&sluice, &format!("end-{container}"), || {
                cluster.node(&["kill", "-KILL", &init])?;
                eventually("the container runs again", PATIENCE, || {
                    Ok(sluice
                        .init_pid(container)
                        .ok()
                        .filter(|now| *now != init)
                        .map(drop))
                })?;
                sluice.wait_recovered(PATIENCE)
            })?;
            outcome.print(&format!("kill -9 of {container}, once"));
            outcome.assert_no_pod_delayed()?;
        }
        Ok(())
    })
}

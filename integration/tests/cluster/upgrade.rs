//! The agent is replaced or killed under load.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use crate::harness::{Cluster, Mesh, Namespace, PATIENCE, eventually, on_cluster, time_factor};
use crate::load::client_spec;
use crate::pods::BOX;
use crate::scenario::{DELAY_LIMIT, busy};
use crate::sluice::{CONTAINERS, DAEMON_SET, NAMESPACE, Sluice, with_spare};

/// From the start of a rolling upgrade until the new agent serves.
const ROLLOUT_LIMIT: Duration = Duration::from_secs(5);
/// On a node that takes longer than [`ROLLOUT_LIMIT`] for any pod like ours: how many times as long as such a pod. Ours has more to
/// take down and to find.
const ROLLOUT_RATIO: f64 = 1.25;
/// The longest of them: less than a service of the old agent may wait for another one at its end.
const LONGEST_ROLLOUT: Duration = Duration::from_secs(15);
/// Rollouts, and as many of such a pod: how long one takes depends on when the kubelet looks, which it does once a second.
const ROLLOUTS: usize = 3;

#[test]
fn a_rolling_upgrade_costs_no_request_and_delays_no_pod() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let plain = Namespace::create(cluster, "upgrade-plain", Mesh::Out)?;
        cluster.apply(&[of_our_shape(&plain)])?;
        cluster.rolled_out(&plain.name, &format!("daemonset/{SHAPE}"))?;
        let (mut floors, mut rollouts) = (Vec::new(), Vec::new());

        let outcome = busy(&sluice, "upgrade", || {
            let mut began = None;
            for _ in 0..ROLLOUTS {
                let started = Instant::now();
                cluster.replace_pod(&plain.name, SHAPE)?;
                floors.push(started.elapsed());
                let started = Instant::now();
                began.get_or_insert(started);
                cluster.replace_pod(NAMESPACE, DAEMON_SET)?;
                sluice.wait_recovered(PATIENCE)?;
                rollouts.push(started.elapsed());
            }
            began.context("no rollout")
        })?;

        outcome.print("rolling upgrades");
        println!("each: {rollouts:.1?}; of a pod of the same shape that does nothing: {floors:.1?}");
        let limit = ROLLOUT_LIMIT.max(median(floors).mul_f64(ROLLOUT_RATIO));
        let longest = rollouts.iter().max().context("no rollout")?;
        ensure!(
            *longest <= LONGEST_ROLLOUT * time_factor(),
            "a rollout took {longest:?}, longer than {LONGEST_ROLLOUT:?}"
        );
        let rollout = median(rollouts);
        ensure!(
            rollout <= limit * time_factor(),
            "a rollout took {rollout:?}, longer than {limit:?}"
        );
        outcome.assert_no_pod_delayed(limit)
    })
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

/// Name of the DaemonSet of [`of_our_shape`].
const SHAPE: &str = "shape";

/// A DaemonSet whose pod has as many containers as ours, one of them with a readiness probe.
fn of_our_shape(namespace: &Namespace<'_>) -> Value {
    let container = |name: &str, command: &[&str]| json!({"name": name, "image": BOX, "imagePullPolicy": "IfNotPresent", "command": command});
    let mut containers: Vec<Value> = CONTAINERS
        .iter()
        .flat_map(|container| with_spare(container))
        .map(|name| container(name, &["sh", "-c", "trap 'exit 0' TERM; sleep 1000000 & wait"]))
        .collect();
    containers[0] = container(CONTAINERS[0], &["box", "serve"]);
    containers[0]["readinessProbe"] =
        json!({"httpGet": {"path": "/healthz", "port": 8080}, "periodSeconds": 1});
    json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": {"name": SHAPE, "namespace": namespace.name},
        "spec": {
            "selector": {"matchLabels": {"app": SHAPE}},
            "template": {
                "metadata": {"labels": {"app": SHAPE}},
                "spec": {
                    "tolerations": [{"operator": "Exists"}],
                    "containers": containers,
                },
            },
        },
    })
}

/// The new agent never gets ready, so the old one stays.
#[test]
fn an_upgrade_to_an_image_that_cannot_be_had_leaves_the_old_agent_at_work() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let serving = sluice.pod()?;
        sluice.set_image("missing")?;
        eventually("the new agent's image cannot be had", PATIENCE, || {
            let pods = cluster.pods_of(NAMESPACE, DAEMON_SET)?;
            // ErrImagePull or ImagePullBackOff.
            let waits = |pod: &Value| pod["status"].to_string().contains("ImagePull");
            Ok(pods.iter().any(waits).then_some(()))
        })?;
        let namespace = Namespace::create(cluster, "bad-image", Mesh::In)?;
        namespace.create_pod("new", &client_spec())?;
        let pods = namespace.wait_ready(1, PATIENCE)?;
        sluice.ztunnel.wait_held(&pods, PATIENCE)?;
        let pods = cluster.pods_of(NAMESPACE, DAEMON_SET)?;
        ensure!(
            pods.iter().any(|pod| pod["metadata"]["name"] == serving.as_str()),
            "{serving} has gone"
        );
        sluice.return_agent()?;
        sluice.wait_ready()
    })
}

#[test]
fn killing_each_service_twice_costs_no_request_and_delays_no_pod() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        for container in CONTAINERS {
            let inits = || {
                let all = with_spare(container).into_iter();
                all.map(|container| sluice.init_pid(container))
                    .collect::<anyhow::Result<Vec<_>>>()
            };
            let before = inits()?;
            let outcome = busy(&sluice, &format!("kill-{container}"), || {
                let began = Instant::now();
                for _ in 0..2 {
                    kill_service(cluster, &sluice, sluice.serving(container)?)?;
                    sluice.wait_recovered(PATIENCE)?;
                }
                Ok(began)
            })?;
            outcome.print(&format!("kill -9 of {container}'s service, twice"));
            outcome.assert_no_pod_delayed(DELAY_LIMIT)?;
            ensure!(inits()? == before, "a container of {container} was restarted");
        }
        Ok(())
    })
}

/// Kills the service of a container and waits until its process 1 has started another.
pub(crate) fn kill_service(cluster: &Cluster, sluice: &Sluice<'_>, container: &str) -> anyhow::Result<()> {
    let init = &sluice.init_pid(container)?;
    let service = sluice.service_pid(init)?;
    cluster.node(&["kill", "-KILL", &service])?;
    eventually("the service runs again", PATIENCE, || {
        Ok((sluice.service_pid(init)? != service).then_some(()))
    })
}

/// The first time, the kubelet starts a container again at once, the second time after 10 s and more. The spare serves by then,
/// and is killed as well when the first is back; once, because each second that this takes makes another pod.
#[test]
fn killing_each_whole_container_twice_costs_no_request_and_delays_no_pod() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        for container in CONTAINERS {
            let outcome = busy(&sluice, &format!("end-{container}"), || {
                let began = Instant::now();
                for container in [container].into_iter().chain(with_spare(container)) {
                    end_container(cluster, &sluice, container)?;
                }
                sluice.wait_recovered(PATIENCE)?;
                Ok(began)
            })?;
            outcome.print(&format!(
                "kill -9 of {container}, twice, and of its spare, if it has one"
            ));
            outcome.assert_no_pod_delayed(DELAY_LIMIT)?;
        }
        Ok(())
    })
}

/// Kills a container as a whole, by its process 1, and waits until it runs again.
fn end_container(cluster: &Cluster, sluice: &Sluice<'_>, container: &str) -> anyhow::Result<()> {
    let init = sluice.init_pid(container)?;
    cluster.node(&["kill", "-KILL", &init])?;
    eventually("the container runs again", PATIENCE, || {
        Ok(sluice
            .init_pid(container)
            .ok()
            .filter(|now| *now != init)
            .map(drop))
    })
}

//! A busy node: enrolled pods, requests between them, a new mesh pod every second. What a disturbance does to all that.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use crate::harness::{Mesh, Namespace, PATIENCE, time_factor};
use crate::load::{Load, Report, client, client_spec};
use crate::pods::{Pod, deployment, probes, server_spec};
use crate::sluice::Sluice;

/// How many pods are enrolled and talk to each other.
const PODS: usize = 32;
/// Name of their Deployment, and their label `app`.
const SERVERS: &str = "web";
/// Requests a second between them.
const RATE: u32 = 200;
/// How much longer a new pod may take than without a disturbance.
const DELAY_LIMIT: Duration = Duration::from_secs(5);
/// A new pod is Ready within this on an idle node: the kubelet looks once a second.
const USUAL: Duration = Duration::from_millis(2500);

/// What happened while a node was disturbed.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) load: Report,
    /// How long each new pod took until Ready.
    pub(crate) new_pods: Vec<(String, Duration)>,
    pub(crate) disturbance: Duration,
}

/// Runs `disturb` on a busy node and checks what must hold whatever it does: no request fails, no mesh pod runs without
/// being enrolled.
pub(crate) fn busy(
    sluice: &Sluice<'_>,
    purpose: &str,
    disturb: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<Outcome> {
    let cluster = sluice.cluster;
    let namespace = Namespace::create(cluster, purpose, Mesh::In)?;
    cluster.apply(&[deployment(&namespace, SERVERS, PODS, &server_spec(&probes()))])?;
    let pods = namespace.wait_ready(PODS, 3 * PATIENCE)?;
    let client = client(&namespace, "client", cluster)?;
    sluice.ztunnel.wait_held(&pods, PATIENCE)?;
    let urls: Vec<String> = pods
        .iter()
        .map(|pod| format!("http://{}:8080/", pod.ip))
        .collect();
    let load = Load::start(&namespace, &client.name, RATE, &urls)?;

    let done = AtomicBool::new(false);
    let (new_pods, disturbance) = std::thread::scope(|scope| {
        let stream = scope.spawn(|| new_pod_every_second(&namespace, &done));
        let started = Instant::now();
        let result = disturb();
        let took = started.elapsed();
        done.store(true, Ordering::Relaxed);
        let new_pods = stream
            .join()
            .map_err(|_| anyhow::anyhow!("the stream of pods panicked"))?;
        result.context("the disturbance")?;
        anyhow::Ok((new_pods?, took))
    })?;

    let report = load.stop()?;
    report.assert_flawless()?;
    let running: Vec<Pod> = namespace
        .pods()?
        .into_iter()
        .filter(|pod| pod.phase == "Running")
        .collect();
    sluice
        .ztunnel
        .wait_held(&running, PATIENCE)
        .context("a running pod is not enrolled")?;
    let restarts: u64 = running.iter().map(|pod| pod.restarts).sum();
    ensure!(
        restarts == 0,
        "{restarts} restarts of workload containers: probes failed"
    );
    Ok(Outcome {
        load: report,
        new_pods,
        disturbance,
    })
}

/// Makes a mesh pod each second until told, then waits for all of them; how long each took. Every pod must be enrolled by
/// the time it is Ready.
fn new_pod_every_second(
    namespace: &Namespace<'_>,
    done: &AtomicBool,
) -> anyhow::Result<Vec<(String, Duration)>> {
    let mut created: HashMap<String, Instant> = HashMap::new();
    let mut ready: Vec<(String, Duration)> = Vec::new();
    let deadline = Instant::now() + 4 * PATIENCE;
    let mut next = Instant::now();
    // Some more after the disturbance: its consequences may come late.
    let mut after = 3;
    loop {
        if Instant::now() >= next && after > 0 {
            if done.load(Ordering::Relaxed) {
                after -= 1;
            }
            let name = format!("new-{}", created.len());
            created.insert(name.clone(), Instant::now());
            namespace.create_pod(&name, &client_spec())?;
            next += Duration::from_secs(1);
        }
        let news = namespace.pods_selected(&format!("app!={SERVERS}"))?;
        for pod in news.iter().filter(|pod| pod.ready) {
            let Some(since) = created.get(&pod.name) else {
                continue;
            };
            if ready.iter().any(|(name, _)| *name == pod.name) {
                continue;
            }
            ensure!(
                pod.status() == Some("enabled"),
                "{} is Ready and not enrolled",
                pod.name
            );
            ready.push((pod.name.clone(), since.elapsed()));
        }
        if after == 0 && ready.len() == created.len() {
            return Ok(ready);
        }
        ensure!(
            Instant::now() < deadline,
            "{} of {} new pods Ready\n{}",
            ready.len(),
            created.len(),
            namespace.describe()
        );
        // Not more often: each list takes something from what is measured.
        std::thread::sleep(Duration::from_millis(250));
    }
}

impl Outcome {
    /// The new pod that took longest.
    pub(crate) fn slowest(&self) -> Duration {
        self.new_pods
            .iter()
            .map(|(_, took)| *took)
            .max()
            .unwrap_or_default()
    }

    /// One line of figures.
    pub(crate) fn print(&self, what: &str) {
        println!(
            "{what}: took {:.1} s; {} requests, none failed, slowest {} ms; {} new pods, slowest {:.1} s",
            self.disturbance.as_secs_f64(),
            self.load.requests,
            self.load.max_millis,
            self.new_pods.len(),
            self.slowest().as_secs_f64()
        );
    }

    /// Fails if a new pod took longer than the disturbance may cost.
    pub(crate) fn assert_no_pod_delayed(&self) -> anyhow::Result<()> {
        let late: Vec<_> = self
            .new_pods
            .iter()
            .filter(|(_, took)| *took > (USUAL + DELAY_LIMIT) * time_factor())
            .collect();
        ensure!(
            late.is_empty(),
            "{} of {} new pods were delayed: {late:?}",
            late.len(),
            self.new_pods.len()
        );
        Ok(())
    }
}

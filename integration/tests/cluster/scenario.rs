//! A busy node: enrolled pods, requests between them, a new mesh pod every second. What a disturbance does to all that.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use crate::harness::{Cluster, Mesh, Namespace, PATIENCE, eventually, time_factor};
use crate::load::{Load, Report, client, client_spec};
use crate::pods::{Pod, deployment, probes, server_spec};
use crate::sluice::Sluice;

/// How many pods are enrolled and talk to each other.
const PODS: usize = 32;
/// Name of their Deployment, and their label `app`.
const SERVERS: &str = "web";
/// Requests a second between them.
const RATE: u32 = 200;
/// How much longer a new pod may take than without a disturbance, unless the node takes longer for any pod.
pub(crate) const DELAY_LIMIT: Duration = Duration::from_secs(5);
/// How many new pods are Ready before the disturbance: what they take is usual on this node under this load.
const UNDISTURBED: usize = 3;

/// What happened while a node was disturbed.
#[derive(Debug)]
pub(crate) struct Outcome {
    load: Report,
    new_pods: Vec<NewPod>,
    began: Instant,
    disturbance: Duration,
}

/// A pod that was made under load.
#[derive(Debug)]
struct NewPod {
    name: String,
    created: Instant,
    /// Until Ready.
    took: Duration,
}

/// Runs `disturb`, which gives the instant at which it began to, on a busy node, and checks what must hold whatever it does: no
/// request fails, no mesh pod runs without being enrolled.
pub(crate) fn busy(
    sluice: &Sluice<'_>,
    purpose: &str,
    disturb: impl FnOnce() -> anyhow::Result<Instant>,
) -> anyhow::Result<Outcome> {
    let cluster = sluice.cluster;
    settled(cluster)?;
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
    let (new_pods, began, disturbance) = std::thread::scope(|scope| {
        let (usual, known) = channel();
        let stream = scope.spawn(|| new_pod_every_second(sluice, &namespace, usual, &done));
        // An error here: the stream has ended, and tells why.
        let result = known
            .recv()
            .context("the stream of pods has ended")
            .and_then(|()| disturb())
            .map(|began| (began, began.elapsed()));
        done.store(true, Ordering::Relaxed);
        let new_pods = stream
            .join()
            .map_err(|_| anyhow::anyhow!("the stream of pods panicked"))??;
        let (began, disturbance) = result.context("the disturbance")?;
        anyhow::Ok((new_pods, began, disturbance))
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
    for pod in &running {
        namespace.wait_pod(&pod.name, "is called enrolled", PATIENCE, |pod| {
            pod.status() == Some("enabled")
        })?;
    }
    Ok(Outcome {
        load: report,
        new_pods,
        began,
        disturbance,
    })
}

/// Waits until nothing is left of the tests before: to end their pods takes the node all that it has for a while.
fn settled(cluster: &Cluster) -> anyhow::Result<()> {
    eventually("no namespace is being deleted", 2 * PATIENCE, || {
        let list = cluster.api.get("/api/v1/namespaces")?;
        let ending = |namespace: &Value| namespace.pointer("/status/phase") == Some(&json!("Terminating"));
        let namespaces = list["items"].as_array().context("no list of namespaces")?;
        Ok((!namespaces.iter().any(ending)).then_some(()))
    })
}

/// Makes a mesh pod each second until told, then waits for all of them. Every pod must be in the mesh by the time it is Ready. (Its
/// status may say so later: whoever admits it may be replaced before having written that.)
fn new_pod_every_second(
    sluice: &Sluice<'_>,
    namespace: &Namespace<'_>,
    usual: Sender<()>,
    done: &AtomicBool,
) -> anyhow::Result<Vec<NewPod>> {
    let mut created: HashMap<String, Instant> = HashMap::new();
    let mut ready: Vec<NewPod> = Vec::new();
    let mut usual = Some(usual);
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
            if ready.iter().any(|known| known.name == pod.name) {
                continue;
            }
            let took = since.elapsed();
            let held = sluice.ztunnel.holds(pod)?;
            ensure!(held, "{} is Ready and not in the mesh", pod.name);
            ready.push(NewPod {
                name: pod.name.clone(),
                created: *since,
                took,
            });
        }
        if ready.len() >= UNDISTURBED
            && let Some(usual) = usual.take()
        {
            usual.send(()).context("nobody waits for the usual time")?;
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
    /// The longest that a pod took which was Ready before the disturbance.
    fn usual(&self) -> Duration {
        let undisturbed = |pod: &&NewPod| pod.created + pod.took <= self.began;
        slowest(self.new_pods.iter().filter(undisturbed))
    }

    /// One line of figures.
    pub(crate) fn print(&self, what: &str) {
        println!(
            "{what}: took {:.1} s; {} requests, none failed, slowest {} ms; {} new pods, slowest {:.1} s (before: {:.1} s)",
            self.disturbance.as_secs_f64(),
            self.load.requests,
            self.load.max_millis,
            self.new_pods.len(),
            slowest(&self.new_pods).as_secs_f64(),
            self.usual().as_secs_f64()
        );
    }

    /// Fails if a new pod took longer than usual by more than `delay`.
    pub(crate) fn assert_no_pod_delayed(&self, delay: Duration) -> anyhow::Result<()> {
        let limit = self.usual() + delay * time_factor();
        let late: Vec<_> = self.new_pods.iter().filter(|pod| pod.took > limit).collect();
        ensure!(
            late.is_empty(),
            "{} of {} new pods took longer than {limit:?}: {late:?}",
            late.len(),
            self.new_pods.len()
        );
        Ok(())
    }
}

fn slowest<'a>(pods: impl IntoIterator<Item = &'a NewPod>) -> Duration {
    pods.into_iter().map(|pod| pod.took).max().unwrap_or_default()
}

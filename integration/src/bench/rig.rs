//! A node to measure on, with a peer that acknowledges in the proxy's place.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::{Value, json};
use sluice_testkit::cni::{Attachment, Chain, Execution};
use sluice_testkit::pod::Pod;
use sluice_testkit::wait::poll_true;

use super::peer::ZdsPeer;
use crate::manifests::PodOptions;
use crate::mesh::{Mesh, MeshOptions};

/// Kubernetes namespace that is in the mesh.
pub(super) const IN_MESH: &str = "default";
/// Kubernetes namespace without a label.
pub(super) const OUTSIDE: &str = "outside";
/// Kubernetes namespace that the plugin passes by itself.
pub(super) const EXEMPT: &str = "kube-system";

const PATIENCE: Duration = Duration::from_mins(1);
/// A node whose bridge has heard nothing for so long is quiet.
const LULL: Duration = Duration::from_millis(300);

/// The node.
#[derive(Debug)]
pub(super) struct Rig {
    pub(super) peer: Option<ZdsPeer>,
    pub(super) pods: Vec<Pod>,
    chain: Chain,
    made: usize,
    pub(super) mesh: Mesh,
}

impl Rig {
    /// Starts the processes; `executor` are further arguments.
    pub(super) fn start(executor: &[&str]) -> anyhow::Result<Self> {
        let mesh = Mesh::start_with(MeshOptions {
            executor: executor.iter().map(|arg| (*arg).to_owned()).collect(),
            without_proxy: true,
            ..MeshOptions::default()
        })?;
        mesh.manifests.namespace(IN_MESH, "ambient")?;
        mesh.manifests.namespace(OUTSIDE, "")?;
        let chain = mesh.chain()?;
        let mut rig = Self {
            peer: None,
            pods: Vec::new(),
            chain,
            made: 0,
            mesh,
        };
        rig.connect_peer()?;
        Ok(rig)
    }

    /// Connects the peer (again) and waits for its snapshot; gives what [`ZdsPeer::snapshot`] does.
    pub(super) fn connect_peer(&mut self) -> anyhow::Result<(Duration, usize)> {
        if self.peer.take().is_some() {
            // The broker withdraws what the last connection stood for; that is not part of the next snapshot.
            poll_true("the broker has seen the connection end", PATIENCE, || {
                self.mesh
                    .node_status()
                    .is_ok_and(|node| node.zds.is_empty() && node.pods_enrolled == 0)
            })?;
        }
        let peer = ZdsPeer::connect(&self.mesh.run.zds_socket())?;
        let snapshot = peer.snapshot()?;
        self.peer = Some(peer);
        Ok(snapshot)
    }

    /// Makes pods and their manifests, as the API has them before the runtime has been asked for the sandbox, and waits
    /// until the broker knows them all. (For one that is said to run, the opener would look through all processes.)
    pub(super) fn make(&mut self, count: usize, namespace: &str) -> anyhow::Result<Vec<Pod>> {
        let pending = PodOptions {
            phase: "Pending".to_owned(),
            without_addresses: true,
            ..PodOptions::default()
        };
        let mut pods = Vec::with_capacity(count);
        for _ in 0..count {
            self.made += 1;
            let pod = self
                .mesh
                .node()
                .pod(&format!("pod-{}", self.made))
                .namespace(namespace)
                .dual_stack()
                .create()?;
            self.mesh.manifests.pod(&pod, &pending)?;
            pods.push(pod);
        }
        if let Some(last) = pods.last() {
            // Manifests are taken in order.
            poll_true("the broker knows the pods", PATIENCE, || {
                self.mesh
                    .describe(last)
                    .is_ok_and(|described| described.pod.is_some())
            })?;
        }
        Ok(pods)
    }

    /// ADD through the plugin.
    pub(super) fn add(&self, pod: &Pod) -> anyhow::Result<Execution> {
        self.command("ADD", pod, json!(null))
    }

    /// ADD through a plugin whose configuration names the namespaces that it passes by itself.
    pub(super) fn add_exempt(&self, pod: &Pod) -> anyhow::Result<Execution> {
        self.command("ADD", pod, json!({ "excludedNamespaces": [EXEMPT] }))
    }

    /// DEL through the plugin.
    pub(super) fn del(&self, pod: &Pod) -> anyhow::Result<Execution> {
        self.command("DEL", pod, json!(null))
    }

    fn command(&self, command: &str, pod: &Pod, selection: Value) -> anyhow::Result<Execution> {
        let mut plugin = self.chain.plugins.first().context("empty chain")?.clone();
        if !selection.is_null() {
            plugin["selection"] = selection;
        }
        let prev = pod.prev_result("1.0.0");
        let execution = self
            .chain
            .execute(&plugin, command, Some(&Attachment::from(pod)), Some(&prev))?;
        let failed = || {
            format!(
                "{command} of {}: {} {}",
                pod.name(),
                execution.stdout,
                execution.stderr
            )
        };
        anyhow::ensure!(execution.status.success(), failed());
        Ok(execution)
    }

    /// DEL, manifest and sandbox of each of these.
    pub(super) fn remove(&self, pods: Vec<Pod>) -> anyhow::Result<()> {
        for pod in pods {
            self.del(&pod)?;
            self.mesh.manifests.delete_pod(&pod)?;
            pod.delete()?;
        }
        Ok(())
    }

    /// Waits until the pods have told each other that they are there: what they say reaches each of them, and the kernel
    /// works on it within whatever is measured.
    pub(super) fn wait_quiet(&self) -> anyhow::Result<()> {
        self.mesh.node().wait_quiet(LULL, PATIENCE)
    }

    /// Adds mesh pods until there are `count`, and keeps them.
    pub(super) fn grow_to(&mut self, count: usize) -> anyhow::Result<()> {
        let more = self.make(count.saturating_sub(self.pods.len()), IN_MESH)?;
        for chunk in more.chunks(16) {
            together(chunk.len(), |i| self.add(&chunk[i]))?;
        }
        self.pods.extend(more);
        Ok(())
    }
}

/// Runs `act` `count` times at the same moment; gives what each gave, and the time from the start to the last end.
pub(super) fn together<T: Send>(
    count: usize,
    act: impl Fn(usize) -> anyhow::Result<T> + Sync,
) -> anyhow::Result<(Vec<T>, Duration)> {
    let (start, act) = (&Barrier::new(count), &act);
    std::thread::scope(|scope| {
        let run = |i| {
            scope.spawn(move || {
                start.wait();
                // By the threads' own clocks: who waits for them may be scheduled late.
                let began = Instant::now();
                act(i).map(|result| (result, began, Instant::now()))
            })
        };
        let threads: Vec<_> = (0..count).map(run).collect();
        let results = threads.into_iter().map(|thread| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        let results = results.collect::<anyhow::Result<Vec<(T, Instant, Instant)>>>()?;
        let first = results.iter().map(|(_, began, _)| *began).min();
        let last = results.iter().map(|(.., ended)| *ended).max();
        let total = last
            .zip(first)
            .map(|(last, first)| last - first)
            .unwrap_or_default();
        Ok((results.into_iter().map(|(result, ..)| result).collect(), total))
    })
}

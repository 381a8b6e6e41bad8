//! Pod sandboxes made without the kubelet, straight by the container runtime: for pods that the API server cannot tell
//! the kubelet about, and for the runtime's own words and times.

use anyhow::Context;
use serde_json::json;

use crate::harness::Cluster;
use crate::sluice::cri;

/// A sandbox of the runtime; removed when dropped.
pub(crate) struct Sandbox<'a> {
    cluster: &'a Cluster,
    id: String,
}

impl<'a> Sandbox<'a> {
    /// Has the runtime make a sandbox as the kubelet would for a pod of this name that the API server does not have; the error is
    /// the runtime's.
    pub(crate) fn try_run(cluster: &'a Cluster, namespace: &str, name: &str) -> anyhow::Result<Self> {
        let nanos = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)?
            .as_nanos();
        let uid = format!("5a17c0de-0000-4000-8000-{:012x}", nanos & 0xffff_ffff_ffff);
        Self::try_run_as(cluster, namespace, name, &uid)
    }

    /// As [`Self::try_run`], for the pod of this UID.
    pub(crate) fn try_run_as(
        cluster: &'a Cluster,
        namespace: &str,
        name: &str,
        uid: &str,
    ) -> anyhow::Result<Self> {
        let config = json!({
            "metadata": {"name": name, "namespace": namespace, "uid": uid, "attempt": 0},
            "labels": {
                "io.kubernetes.pod.name": name, "io.kubernetes.pod.namespace": namespace, "io.kubernetes.pod.uid": uid,
            },
            // Below the node's own cgroup, which goes with the node.
            "linux": {
                "cgroup_parent": format!("/{}/by-hand", cluster.node_cgroup()),
                "security_context": {"namespace_options": {"pid": 1}},
            },
        });
        let file = cluster.node_path("/run/sandbox.json")?;
        std::fs::write(&file, config.to_string()).with_context(|| format!("writing {}", file.display()))?;
        let id = cri(cluster, &["--timeout", "60s", "runp", "/run/sandbox.json"])?;
        Ok(Self {
            cluster,
            id: id.trim().to_owned(),
        })
    }
}

impl Drop for Sandbox<'_> {
    fn drop(&mut self) {
        let _ = cri(self.cluster, &["rmp", "--force", &self.id]);
    }
}

/// Milliseconds that each `RunPodSandbox` of these pods took until its end, good or bad, by the runtime's log, in its order.
pub(crate) fn creation_times(log: &str, pod_prefix: &str) -> Vec<f64> {
    // containerd 2, and before it.
    let wanted = [format!("name:\\\"{pod_prefix}"), format!("Name:{pod_prefix}")];
    let mut started: Vec<(&str, f64)> = Vec::new();
    let mut times = Vec::new();
    for line in log.lines() {
        let (Some(at), Some(pod)) = (seconds(line), identity(line)) else {
            continue;
        };
        if !wanted.iter().any(|wanted| pod.contains(wanted)) {
            continue;
        }
        if line.contains("returns sandbox id") || line.contains("failed, error") {
            if let Some(index) = started.iter().position(|(name, _)| *name == pod) {
                times.push((at - started.remove(index).1) * 1000.0);
            }
        } else {
            started.push((pod, at));
        }
    }
    times
}

/// Seconds of the day in `time="2026-01-02T03:04:05.678901234Z"`; runs that pass midnight are not measured.
fn seconds(line: &str) -> Option<f64> {
    let stamp = line.split("time=\"").nth(1)?.split('"').next()?;
    let clock = stamp.split('T').nth(1)?;
    let clock = clock.trim_end_matches('Z').split('+').next()?;
    let mut parts = clock.split(':');
    let (hours, minutes, seconds): (f64, f64, f64) = (
        parts.next()?.parse().ok()?,
        parts.next()?.parse().ok()?,
        parts.next()?.parse().ok()?,
    );
    Some(hours * 3600.0 + minutes * 60.0 + seconds)
}

/// The part of a log line about `RunPodSandbox` that names pod, UID and attempt.
fn identity(line: &str) -> Option<&str> {
    let rest = line.split("RunPodSandbox for ").nth(1)?;
    let ends = [" returns sandbox id", " failed, error"].map(|end| rest.find(end));
    let end = ends.into_iter().flatten().min();
    Some(end.map_or_else(|| rest.strip_suffix('"').unwrap_or(rest), |end| &rest[..end]))
}

/// First quartile, median, third quartile.
pub(crate) fn quartiles(values: &[f64]) -> [f64; 3] {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| {
        sorted
            .get(sorted.len() * quarter / 4)
            .copied()
            .unwrap_or(f64::NAN)
    })
}

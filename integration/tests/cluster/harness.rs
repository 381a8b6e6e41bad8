//! The cluster that `make cluster` started, as tests see it: kubectl, helm, the node, and faults of the control plane.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context;
use serde_json::Value;
use sluice_testkit::netns::Place;
use sluice_testkit::process;
use sluice_testkit::wait::poll_sparsely;

use crate::api::Api;

/// Longest wait for anything that an idle cluster does within seconds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The cluster, held by one test at a time: tests stop its parts.
pub(crate) struct Cluster {
    pub(crate) api: Api,
    directory: PathBuf,
    _held: MutexGuard<'static, ()>,
}

impl Cluster {
    /// Takes hold of the running cluster; it is an error that there is none.
    pub(crate) fn take() -> anyhow::Result<Self> {
        let held = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let directory = std::env::var_os("SLUICE_CLUSTER_DIR").context(
            "SLUICE_CLUSTER_DIR is not set: run `make test-cluster`, or `make cluster` and \
             eval \"$(integration/cluster/env.sh)\"",
        )?;
        let cluster = Self {
            api: Api::open()?,
            directory: directory.into(),
            _held: held,
        };
        cluster.api.get("/version").context("is the cluster up?")?;
        Ok(cluster)
    }

    /// Runs kubectl; gives stdout.
    pub(crate) fn kubectl(&self, args: &[&str]) -> anyhow::Result<String> {
        process::text(&Place::default(), "kubectl", args, b"")
    }

    /// Applies manifests.
    pub(crate) fn apply(&self, manifests: &[Value]) -> anyhow::Result<()> {
        let list = serde_json::json!({"apiVersion": "v1", "kind": "List", "items": manifests});
        process::text(
            &Place::default(),
            "kubectl",
            &["apply", "-f", "-"],
            list.to_string().as_bytes(),
        )
        .map(drop)
    }

    /// Waits for a rollout to end.
    pub(crate) fn rolled_out(&self, namespace: &str, what: &str) -> anyhow::Result<()> {
        let timeout = format!("--timeout={}s", PATIENCE.as_secs());
        self.kubectl(&["-n", namespace, "rollout", "status", what, &timeout])
            .map(drop)
    }

    /// Replaces the pod of a DaemonSet, and waits until the new one is Ready.
    pub(crate) fn replace_pod(&self, namespace: &str, daemon_set: &str) -> anyhow::Result<()> {
        let what = format!("daemonset/{daemon_set}");
        self.kubectl(&["-n", namespace, "rollout", "restart", &what])?;
        eventually(&format!("{what} has another pod"), PATIENCE, || {
            let set = self.daemon_set(namespace, daemon_set)?;
            let number = |pointer: &str| set.pointer(pointer).and_then(Value::as_u64);
            let seen = number("/status/observedGeneration") == number("/metadata/generation");
            let there = ["updatedNumberScheduled", "numberReady"]
                .iter()
                .all(|count| number(&format!("/status/{count}")) == Some(1));
            Ok((seen && there).then_some(()))
        })
    }

    /// A DaemonSet.
    pub(crate) fn daemon_set(&self, namespace: &str, name: &str) -> anyhow::Result<Value> {
        let sets = format!("/apis/apps/v1/namespaces/{namespace}/daemonsets");
        self.api.get(&format!("{sets}/{name}"))
    }

    /// The pods of a DaemonSet, those being deleted included.
    pub(crate) fn pods_of(&self, namespace: &str, daemon_set: &str) -> anyhow::Result<Vec<Value>> {
        let set = self.daemon_set(namespace, daemon_set)?;
        let labels = set
            .pointer("/spec/selector/matchLabels")
            .and_then(Value::as_object)
            .context("no selector")?;
        let pairs: Vec<String> = labels
            .iter()
            .map(|(key, value)| format!("{key}={}", value.as_str().unwrap_or_default()))
            .collect();
        let pods = format!("/api/v1/namespaces/{namespace}/pods");
        let list = self
            .api
            .get(&format!("{pods}?labelSelector={}", pairs.join(",")))?;
        Ok(list["items"].as_array().context("no list of pods")?.clone())
    }

    /// Takes a DaemonSet's pod off the node while the DaemonSet stays (no node matches it), and waits until it has gone.
    pub(crate) fn take_off_the_node(&self, namespace: &str, daemon_set: &str) -> anyhow::Result<()> {
        self.select_node(namespace, daemon_set, "\"nowhere\"")?;
        eventually(&format!("{daemon_set} has no pod"), PATIENCE, || {
            Ok(self.pods_of(namespace, daemon_set)?.is_empty().then_some(()))
        })
    }

    /// Undoes [`Self::take_off_the_node`], without waiting.
    pub(crate) fn put_on_the_node(&self, namespace: &str, daemon_set: &str) -> anyhow::Result<()> {
        self.select_node(namespace, daemon_set, "null")
    }

    fn select_node(&self, namespace: &str, daemon_set: &str, value: &str) -> anyhow::Result<()> {
        let patch = format!(
            r#"{{"spec":{{"template":{{"spec":{{"nodeSelector":{{"sluice.test/node":{value}}}}}}}}}}}"#
        );
        self.kubectl(&[
            "-n",
            namespace,
            "patch",
            "daemonset",
            daemon_set,
            "--patch",
            &patch,
        ])
        .map(drop)
    }

    /// Runs helm; gives stdout.
    pub(crate) fn helm(&self, args: &[&str]) -> anyhow::Result<String> {
        process::text(&Place::default(), "helm", args, b"")
    }

    /// Runs a program inside the node (its mounts, network and processes); gives stdout.
    pub(crate) fn node(&self, command: &[&str]) -> anyhow::Result<String> {
        let mut args = vec!["exec"];
        args.extend(command);
        self.script("node.sh", &args)
    }

    /// As [`Self::node`], for a shell's command line.
    pub(crate) fn node_sh(&self, line: &str) -> anyhow::Result<String> {
        self.node(&["sh", "-c", line])
    }

    /// Runs one of the cluster's scripts.
    pub(crate) fn script(&self, name: &str, args: &[&str]) -> anyhow::Result<String> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("cluster").join(name);
        process::text(&Place::default(), &path.to_string_lossy(), args, b"")
    }

    /// Host path of a file in the node's own root, for sockets: through its process 1.
    pub(crate) fn node_path(&self, path: &str) -> anyhow::Result<PathBuf> {
        Ok(PathBuf::from(format!("/proc/{}/root{path}", self.node_pid()?)))
    }

    /// The directory that the kubelet takes static pods from.
    pub(crate) fn static_pods(&self) -> PathBuf {
        self.directory.join("node1/static-pods")
    }

    /// The node's namespaces, for programs of this machine that are to run in them.
    pub(crate) fn node_place(&self) -> anyhow::Result<Place> {
        Ok(Place::of_process(self.node_pid()?)?)
    }

    /// Process 1 of the node, as seen from this machine.
    fn node_pid(&self) -> anyhow::Result<u32> {
        let pids =
            std::fs::read_to_string(self.directory.join("node1/init.pid")).context("is the node up?")?;
        Ok(pids
            .split_whitespace()
            .next()
            .context("empty pid file")?
            .parse()?)
    }

    /// Name of the node's cgroup, in every hierarchy (`integration/cluster/lib.sh`).
    pub(crate) fn node_cgroup(&self) -> String {
        format!(
            "sluice{}-node1",
            std::env::var("INSTANCE").unwrap_or_else(|_| "0".to_owned())
        )
    }

    /// A log file of the cluster (`kubelet`, `containerd`, `kube-apiserver`).
    pub(crate) fn log(&self, name: &str) -> anyhow::Result<String> {
        let path = self.directory.join("log").join(format!("{name}.log"));
        std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
    }

    /// Id of a process of the control plane or the node, as seen from this machine.
    pub(crate) fn pid(&self, name: &str) -> anyhow::Result<i32> {
        let text = std::fs::read_to_string(self.directory.join("pid").join(name))?;
        Ok(text
            .split_whitespace()
            .next()
            .context("empty pid file")?
            .parse()?)
    }

    /// The end of each log that may explain a failure.
    fn evidence(&self) -> String {
        use crate::sluice::{CONTAINERS, DAEMON_SET, NAMESPACE, with_spare};
        let what = format!("daemonset/{DAEMON_SET}");
        let logs = CONTAINERS.into_iter().flat_map(with_spare).map(|container| {
            let log = self.kubectl(&["-n", NAMESPACE, "logs", &what, "-c", container, "--tail=15"]);
            format!(
                "--- {container}\n{}",
                log.unwrap_or_else(|error| error.to_string())
            )
        });
        let logs: Vec<String> = logs.collect();
        let kubelet = self.log("kubelet").unwrap_or_default();
        let complaints: Vec<&str> = kubelet.lines().filter(|line| line.starts_with('E')).collect();
        format!(
            "--- the agent\n{}\n{}\n--- kubelet\n{}",
            self.describe(NAMESPACE),
            logs.join("\n"),
            tail(&complaints.join("\n"), 10)
        )
    }

    /// Everything about a namespace that helps to understand a failure.
    pub(crate) fn describe(&self, namespace: &str) -> String {
        let pods = self.kubectl(&["-n", namespace, "get", "pods", "-o", "wide"]);
        let events = self.kubectl(&["-n", namespace, "get", "events", "--sort-by=.lastTimestamp"]);
        format!(
            "{}\n{}",
            pods.unwrap_or_else(|e| e.to_string()),
            tail(&events.unwrap_or_else(|e| e.to_string()), 25)
        )
    }
}

/// The last lines of a text.
pub(crate) fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// Longest pause between two looks at the cluster: each takes the control plane some milliseconds of the cores that the node has.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// Polls a fallible question; the last error is part of the failure.
pub(crate) fn eventually<T>(
    what: &str,
    within: Duration,
    mut ask: impl FnMut() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    let mut last = None;
    poll_sparsely(what, within, LONGEST_PAUSE, || match ask() {
        Ok(answer) => answer,
        Err(error) => {
            last = Some(error);
            None
        }
    })
    .map_err(|late| match last {
        Some(error) => error.context(late),
        None => late.into(),
    })
}

/// How much longer things may take than on a machine that does nothing else: `SLUICE_TIME_FACTOR`, 1 if unset. For limits on what
/// the whole node does; whether anything is lost or unprotected does not depend on it.
pub(crate) fn time_factor() -> u32 {
    std::env::var("SLUICE_TIME_FACTOR").map_or(1, |factor| {
        factor
            .parse()
            .unwrap_or_else(|error| panic!("SLUICE_TIME_FACTOR={factor}: {error}; a whole number is allowed"))
    })
}

/// Runs a test on the cluster, alone; if it fails, prints what the agent and the kubelet said.
pub(crate) fn on_cluster(test: impl FnOnce(&Cluster) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let cluster = Cluster::take()?;
    test(&cluster).inspect_err(|_| eprintln!("{}", cluster.evidence()))
}

/// A Kubernetes namespace; deleted, with what is in it, when dropped.
pub(crate) struct Namespace<'a> {
    pub(crate) name: String,
    pub(crate) cluster: &'a Cluster,
}

/// Whether a namespace's pods belong to the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mesh {
    In,
    Out,
}

/// Puts a namespace or a pod into the mesh.
pub(crate) const MODE_LABEL: &str = "istio.io/dataplane-mode";

impl<'a> Namespace<'a> {
    /// Makes one of a name that no other test uses, and waits for its default service account.
    pub(crate) fn create(cluster: &'a Cluster, purpose: &str, mesh: Mesh) -> anyhow::Result<Self> {
        let unique = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)?
            .as_millis()
            % 100_000_000;
        let namespace = Self {
            name: format!("{purpose}-{unique}"),
            cluster,
        };
        let labels = match mesh {
            Mesh::In => serde_json::json!({MODE_LABEL: "ambient"}),
            Mesh::Out => serde_json::json!({}),
        };
        cluster.apply(&[serde_json::json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace.name, "labels": labels},
        })])?;
        // Until the controller manager has made it, every pod is refused.
        eventually("default service account", PATIENCE, || {
            namespace.get("serviceaccounts/default").map(Some)
        })?;
        Ok(namespace)
    }

    /// kubectl in this namespace.
    pub(crate) fn kubectl(&self, args: &[&str]) -> anyhow::Result<String> {
        let mut all = vec!["-n", &self.name];
        all.extend(args);
        self.cluster.kubectl(&all)
    }

    /// What the API server has at this path below the namespace's core objects, for instance `pods`.
    pub(crate) fn get(&self, path: &str) -> anyhow::Result<Value> {
        self.cluster
            .api
            .get(&format!("/api/v1/namespaces/{}/{path}", self.name))
    }

    /// Labels it into the mesh or takes the label away.
    pub(crate) fn set_mesh(&self, mesh: Mesh) -> anyhow::Result<()> {
        let label = match mesh {
            Mesh::In => format!("{MODE_LABEL}=ambient"),
            Mesh::Out => format!("{MODE_LABEL}-"),
        };
        self.cluster
            .kubectl(&["label", "namespace", &self.name, &label, "--overwrite"])
            .map(drop)
    }

    /// What the namespace's pods and events look like now.
    pub(crate) fn describe(&self) -> String {
        self.cluster.describe(&self.name)
    }
}

impl Drop for Namespace<'_> {
    fn drop(&mut self) {
        let _ = self.kubectl(&[
            "delete",
            "pod,deployment,job",
            "--all",
            "--wait=false",
            "--grace-period=1",
        ]);
        let _ = self
            .cluster
            .kubectl(&["delete", "namespace", &self.name, "--wait=false"]);
    }
}

//! The release under test: installed by helm from this repository's chart.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::Value;

use crate::harness::{Cluster, PATIENCE, eventually};
use crate::ztunnel::Ztunnel;

/// Namespace of the release.
pub(crate) const NAMESPACE: &str = "sluice-system";
/// Name of release and DaemonSet.
const RELEASE: &str = "sluice";
pub(crate) const DAEMON_SET: &str = "sluice-node";
/// Containers of the agent pod, in the default profile, but for the spares.
pub(crate) const CONTAINERS: [&str; 4] = ["netns-executor", "netns-opener", "ambient-broker", "installer"];

/// A container and its spare, if it has one. Opener and installer have none: no new pod waits for them.
pub(crate) fn with_spare(container: &'static str) -> Vec<&'static str> {
    match container {
        "netns-executor" => vec![container, "netns-executor-spare"],
        "ambient-broker" => vec![container, "ambient-broker-spare"],
        _ => vec![container],
    }
}

/// The installed release with its proxy.
pub(crate) struct Sluice<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) ztunnel: Ztunnel,
}

impl<'a> Sluice<'a> {
    /// Brings the cluster into the state that tests begin with: released with the chart's defaults, ready, chained, and
    /// a ready proxy.
    pub(crate) fn ensure(cluster: &'a Cluster) -> anyhow::Result<Self> {
        Self::ensure_with(cluster, &[])
    }

    /// As [`Self::ensure`], with values as `--set` takes them.
    pub(crate) fn ensure_with(cluster: &'a Cluster, values: &[&str]) -> anyhow::Result<Self> {
        let ztunnel = Ztunnel::ensure(cluster)?;
        let sluice = Self { cluster, ztunnel };
        sluice.upgrade(values)?;
        sluice.return_agent()?;
        sluice.wait_ready()?;
        Ok(sluice)
    }

    /// `helm upgrade --install`, without waiting.
    pub(crate) fn upgrade(&self, values: &[&str]) -> anyhow::Result<()> {
        let chart = repository().join("charts/sluice");
        let chart = chart.to_string_lossy();
        let mut args = vec![
            "upgrade",
            "--install",
            RELEASE,
            &chart,
            "--namespace",
            NAMESPACE,
            "--create-namespace",
            "--set",
            "image.repository=localhost/sluice,image.tag=dev,image.pullPolicy=IfNotPresent",
        ];
        for value in values {
            args.extend(["--set", value]);
        }
        self.cluster.helm(&args).map(drop)
    }

    /// `helm uninstall --wait`; well if there is none.
    pub(crate) fn uninstall(&self) -> anyhow::Result<()> {
        let timeout = format!("{}s", PATIENCE.as_secs());
        let args = [
            "uninstall",
            RELEASE,
            "--namespace",
            NAMESPACE,
            "--wait",
            "--ignore-not-found",
            "--timeout",
            &timeout,
        ];
        self.cluster.helm(&args).map(drop)
    }

    /// Waits until every container is ready, the chain entry is in place, and the proxy has its snapshot.
    pub(crate) fn wait_ready(&self) -> anyhow::Result<()> {
        let what = format!("daemonset/{DAEMON_SET}");
        self.cluster
            .rolled_out(NAMESPACE, &what)
            .with_context(|| self.cluster.describe(NAMESPACE))?;
        eventually("the chain entry is in place", PATIENCE, || {
            Ok(self.chained()?.then_some(()))
        })?;
        self.ztunnel.wait_ready()
    }

    /// The network configuration in use: the first file by name, as the runtime takes it.
    pub(crate) fn chain(&self) -> anyhow::Result<Value> {
        let first = self
            .cluster
            .node_sh("cat \"$(ls -d /etc/cni/net.d/*.conflist | head -n 1)\"")?;
        serde_json::from_str(&first).context("the network configuration in use")
    }

    /// Whether our entry is in the network configuration in use.
    pub(crate) fn chained(&self) -> anyhow::Result<bool> {
        let chain = self.chain()?;
        let plugins = chain["plugins"].as_array().context("a list without plugins")?;
        Ok(plugins.iter().any(|plugin| plugin["type"] == "sluice-cni"))
    }

    /// Name of the agent's pod.
    pub(crate) fn pod(&self) -> anyhow::Result<String> {
        let pods = self.cluster.pods_of(NAMESPACE, DAEMON_SET)?;
        let live: Vec<&Value> = pods
            .iter()
            .filter(|pod| pod.pointer("/metadata/deletionTimestamp").is_none())
            .collect();
        ensure!(live.len() == 1, "{} agent pods", live.len());
        Ok(live[0]["metadata"]["name"]
            .as_str()
            .context("no name")?
            .to_owned())
    }

    /// Process id, in the node's PID namespace, of process 1 of a container of the agent.
    pub(crate) fn init_pid(&self, container: &str) -> anyhow::Result<String> {
        let id = self.cri(&[
            "ps",
            "--quiet",
            "--state",
            "Running",
            "--name",
            &format!("^{container}$"),
            "--label",
            &format!("io.kubernetes.pod.namespace={NAMESPACE}"),
        ])?;
        let id = id.trim();
        ensure!(
            !id.is_empty() && !id.contains('\n'),
            "running containers {container}: {id:?}"
        );
        let state: Value = serde_json::from_str(&self.cri(&["inspect", id])?)?;
        Ok(state
            .pointer("/info/pid")
            .and_then(Value::as_u64)
            // Of one that has just ended it is 0.
            .filter(|pid| *pid != 0)
            .context("no pid")?
            .to_string())
    }

    /// Of a container and its spare, if it has one, the one whose service works.
    pub(crate) fn serving(&self, container: &'static str) -> anyhow::Result<&'static str> {
        let [_, spare] = with_spare(container)[..] else {
            return Ok(container);
        };
        let services = [self.service_of(container)?, self.service_of(spare)?];
        eventually("one of the two stands by", PATIENCE, || {
            // The other one's service waits for the lock: proc_locks(5), with `->` in the second place and its process id in the sixth.
            let locks = self.cluster.node(&["cat", "/proc/locks"])?;
            let waits = |service: &String| {
                locks.lines().any(|line| {
                    let fields: Vec<&str> = line.split_whitespace().collect();
                    fields.get(1) == Some(&"->") && fields.get(5) == Some(&service.as_str())
                })
            };
            Ok(match services.each_ref().map(waits) {
                [false, true] => Some(container),
                [true, false] => Some(spare),
                _ => None,
            })
        })
    }

    fn service_of(&self, container: &str) -> anyhow::Result<String> {
        self.service_pid(&self.init_pid(container)?)
    }

    /// Process id, in the node's PID namespace, of the service that works in a container or its spare.
    pub(crate) fn serving_pid(&self, container: &'static str) -> anyhow::Result<String> {
        self.service_of(self.serving(container)?)
    }

    /// Process id, in the node's PID namespace, of the service that process 1 of a container looks after.
    pub(crate) fn service_pid(&self, init: &str) -> anyhow::Result<String> {
        // proc_pid_task_children(5); a container has few processes, so that all are there.
        let children = self
            .cluster
            .node(&["cat", &format!("/proc/{init}/task/{init}/children")])?;
        let mut children = children.split_whitespace();
        let service = children.next().context("process 1 has no child")?;
        ensure!(children.next().is_none(), "process 1 has more than one child");
        Ok(service.to_owned())
    }

    /// Runs crictl in the node.
    pub(crate) fn cri(&self, args: &[&str]) -> anyhow::Result<String> {
        cri(self.cluster, args)
    }

    /// Takes the agent away while its DaemonSet wants it on the node: by an upgrade to an image that cannot be had, and the end of
    /// the pod that would stay until the new one is ready; waits until none of its processes runs. Undone by
    /// [`Self::return_agent`].
    pub(crate) fn remove_agent(&self) -> anyhow::Result<()> {
        let serving = self.pod()?;
        self.set_image("missing")?;
        self.cluster
            .kubectl(&["-n", NAMESPACE, "delete", "pod", &serving, "--wait=false"])?;
        eventually("the agent's processes are gone", PATIENCE, || {
            let label = format!("io.kubernetes.pod.namespace={NAMESPACE}");
            let running = self.cri(&["ps", "--quiet", "--state", "Running", "--label", &label])?;
            Ok(running.trim().is_empty().then_some(()))
        })
    }

    /// Gives the DaemonSet its image again, without waiting.
    pub(crate) fn return_agent(&self) -> anyhow::Result<()> {
        self.set_image("dev")
    }

    /// Gives the DaemonSet another image, without waiting.
    pub(crate) fn set_image(&self, tag: &str) -> anyhow::Result<()> {
        let what = format!("daemonset/{DAEMON_SET}");
        let image = format!("*=localhost/sluice:{tag}");
        self.cluster
            .kubectl(&["-n", NAMESPACE, "set", "image", &what, &image])
            .map(drop)
    }

    /// Waits until a container that was killed is back and the agent serves.
    pub(crate) fn wait_recovered(&self, within: Duration) -> anyhow::Result<()> {
        eventually("the agent is ready again", within, || {
            let list = self.cluster.daemon_set(NAMESPACE, DAEMON_SET)?;
            let status = |key: &str| {
                list.pointer(&format!("/status/{key}"))
                    .and_then(Value::as_u64)
                    .unwrap_or(0)
            };
            let ready = status("numberReady") == 1 && status("desiredNumberScheduled") == 1;
            Ok((ready && self.ztunnel.control.counts()?.ready).then_some(()))
        })
    }
}

/// Runs crictl in the node.
pub(crate) fn cri(cluster: &Cluster, args: &[&str]) -> anyhow::Result<String> {
    let mut command = vec![
        "crictl",
        "--runtime-endpoint",
        "unix:///run/containerd/containerd.sock",
    ];
    command.extend(args);
    cluster.node(&command)
}

/// The repository's root.
pub(crate) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .map(Path::to_owned)
        .unwrap_or_default()
}

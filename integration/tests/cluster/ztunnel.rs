//! The stand-in for ztunnel as a DaemonSet: at ztunnel's socket path, with ztunnel's user, group and capabilities.

use std::time::Duration;

use serde_json::{Value, json};
use sluice_testkit::standin::{Control, Report, WorkloadReport};

use crate::harness::{Cluster, PATIENCE};
use crate::pods::Pod;

const NAMESPACE: &str = "istio-system";
const NAME: &str = "ztunnel";
/// Host directory of the control socket.
const CONTROL_DIR: &str = "/run/standin-ztunnel";

/// The running stand-in.
pub(crate) struct Ztunnel {
    pub(crate) control: Control,
}

impl Ztunnel {
    /// Makes sure that it runs and behaves well. It is up before the agent is, so its readiness is not waited for here.
    pub(crate) fn ensure(cluster: &Cluster) -> anyhow::Result<Self> {
        cluster.apply(&[
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}),
            daemon_set(),
        ])?;
        cluster.put_on_the_node(NAMESPACE, NAME)?;
        cluster.rolled_out(NAMESPACE, &format!("daemonset/{NAME}"))?;
        let ztunnel = Self::of_node(cluster)?;
        ztunnel.control.wait("stand-in answers", PATIENCE, |_| true)?;
        ztunnel
            .control
            .behave(sluice_testkit::standin::Behaviour::default())?;
        Ok(ztunnel)
    }

    /// The one of the node as it is, whether it runs or not.
    pub(crate) fn of_node(cluster: &Cluster) -> anyhow::Result<Self> {
        Ok(Self {
            control: Control::new(cluster.node_path(&format!("{CONTROL_DIR}/control.sock"))?),
        })
    }

    /// Takes it off the node, as if it had never been installed.
    pub(crate) fn remove(&self, cluster: &Cluster) -> anyhow::Result<()> {
        cluster.take_off_the_node(NAMESPACE, NAME)
    }

    /// Undoes [`Self::remove`].
    pub(crate) fn put_back(&self, cluster: &Cluster) -> anyhow::Result<()> {
        cluster.put_on_the_node(NAMESPACE, NAME)
    }

    /// Waits until its snapshot was taken.
    pub(crate) fn wait_ready(&self) -> anyhow::Result<()> {
        self.control.wait_ready(PATIENCE).map(drop)
    }

    /// Waits until it holds exactly these pods, among others of other namespaces, with open listeners.
    pub(crate) fn wait_held(&self, pods: &[Pod], within: Duration) -> anyhow::Result<Report> {
        self.control.wait("stand-in holds the pods", within, |report| {
            pods.iter()
                .all(|pod| report.workloads.get(&pod.uid).is_some_and(|held| held.listening))
        })
    }

    /// Whether it holds this pod, with open listeners.
    pub(crate) fn holds(&self, pod: &Pod) -> anyhow::Result<bool> {
        let report = self.control.counts()?;
        Ok(report.workloads.get(&pod.uid).is_some_and(|held| held.listening))
    }

    /// Waits until it holds none of these pods.
    pub(crate) fn wait_released(&self, pods: &[Pod], within: Duration) -> anyhow::Result<()> {
        let none_held = |report: &Report| pods.iter().all(|pod| !report.workloads.contains_key(&pod.uid));
        self.control
            .wait("stand-in let go of the pods", within, none_held)
            .map(drop)
    }

    /// What it relayed for a pod so far.
    pub(crate) fn workload(&self, pod: &Pod) -> anyhow::Result<WorkloadReport> {
        let report = self.control.counts()?;
        report
            .workloads
            .get(&pod.uid)
            .cloned()
            .ok_or_else(|| anyhow::anyhow!("the stand-in does not hold {}", pod.name))
    }
}

/// As ztunnel's own chart has it, where it matters here: uid 0, gid 1337, no DAC_OVERRIDE, the socket's directory.
fn daemon_set() -> Value {
    json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {
            "selector": {"matchLabels": {"app": NAME}},
            "template": {
                "metadata": {"labels": {"app": NAME, "istio.io/dataplane-mode": "none"}},
                "spec": {
                    "terminationGracePeriodSeconds": 2,
                    "tolerations": [{"operator": "Exists"}],
                    "containers": [{
                        "name": "istio-proxy",
                        "image": "localhost/standin-ztunnel:test",
                        "imagePullPolicy": "IfNotPresent",
                        "args": [
                            "--zds=/var/run/ztunnel/ztunnel.sock",
                            format!("--control={CONTROL_DIR}/control.sock"),
                        ],
                        "securityContext": {
                            "runAsUser": 0, "runAsGroup": 1337, "runAsNonRoot": false,
                            "allowPrivilegeEscalation": true,
                            "capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN", "SYS_ADMIN", "NET_RAW"]},
                        },
                        "volumeMounts": [
                            {"name": "ztunnel", "mountPath": "/var/run/ztunnel"},
                            {"name": "control", "mountPath": CONTROL_DIR},
                        ],
                    }],
                    "volumes": [
                        {"name": "ztunnel", "hostPath": {"path": "/var/run/ztunnel", "type": "DirectoryOrCreate"}},
                        {"name": "control", "hostPath": {"path": CONTROL_DIR, "type": "DirectoryOrCreate"}},
                    ],
                },
            },
        },
    })
}

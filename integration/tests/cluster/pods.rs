//! Test pods: manifests, and what the API server says about them.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context;
use serde_json::{Value, json};

use crate::harness::{Namespace, PATIENCE, eventually};

/// Image of test pods (`integration/cluster/images.sh`).
pub(crate) const BOX: &str = "localhost/box:test";
/// Set by the agent on a pod whose traffic is redirected.
pub(crate) const STATUS_ANNOTATION: &str = "ambient.istio.io/redirection";

/// A pod as the API server has it.
#[derive(Debug, Clone)]
pub(crate) struct Pod {
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) ip: String,
    pub(crate) phase: String,
    pub(crate) ready: bool,
    pub(crate) restarts: u64,
    pub(crate) deleting: bool,
    pub(crate) annotations: BTreeMap<String, String>,
}

impl Pod {
    fn read(object: &Value) -> Self {
        let text = |pointer: &str| {
            object
                .pointer(pointer)
                .and_then(Value::as_str)
                .unwrap_or_default()
                .to_owned()
        };
        let list = |pointer: &str| {
            object
                .pointer(pointer)
                .and_then(Value::as_array)
                .cloned()
                .unwrap_or_default()
        };
        let annotations = object.pointer("/metadata/annotations").and_then(Value::as_object);
        Self {
            name: text("/metadata/name"),
            uid: text("/metadata/uid"),
            ip: text("/status/podIP"),
            phase: text("/status/phase"),
            ready: list("/status/conditions")
                .iter()
                .any(|c| c["type"] == "Ready" && c["status"] == "True"),
            restarts: list("/status/containerStatuses")
                .iter()
                .filter_map(|s| s["restartCount"].as_u64())
                .sum(),
            deleting: object.pointer("/metadata/deletionTimestamp").is_some(),
            annotations: annotations
                .into_iter()
                .flatten()
                .map(|(key, value)| (key.clone(), value.as_str().unwrap_or_default().to_owned()))
                .collect(),
        }
    }

    /// The status annotation.
    pub(crate) fn status(&self) -> Option<&str> {
        self.annotations.get(STATUS_ANNOTATION).map(String::as_str)
    }
}

impl Namespace<'_> {
    /// All pods, without those being deleted.
    pub(crate) fn pods(&self) -> anyhow::Result<Vec<Pod>> {
        self.pods_selected("")
    }

    /// The pods that a label selector selects, without those being deleted.
    pub(crate) fn pods_selected(&self, labels: &str) -> anyhow::Result<Vec<Pod>> {
        let list = self.get(&format!("pods?labelSelector={labels}"))?;
        let items = list["items"].as_array().context("no list of pods")?;
        Ok(items.iter().map(Pod::read).filter(|pod| !pod.deleting).collect())
    }

    /// One pod.
    pub(crate) fn pod(&self, name: &str) -> anyhow::Result<Pod> {
        Ok(Pod::read(&self.get(&format!("pods/{name}"))?))
    }

    /// Makes a pod.
    pub(crate) fn create_pod(&self, name: &str, spec: &Value) -> anyhow::Result<()> {
        let pods = format!("/api/v1/namespaces/{}/pods", self.name);
        self.cluster.api.create(&pods, &pod(self, name, spec))
    }

    /// Deletes a pod and waits until it has gone.
    pub(crate) fn delete_pod(&self, name: &str) -> anyhow::Result<()> {
        let path = format!("pods/{name}");
        self.cluster
            .api
            .delete(&format!("/api/v1/namespaces/{}/{path}", self.name))?;
        eventually(&format!("pod {name} has gone"), PATIENCE, || {
            Ok(self.get(&path).is_err().then_some(()))
        })
    }

    /// Waits until exactly `count` pods are Ready; gives them.
    pub(crate) fn wait_ready(&self, count: usize, within: Duration) -> anyhow::Result<Vec<Pod>> {
        eventually(
            &format!("{count} pods of {} are Ready", self.name),
            within,
            || {
                let pods = self.pods()?;
                let ready = pods.iter().filter(|pod| pod.ready).count();
                if ready == count && pods.len() == count {
                    return Ok(Some(pods));
                }
                anyhow::bail!("{ready} of {} Ready", pods.len())
            },
        )
        .with_context(|| self.describe())
    }

    /// Waits until a pod satisfies a condition.
    pub(crate) fn wait_pod(
        &self,
        name: &str,
        what: &str,
        within: Duration,
        condition: impl Fn(&Pod) -> bool,
    ) -> anyhow::Result<Pod> {
        eventually(&format!("pod {name}: {what}"), within, || {
            Ok(Some(self.pod(name)?).filter(&condition))
        })
        .with_context(|| self.describe())
    }

    /// Messages of the events of a pod with this reason, newest last.
    pub(crate) fn events(&self, pod: &str, reason: &str) -> anyhow::Result<Vec<String>> {
        let selector = format!("involvedObject.name={pod},reason={reason}");
        let list = self.get(&format!("events?fieldSelector={selector}"))?;
        let items = list["items"].as_array().context("no list of events")?;
        Ok(items
            .iter()
            .filter_map(|e| e["message"].as_str())
            .map(str::to_owned)
            .collect())
    }

    /// Runs a command in a pod.
    pub(crate) fn exec(&self, pod: &str, command: &[&str]) -> anyhow::Result<String> {
        let mut args = vec!["exec", pod, "--"];
        args.extend(command);
        self.kubectl(&args)
    }

    /// Fetches a URL from inside a pod; an error unless the answer is 2xx.
    pub(crate) fn fetch(&self, from: &str, url: &str) -> anyhow::Result<String> {
        self.exec(from, &["box", "get", url])
    }
}

/// Metadata of a test pod or template.
fn metadata(app: &str) -> Value {
    json!({"labels": {"app": app}})
}

/// A pod spec that serves HTTP on 8080 and TCP on 9090; ends at once when deleted.
pub(crate) fn server_spec(probes: &Value) -> Value {
    let mut container = json!({
        "name": "box", "image": BOX, "imagePullPolicy": "IfNotPresent", "command": ["box", "serve"],
    });
    if let (Some(container), Some(probes)) = (container.as_object_mut(), probes.as_object()) {
        container.extend(probes.clone());
    }
    json!({"terminationGracePeriodSeconds": 1, "containers": [container]})
}

/// Readiness, liveness and start-up probes of the three kinds that go over network or not.
pub(crate) fn probes() -> Value {
    json!({
        "startupProbe": {"exec": {"command": ["true"]}, "periodSeconds": 1, "failureThreshold": 30},
        "livenessProbe": {"tcpSocket": {"port": 9090}, "periodSeconds": 1, "failureThreshold": 3},
        "readinessProbe": {"httpGet": {"path": "/healthz", "port": 8080}, "periodSeconds": 1, "failureThreshold": 1},
    })
}

/// A single pod.
pub(crate) fn pod(namespace: &Namespace<'_>, name: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace.name, "labels": {"app": name}},
        "spec": spec,
    })
}

/// A Deployment.
pub(crate) fn deployment(namespace: &Namespace<'_>, name: &str, replicas: usize, spec: &Value) -> Value {
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": name, "namespace": namespace.name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": metadata(name), "spec": spec},
        },
    })
}

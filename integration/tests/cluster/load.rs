//! Requests from inside a pod, at a rate, a new connection each, and what became of them.

use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use serde::Deserialize;
use serde_json::{Value, json};
use sluice_testkit::netns::Place;
use sluice_testkit::process;

use crate::harness::{Namespace, PATIENCE, eventually};
use crate::pods::{BOX, Pod, pod};

/// Result of a run, as `box load` prints it.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Report {
    pub(crate) requests: u64,
    pub(crate) failed: Vec<Failure>,
    pub(crate) max_millis: u64,
}

/// A request that was not answered with 2xx.
#[derive(Debug, Clone, Deserialize)]
#[expect(dead_code, reason = "printed when a test fails")]
pub(crate) struct Failure {
    at: String,
    url: String,
    error: String,
}

/// Spec of a pod that waits for clients to be started in it.
pub(crate) fn client_spec() -> Value {
    json!({
        "terminationGracePeriodSeconds": 1,
        "containers": [{
            "name": "box", "image": BOX, "imagePullPolicy": "IfNotPresent", "command": ["sleep", "1000000"],
        }],
    })
}

/// Makes a client pod and waits until it runs.
pub(crate) fn client(
    namespace: &Namespace<'_>,
    name: &str,
    cluster: &crate::harness::Cluster,
) -> anyhow::Result<Pod> {
    cluster.apply(&[pod(namespace, name, &client_spec())])?;
    namespace.wait_pod(name, "is Ready", PATIENCE, |pod| pod.ready)
}

/// A running load.
pub(crate) struct Load<'a> {
    namespace: &'a Namespace<'a>,
    pod: String,
    output: JoinHandle<anyhow::Result<String>>,
}

impl<'a> Load<'a> {
    /// Starts `rate` requests a second from a client pod, in turn to each URL.
    pub(crate) fn start(
        namespace: &'a Namespace<'a>,
        pod: &str,
        rate: u32,
        urls: &[String],
    ) -> anyhow::Result<Self> {
        let line = format!(
            "box load -rate {rate} -for 10m {} & echo $! >/tmp/load.pid; wait",
            urls.join(" ")
        );
        let args: Vec<String> = ["-n", &namespace.name, "exec", pod, "--", "sh", "-c", &line]
            .map(str::to_owned)
            .into();
        let output = std::thread::spawn(move || {
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            process::text(&Place::default(), "kubectl", &args, b"")
        });
        let load = Self {
            namespace,
            pod: pod.to_owned(),
            output,
        };
        eventually("the load runs", Duration::from_secs(20), || {
            load.namespace.exec(pod, &["cat", "/tmp/load.pid"]).map(Some)
        })?;
        Ok(load)
    }

    /// Ends it and gives its report.
    pub(crate) fn stop(self) -> anyhow::Result<Report> {
        self.namespace.exec(
            &self.pod,
            &["sh", "-c", "kill -TERM $(cat /tmp/load.pid); rm /tmp/load.pid"],
        )?;
        let text = self
            .output
            .join()
            .map_err(|_| anyhow::anyhow!("the load's thread panicked"))??;
        serde_json::from_str(&text).with_context(|| format!("report of the load: {text}"))
    }
}

impl Report {
    /// Fails unless there were requests and none of them failed.
    pub(crate) fn assert_flawless(&self) -> anyhow::Result<()> {
        anyhow::ensure!(self.requests > 0, "no request was made");
        let when = |failure: Option<&Failure>| failure.map(|f| f.at.clone()).unwrap_or_default();
        anyhow::ensure!(
            self.failed.is_empty(),
            "{} of {} requests failed, from {} to {}, slowest {} ms: {:#?}",
            self.failed.len(),
            self.requests,
            when(self.failed.iter().min_by_key(|f| &f.at)),
            when(self.failed.iter().max_by_key(|f| &f.at)),
            self.max_millis,
            &self.failed[..self.failed.len().min(3)]
        );
        Ok(())
    }
}

//! `kubectl sluice`: the operator's command from afar, through API server, kubelet and container runtime, with what kubectl has.

use std::path::Path;
use std::process::Output;

use anyhow::{Context, ensure};
use serde_json::Value;
use sluice_testkit::netns::Place;
use sluice_testkit::process;
use sluice_testkit::standin::Behaviour;

use crate::enrol::netns_of;
use crate::harness::{Cluster, Mesh, Namespace, PATIENCE, eventually, on_cluster};
use crate::load::client_spec;
use crate::pods::{pod, probes, server_spec};
use crate::sluice::{CONTAINERS, DAEMON_SET, NAMESPACE, Sluice, with_spare};

/// kubectl with the plugin in its PATH.
pub(crate) struct Plugin {
    path: String,
    /// The node that the agent runs on.
    node: String,
}

impl Plugin {
    pub(crate) fn new(cluster: &Cluster) -> anyhow::Result<Self> {
        let binary = process::binary("kubectl-sluice")?;
        let directory = binary.parent().context("no directory")?.display().to_string();
        let agents = cluster.pods_of(NAMESPACE, DAEMON_SET)?;
        let node = agents.first().and_then(|pod| pod["spec"]["nodeName"].as_str());
        Ok(Self {
            path: format!("PATH={directory}:{}", std::env::var("PATH")?),
            node: node.context("the agent is on no node")?.to_owned(),
        })
    }

    /// Asks, whatever comes of it. An agent of this machine, if there is one, is not asked.
    fn ask(&self, question: &[&str]) -> anyhow::Result<Output> {
        let fixed = [
            self.path.as_str(),
            "SLUICE_RUN_DIR=/nonexistent",
            "kubectl",
            "sluice",
        ];
        process::output(&Place::default(), "env", &[&fixed, question].concat(), b"")
    }

    /// The answer that all is well.
    pub(crate) fn well(&self, question: &[&str]) -> anyhow::Result<String> {
        let output = self.ask(question)?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(
            output.status.code() == Some(0),
            "{question:?}: {}: {text}{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(text)
    }
}

#[test]
fn kubectl_sluice_tells_of_node_and_pods_from_afar() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let mesh = Namespace::create(cluster, "asked", Mesh::In)?;
        let plain = Namespace::create(cluster, "asked-plain", Mesh::Out)?;
        for namespace in [&mesh, &plain] {
            cluster.apply(&[pod(namespace, "web", &server_spec(&probes()))])?;
            namespace.wait_pod("web", "is Ready", PATIENCE, |pod| pod.ready)?;
        }
        let web = mesh.pod("web")?;
        sluice.ztunnel.wait_held(std::slice::from_ref(&web), PATIENCE)?;
        let plugin = Plugin::new(cluster)?;

        // Exit status 0 says that no pod of the node is broken; pods of tests before may be on their way out.
        let question = ["--node", &plugin.node, "status", "-o", "json"];
        let status = eventually("kubectl sluice status is well", PATIENCE, || {
            plugin.well(&question).map(Some)
        })?;
        let status: Value = serde_json::from_str(&status)?;
        ensure!(status["node"]["ready"] == true, "{status:#}");
        let of = |namespace: &Namespace<'_>| -> anyhow::Result<Value> {
            let pods = status["pods"].as_array().context("no pods")?;
            let found = pods
                .iter()
                .find(|pod| pod["namespace"] == namespace.name.as_str());
            found
                .cloned()
                .with_context(|| format!("{} is not told of: {status:#}", namespace.name))
        };
        let (inside, outside) = (of(&mesh)?, of(&plain)?);
        ensure!(
            inside["state"] == "enrolled" && inside["uid"] == web.uid.as_str(),
            "{inside:#}"
        );
        ensure!(outside["state"] == "out", "{outside:#}");
        // The kernel's word for it.
        let netns = netns_of(cluster, &mesh.name, "web")?;
        let inode: u64 = cluster
            .node(&["stat", "-L", "-c", "%i", &netns])?
            .trim()
            .parse()?;
        ensure!(inside["netns"]["inode"] == inode, "{inode}: {inside:#}");

        let table = plugin.well(&["--node", &plugin.node, "status"])?;
        let name = format!("{}/web", mesh.name);
        let line = table.lines().find(|line| line.starts_with(&name));
        ensure!(line.is_some_and(|line| line.contains("enrolled")), "{table}");
        plugin.well(&["--node", &plugin.node, "preflight"])?;

        // A question about a pod finds its node by itself.
        let told = plugin.well(&["explain", "web", "-n", &mesh.name])?;
        for part in [
            "is in the mesh",
            "istio.io/dataplane-mode",
            "its traffic goes through the proxy",
        ] {
            ensure!(told.contains(part), "no {part:?} in {told}");
        }
        let told = plugin.well(&["explain", &format!("{}/web", plain.name)])?;
        ensure!(
            told.contains("is not in the mesh") && told.contains("label it"),
            "{told}"
        );
        let told = plugin.well(&["status", "--pod", &name])?;
        ensure!(
            told.contains(&web.uid) && told.contains("as they should be"),
            "{told}"
        );
        let nobody = plugin.ask(&["explain", "nobody", "-n", &mesh.name])?;
        ensure!(nobody.status.code() == Some(1), "{nobody:?}");
        Ok(())
    })
}

#[test]
fn kubectl_sluice_says_why_a_pod_does_not_start() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let mesh = Namespace::create(cluster, "explained", Mesh::In)?;
        let refusal = "the certificate of this workload is out of order";
        let name = format!("{}/nacked", mesh.name);
        sluice
            .ztunnel
            .control
            .behave(Behaviour::default().nack(&name, refusal))?;
        cluster.apply(&[pod(&mesh, "nacked", &client_spec())])?;
        let plugin = Plugin::new(cluster)?;

        // Between two tries of the kubelet the pod has no sandbox: what went wrong is told all the same.
        let told = eventually("the refusal is explained", PATIENCE, || {
            let told = plugin.ask(&["explain", &name])?;
            let told = String::from_utf8_lossy(&told.stdout).into_owned();
            Ok(told.contains("ZT-NACK").then_some(told))
        });
        sluice.ztunnel.control.behave(Behaviour::default())?;

        let told = told?;
        ensure!(told.contains(refusal), "not ztunnel's own words: {told}");
        ensure!(
            told.contains("What to do") && told.contains("ZT-NACK: "),
            "no advice: {told}"
        );
        mesh.wait_pod("nacked", "is Ready", PATIENCE, |pod| pod.ready)?;
        Ok(())
    })
}

#[test]
fn a_report_of_a_node_from_afar_has_everything_but_its_tokens() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let mesh = Namespace::create(cluster, "reported", Mesh::In)?;
        cluster.apply(&[pod(&mesh, "web", &server_spec(&probes()))])?;
        let web = mesh.wait_pod("web", "is Ready", PATIENCE, |pod| pod.ready)?;
        sluice.ztunnel.wait_held(std::slice::from_ref(&web), PATIENCE)?;
        let tokens = tokens(cluster, &sluice)?;
        let directory = tempfile::tempdir()?;
        let archive = directory.path().join("report.tar");
        let plugin = Plugin::new(cluster)?;

        let archive_text = archive.display().to_string();
        plugin.well(&["--node", &plugin.node, "bug-report", &archive_text])?;

        let all = std::fs::read(&archive)?;
        let all = String::from_utf8_lossy(&all);
        for (whose, token) in &tokens {
            // A token without its signature is no credential.
            let signature = token.rsplit('.').next().unwrap_or_default();
            ensure!(signature.len() > 40, "not a token of {whose}");
            ensure!(!all.contains(signature), "the token of {whose} is in the report");
        }
        let target = directory.path().display().to_string();
        process::text(
            &Place::default(),
            "tar",
            &["-xf", &archive_text, "-C", &target],
            b"",
        )?;
        check_report(
            &directory.path().join("sluice-bug-report"),
            &mesh,
            &web.uid,
            &plugin.node,
        )
    })
}

/// The broker's own token, and the plugin's.
fn tokens(cluster: &Cluster, sluice: &Sluice<'_>) -> anyhow::Result<[(&'static str, String); 2]> {
    let broker = format!(
        "/proc/{}/root/var/run/secrets/kubernetes.io/serviceaccount/token",
        sluice.init_pid("ambient-broker")?
    );
    let kubeconfig: Value = serde_json::from_str(&cluster.node(&["cat", "/var/lib/sluice/kubeconfig"])?)?;
    let plugin = kubeconfig["users"][0]["user"]["token"]
        .as_str()
        .context("no token")?;
    Ok([
        ("the broker", cluster.node(&["cat", &broker])?.trim().to_owned()),
        ("the plugin", plugin.to_owned()),
    ])
}

fn check_report(report: &Path, mesh: &Namespace<'_>, uid: &str, node: &str) -> anyhow::Result<()> {
    let pod = format!("ambient-broker/pods/{}/web.txt", mesh.name);
    for (file, part) in [
        ("ambient-broker/status.json", uid),
        ("ambient-broker/status.txt", "Host rules"),
        ("ambient-broker/preflight.json", "available"),
        (&pod, "as they should be"),
        (
            "installer/cni/host/etc/cni/net.d/02-sluice.conflist",
            "sluice-cni",
        ),
        ("installer/cni-plugins/host/opt/cni/bin/LISTING.txt", "sluice-cni"),
        ("installer/kubeconfig.json", "sluice-plugin"),
        ("installer/versions.txt", "Linux version"),
        ("installer/selection.yaml", "excludedNamespaces"),
        ("netns-executor/run/run/sluice/LISTING.txt", "executor.sock"),
        ("cluster/node.yaml", node),
        ("cluster/pod.yaml", DAEMON_SET),
        ("cluster/daemonsets.yaml", DAEMON_SET),
        ("cluster/configmaps.yaml", "selection.yaml"),
        ("versions.json", "serverVersion"),
    ] {
        let text = std::fs::read_to_string(report.join(file)).with_context(|| file.to_owned())?;
        ensure!(text.contains(part), "no {part:?} in {file}: {text}");
    }
    for container in CONTAINERS.into_iter().flat_map(with_spare) {
        let log = format!("logs/{container}.log");
        ensure!(report.join(&log).is_file(), "no {log}");
    }
    let records = std::fs::read_dir(report.join("netns-executor/run/run/sluice/state/sandboxes"))?;
    let mut records = records.filter_map(|entry| std::fs::read_to_string(entry.ok()?.path()).ok());
    ensure!(
        records.any(|record| record.contains(uid)),
        "the pod's sandbox is not in the report"
    );
    // On a node where all is well nothing is out of reach.
    for notes in ["NOTES.txt", "installer/NOTES.txt", "netns-executor/NOTES.txt"] {
        let text = std::fs::read_to_string(report.join(notes)).unwrap_or_default();
        ensure!(text.is_empty(), "{notes}: {text}");
    }
    Ok(())
}

//! Pods join the mesh when the kubelet makes them, and leave it when they end.

use std::collections::BTreeSet;
use std::mem::ManuallyDrop;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::json;

use crate::harness::{Cluster, MODE_LABEL, Mesh, Namespace, PATIENCE, eventually, on_cluster};
use crate::load::client_spec;
use crate::pods::{BOX, STATUS_ANNOTATION, deployment, pod, probes, server_spec};
use crate::sluice::{DAEMON_SET, NAMESPACE, Sluice, cri};

/// How long the broker may take to enrol a pod that runs, or to put its annotation right.
const LIVE_LIMIT: Duration = Duration::from_secs(10);

#[test]
fn thirty_pods_with_all_kinds_of_probes_are_ready_enrolled_and_captured() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let namespace = Namespace::create(cluster, "thirty", Mesh::In)?;

        cluster.apply(&[deployment(&namespace, "web", 30, &server_spec(&probes()))])?;
        let pods = namespace.wait_ready(30, 2 * PATIENCE)?;

        sluice.ztunnel.wait_held(&pods, Duration::from_secs(10))?;
        for pod in &pods {
            namespace.wait_pod(&pod.name, "annotated", Duration::from_secs(10), |p| {
                p.status() == Some("enabled")
            })?;
        }
        // The kernel's word, not the agent's: redirection stands in each pod's namespace.
        for pod in &pods {
            let rules = rules_of(cluster, &namespace, &pod.name)?;
            for part in ["15001", MARKED, "local default dev lo"] {
                ensure!(rules.contains(part), "no {part:?} in {}:\n{rules}", pod.name);
            }
        }
        let (client, server) = (&pods[0], &pods[1]);
        let before = (
            sluice.ztunnel.workload(client)?.counts,
            sluice.ztunnel.workload(server)?.counts,
        );
        let answer = namespace.fetch(&client.name, &format!("http://{}:8080/", server.ip))?;
        ensure!(
            answer.contains(&format!("host={}", server.name)),
            "answered by another: {answer}"
        );
        let after = (
            sluice.ztunnel.workload(client)?.counts,
            sluice.ztunnel.workload(server)?.counts,
        );
        ensure!(
            after.0.outbound == before.0.outbound + 1,
            "client's connection was not captured: {before:?} {after:?}"
        );
        ensure!(
            after.1.inbound == before.1.inbound + 1,
            "server's connection was not captured: {before:?} {after:?}"
        );

        // Probes come past the proxy: nothing was restarted, and every pod is still Ready.
        let later = namespace.wait_ready(30, Duration::from_secs(10))?;
        ensure!(later.iter().all(|pod| pod.restarts == 0), "restarts: {later:#?}");
        Ok(())
    })
}

#[test]
fn a_pod_outside_the_mesh_is_left_alone() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let namespace = Namespace::create(cluster, "plain", Mesh::Out)?;
        cluster.apply(&[pod(&namespace, "web", &server_spec(&probes()))])?;

        let web = namespace.wait_pod("web", "is Ready", PATIENCE, |pod| pod.ready)?;

        ensure!(web.status().is_none(), "annotated: {web:?}");
        ensure!(
            !sluice.ztunnel.control.counts()?.workloads.contains_key(&web.uid),
            "given to the proxy"
        );
        let rules = rules_of(cluster, &namespace, "web")?;
        ensure!(rules.trim().is_empty(), "rules in a plain pod:\n{rules}");

        // The status is no setting.
        namespace.kubectl(&["annotate", "pod", "web", &format!("{STATUS_ANNOTATION}=enabled")])?;
        namespace.wait_pod("web", "is not annotated", LIVE_LIMIT, |pod| {
            pod.status().is_none()
        })?;
        let hint = eventually("an event about the annotation", LIVE_LIMIT, || {
            Ok(namespace.events("web", "StatusAnnotationCorrected")?.pop())
        })?;
        ensure!(hint.contains(MODE_LABEL), "no hint to the label: {hint}");
        ensure!(!sluice.ztunnel.holds(&web)?, "enrolled by its annotation");
        Ok(())
    })
}

#[test]
fn a_job_that_completes_leaves_nothing_behind() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let namespace = Namespace::create(cluster, "job", Mesh::In)?;
        let before = traces(cluster)?;
        cluster.apply(&[json!({
            "apiVersion": "batch/v1", "kind": "Job",
            "metadata": {"name": "once", "namespace": namespace.name},
            "spec": {"template": {"spec": {
                "terminationGracePeriodSeconds": 1, "restartPolicy": "Never",
                "containers": [{
                    "name": "box", "image": BOX, "imagePullPolicy": "IfNotPresent", "command": ["sleep", "2"],
                }],
            }}},
        })])?;
        let once = eventually("the Job's pod is enrolled", PATIENCE, || {
            let pods = namespace.pods()?;
            Ok(pods.into_iter().find(|pod| pod.status() == Some("enabled")))
        })?;

        let once = namespace.wait_pod(&once.name, "has completed", PATIENCE, |pod| {
            pod.phase == "Succeeded"
        })?;

        sluice
            .ztunnel
            .wait_released(std::slice::from_ref(&once), Duration::from_secs(15))?;
        namespace.wait_pod(&once.name, "is not annotated", LIVE_LIMIT, |pod| {
            pod.status().is_none()
        })?;
        wait_no_traces(cluster, &before)?;
        let set = cluster.node_sh("nft list ruleset; ipset list 2>/dev/null || true")?;
        ensure!(
            !set.contains(&once.ip),
            "{} is still among the host's probe addresses:\n{set}",
            once.ip
        );
        Ok(())
    })
}

#[test]
fn deleted_pods_are_let_go_of() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let namespace = Namespace::create(cluster, "deleted", Mesh::In)?;
        let before = traces(cluster)?;
        cluster.apply(&[deployment(&namespace, "idle", 5, &client_spec())])?;
        let pods = namespace.wait_ready(5, PATIENCE)?;
        sluice.ztunnel.wait_held(&pods, Duration::from_secs(10))?;
        // Each has a namespace, an interface in the node and a record.
        let during = traces(cluster)?.difference(&before).count();
        ensure!(during >= 3 * pods.len(), "only {during} traces of running pods");

        namespace.kubectl(&["delete", "deployment", "idle", "--wait=false"])?;

        sluice.ztunnel.wait_released(&pods, Duration::from_secs(30))?;
        wait_no_traces(cluster, &before)
    })
}

/// What pods leave in the node while they run: network namespaces, interfaces, the executor's records of sandboxes.
fn traces(cluster: &Cluster) -> anyhow::Result<BTreeSet<String>> {
    let listed = cluster.node(&[
        "find",
        "/run/netns",
        "/sys/class/net",
        "/run/sluice/state/sandboxes",
        "-mindepth",
        "1",
    ])?;
    Ok(listed.lines().map(str::to_owned).collect())
}

/// Waits until there is nothing that was not there before; pods of other tests may have gone meanwhile.
fn wait_no_traces(cluster: &Cluster, before: &BTreeSet<String>) -> anyhow::Result<()> {
    eventually("nothing is left of the pods", Duration::from_secs(30), || {
        let now = traces(cluster)?;
        let left: Vec<_> = now.difference(before).collect();
        ensure!(left.is_empty(), "{left:?}");
        Ok(Some(()))
    })
}

/// The plugin lets such a pod pass by its name alone, since the agent cannot be asked about its own pods.
#[test]
fn a_pod_that_has_only_the_name_of_an_agents_is_enrolled_once_it_runs() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        // The agent's namespace, which stays.
        let namespace = ManuallyDrop::new(Namespace {
            name: NAMESPACE.to_owned(),
            cluster,
        });
        let name = format!("{DAEMON_SET}-zzzzz");
        let mut manifest = pod(&namespace, &name, &client_spec());
        manifest["metadata"]["labels"][MODE_LABEL] = "ambient".into();
        cluster.apply(&[manifest])?;

        let outcome = enrolled_live(&sluice, &namespace, &name);
        namespace.delete_pod(&name)?;
        outcome
    })
}

fn enrolled_live(sluice: &Sluice<'_>, namespace: &Namespace<'_>, name: &str) -> anyhow::Result<()> {
    let running = namespace.wait_pod(name, "is Ready", PATIENCE, |pod| pod.ready)?;
    sluice
        .ztunnel
        .wait_held(std::slice::from_ref(&running), LIVE_LIMIT)?;
    // Not by its ADD, which would have recorded the network's name.
    let find = format!("grep -rh {} /run/sluice/state/sandboxes", running.uid);
    let record = sluice.cluster.node_sh(&find)?;
    ensure!(record.contains("sluice-adopted"), "enrolled by its ADD: {record}");
    namespace.wait_pod(name, "annotated", LIVE_LIMIT, |pod| {
        pod.status() == Some("enabled")
    })?;
    let told = eventually("an event about its name", LIVE_LIMIT, || {
        Ok(namespace.events(name, "NameOfNodeAgent")?.pop())
    })?;
    ensure!(
        told.contains("give it another name"),
        "nothing to be done: {told}"
    );
    Ok(())
}

#[test]
fn a_static_pod_is_enrolled_once_and_let_go_of_with_its_file() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let namespace = Namespace::create(cluster, "static", Mesh::In)?;
        let manifest = pod(&namespace, "web", &server_spec(&probes()));
        let file = StaticPod::write(cluster, &manifest.to_string())?;
        let mirror = eventually("the static pod has a mirror", PATIENCE, || {
            Ok(namespace.pods()?.pop())
        })?;
        let whole = format!("{}/{}", namespace.name, mirror.name);

        namespace.wait_pod(&mirror.name, "is Ready and annotated", PATIENCE, |pod| {
            pod.ready && pod.status() == Some("enabled")
        })?;
        let report = sluice.ztunnel.control.counts()?;
        let held: Vec<_> = report
            .workloads
            .values()
            .filter(|held| held.pod == whole)
            .collect();
        ensure!(held.len() == 1, "held {} times: {held:#?}", held.len());
        let netns = netns_of(cluster, &namespace.name, &mirror.name)?;
        let inode = cluster.node(&["stat", "-L", "-c", "%i", &netns])?;
        ensure!(
            held[0].listening && inode.trim() == held[0].netns_inode.to_string(),
            "not its namespace, which is {inode}: {held:#?}"
        );

        drop(file);
        sluice
            .ztunnel
            .control
            .wait("stand-in let go of the pod", Duration::from_secs(30), |report| {
                report.workloads.values().all(|held| held.pod != whole)
            })?;
        eventually("the mirror has gone", PATIENCE, || {
            Ok(namespace.pods()?.is_empty().then_some(()))
        })
    })
}

/// A file in the kubelet's directory of static pods; removed when dropped.
struct StaticPod(PathBuf);

impl StaticPod {
    fn write(cluster: &Cluster, manifest: &str) -> anyhow::Result<Self> {
        let directory = cluster.static_pods();
        // The kubelet passes over names that begin so.
        let part = directory.join(".part");
        let file = directory.join("test.json");
        std::fs::write(&part, manifest).with_context(|| format!("writing {}", part.display()))?;
        std::fs::rename(&part, &file)?;
        Ok(Self(file))
    }
}

impl Drop for StaticPod {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Our policy rule as `ip rule` shows it, whatever its priority.
const MARKED: &str = "from all fwmark 0x111/0xfff lookup 100";

/// What redirects traffic inside a pod's network namespace: nftables rules without their counters, policy rules that the kernel
/// does not make by itself, and the routes that ours lead to. Empty where nobody has been.
pub(crate) fn rules_of(cluster: &Cluster, namespace: &Namespace<'_>, pod: &str) -> anyhow::Result<String> {
    let netns = netns_of(cluster, &namespace.name, pod)?;
    // A table of routes that nobody ever used is an error to `ip`.
    let list = "set -e; nft --stateless list ruleset; ip -4 rule; ip -6 rule
        for family in -4 -6; do ip $family route show table 100 2>/dev/null || true; done";
    let listed = cluster.node(&["nsenter", &format!("--net={netns}"), "sh", "-c", list])?;
    Ok(made_by_somebody(&listed))
}

/// A listing without the policy rules that every network namespace has from the kernel.
pub(crate) fn made_by_somebody(listing: &str) -> String {
    let of_the_kernel = |line: &str| {
        let rule = line
            .split_once(':')
            .map(|(priority, rule)| (priority, rule.trim()));
        matches!(
            rule,
            Some(
                ("0", "from all lookup local")
                    | ("32766", "from all lookup main")
                    | ("32767", "from all lookup default")
            )
        )
    };
    let lines: Vec<&str> = listing.lines().filter(|line| !of_the_kernel(line)).collect();
    lines.join("\n")
}

/// The runtime's id of a pod's sandbox.
pub(crate) fn sandbox_of(cluster: &Cluster, namespace: &str, pod: &str) -> anyhow::Result<String> {
    let id = cri(
        cluster,
        &[
            "pods",
            "--quiet",
            "--state",
            "Ready",
            "--name",
            &format!("^{pod}$"),
            "--namespace",
            namespace,
        ],
    )?;
    Ok(id.trim().to_owned())
}

/// Path, in the node, of a pod's network namespace.
pub(crate) fn netns_of(cluster: &Cluster, namespace: &str, pod: &str) -> anyhow::Result<String> {
    let id = sandbox_of(cluster, namespace, pod)?;
    let state: serde_json::Value = serde_json::from_str(&cri(cluster, &["inspectp", &id])?)?;
    let namespaces = state
        .pointer("/info/runtimeSpec/linux/namespaces")
        .and_then(|list| list.as_array());
    let path = namespaces
        .into_iter()
        .flatten()
        .find(|entry| entry["type"] == "network")
        .and_then(|entry| entry["path"].as_str())
        .ok_or_else(|| anyhow::anyhow!("no network namespace of {pod} in {state}"))?;
    Ok(path.to_owned())
}

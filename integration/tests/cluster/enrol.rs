//! Pods join the mesh when the kubelet makes them, and leave it when they end.

use std::time::Duration;

use anyhow::ensure;
use serde_json::json;

use crate::harness::{Cluster, Mesh, Namespace, PATIENCE, on_cluster};
use crate::load::client_spec;
use crate::pods::{BOX, deployment, pod, probes, server_spec};
use crate::sluice::{Sluice, cri};

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
            ensure!(
                rules.contains("15001"),
                "no redirection in {}:\n{rules}",
                pod.name
            );
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
        Ok(())
    })
}

#[test]
fn a_job_that_completes_leaves_nothing_behind() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let namespace = Namespace::create(cluster, "job", Mesh::In)?;
        let spec = json!({
            "terminationGracePeriodSeconds": 1, "restartPolicy": "Never",
            "containers": [{
                "name": "box", "image": BOX, "imagePullPolicy": "IfNotPresent", "command": ["sleep", "1"],
            }],
        });
        cluster.apply(&[pod(&namespace, "once", &spec)])?;
        let once = namespace.wait_pod("once", "is enrolled", PATIENCE, |pod| {
            pod.status() == Some("enabled")
        })?;

        let once = namespace.wait_pod(&once.name, "has completed", PATIENCE, |pod| {
            pod.phase == "Succeeded"
        })?;

        sluice
            .ztunnel
            .wait_released(std::slice::from_ref(&once), Duration::from_secs(15))?;
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
        cluster.apply(&[deployment(&namespace, "idle", 5, &client_spec())])?;
        let pods = namespace.wait_ready(5, PATIENCE)?;
        sluice.ztunnel.wait_held(&pods, Duration::from_secs(10))?;

        namespace.kubectl(&["delete", "deployment", "idle", "--wait=false"])?;

        sluice.ztunnel.wait_released(&pods, Duration::from_secs(30))?;
        let names = cluster.node_sh("ls /run/netns; ip -o link")?;
        ensure!(!names.is_empty());
        Ok(())
    })
}

/// All nftables rules, without their counters, inside a pod's network namespace.
pub(crate) fn rules_of(cluster: &Cluster, namespace: &Namespace<'_>, pod: &str) -> anyhow::Result<String> {
    let netns = netns_of(cluster, &namespace.name, pod)?;
    cluster.node(&[
        "nsenter",
        &format!("--net={netns}"),
        "nft",
        "--stateless",
        "list",
        "ruleset",
    ])
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

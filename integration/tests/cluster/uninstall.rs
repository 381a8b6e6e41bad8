//! `helm uninstall` leaves the node as it was.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::Value;

use crate::enrol::{made_by_somebody, rules_of};
use crate::harness::{Cluster, Mesh, Namespace, PATIENCE, eventually, on_cluster};
use crate::load::client_spec;
use crate::pods::{deployment, pod, probes, server_spec};
use crate::sluice::{DAEMON_SET, NAMESPACE, Sluice, repository};

/// The one file that stays until a purge, so that pods made before can still be deleted; see the chart's README. Empty directories
/// stay, too: no container sees what they are in.
const LEFT_ON_PURPOSE: &str = "/opt/cni/bin/sluice-cni";

/// Until pods that ran before the agent are in the mesh, once it is ready.
const ADOPTION_LIMIT: Duration = Duration::from_secs(10);

#[test]
fn uninstalling_leaves_the_node_as_it_was() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let namespace = Namespace::create(cluster, "uninstall", Mesh::In)?;
        cluster.apply(&[deployment(&namespace, "web", 3, &server_spec(&probes()))])?;
        let pods = namespace.wait_ready(3, PATIENCE)?;
        sluice.ztunnel.wait_held(&pods, PATIENCE)?;

        sluice.uninstall()?;

        // Pods go on, without a restart and without our rules, and are reachable directly.
        let after = namespace.wait_ready(3, PATIENCE)?;
        ensure!(after.iter().all(|pod| pod.restarts == 0), "restarts: {after:#?}");
        let answer = namespace.fetch(&after[0].name, &format!("http://{}:8080/", after[1].ip))?;
        ensure!(answer.contains(&after[1].name), "{answer}");
        for pod in &after {
            let rules = rules_of(cluster, &namespace, &pod.name)?;
            ensure!(
                rules.trim().is_empty(),
                "rules are left in {}:\n{rules}",
                pod.name
            );
            ensure!(
                pod.status().is_none(),
                "{} still says that it is redirected",
                pod.name
            );
        }
        // Pods that were started through the plugin are still there: its stand-in is needed.
        let refused = purge(cluster)?;
        ensure!(refused.contains("whose DEL is still to come"), "{refused}");
        cluster.node(&["test", "-f", LEFT_ON_PURPOSE])?;
        // New pods start, old ones can be deleted.
        cluster.apply(&[pod(&namespace, "later", &client_spec())])?;
        namespace.wait_pod("later", "is Ready", PATIENCE, |pod| pod.ready)?;
        namespace.kubectl(&["delete", "deployment", "web", "--timeout=60s"])?;
        namespace.kubectl(&["delete", "pod", "--all", "--timeout=60s"])?;

        let files = cluster.node_sh(
        "find /run/sluice /var/lib/sluice ! -type d; ls -d /etc/cni/net.d/*sluice* /opt/cni/bin/*sluice* /var/run/ztunnel/ztunnel.sock 2>/dev/null || true",
    )?;
        let left: Vec<&str> = files.lines().filter(|file| *file != LEFT_ON_PURPOSE).collect();
        ensure!(left.is_empty(), "files are left: {left:?}");
        // The last pod that was started through the plugin.
        sluice.ztunnel.remove(cluster)?;
        let purged = purge(cluster)?;
        let files = cluster.node_sh(&format!(
            "ls -d /run/sluice /var/lib/sluice {LEFT_ON_PURPOSE} 2>/dev/null || true"
        ))?;
        ensure!(files.is_empty(), "{files} is left after a purge:\n{purged}");
        check_nothing_left(cluster)?;
        check_adoption(cluster, &namespace)
    })
}

/// Whether it has come, by the pods of the agent.
type Moment = fn(&[Value]) -> bool;

/// Begins what brings a moment about.
type Beginning = fn(&Sluice<'_>) -> anyhow::Result<()>;

fn start_anew(sluice: &Sluice<'_>) -> anyhow::Result<()> {
    sluice.remove_agent()?;
    sluice.return_agent()
}

fn replace(sluice: &Sluice<'_>) -> anyhow::Result<()> {
    let what = format!("daemonset/{DAEMON_SET}");
    sluice
        .cluster
        .kubectl(&["-n", NAMESPACE, "rollout", "restart", &what])
        .map(drop)
}

/// A part of the new agent may still stand by when it is asked to stop, or look for another one, and the old agent has been told
/// that it stays.
#[test]
fn uninstalling_while_the_agent_starts_or_is_replaced_cleans_the_node_as_well() -> anyhow::Result<()> {
    let starts: Moment = |pods| pods.len() == 1 && pods[0]["status"].to_string().contains("\"running\"");
    let both: Moment = |pods| pods.len() == 2;
    let one_ends: Moment = |pods| {
        pods.len() == 2
            && pods
                .iter()
                .any(|pod| !pod["metadata"]["deletionTimestamp"].is_null())
    };
    let moments: [(&str, Beginning, Moment); 3] = [
        ("one starts", start_anew, starts),
        ("both are there", replace, both),
        ("one ends", replace, one_ends),
    ];
    on_cluster(|cluster| {
        for (number, (moment, begin, has_come)) in moments.into_iter().enumerate() {
            let sluice = Sluice::ensure(cluster)?;
            let namespace = Namespace::create(cluster, &format!("replaced-{number}"), Mesh::In)?;
            namespace.create_pod("client", &client_spec())?;
            let pods = namespace.wait_ready(1, PATIENCE)?;
            sluice.ztunnel.wait_held(&pods, PATIENCE)?;

            begin(&sluice)?;
            eventually(moment, PATIENCE, || {
                Ok(has_come(&cluster.pods_of(NAMESPACE, DAEMON_SET)?).then_some(()))
            })?;
            sluice.uninstall()?;

            let rules = rules_of(cluster, &namespace, "client")?;
            ensure!(rules.trim().is_empty(), "{moment}: rules are left:\n{rules}");
            let client = namespace.wait_ready(1, PATIENCE)?.remove(0);
            ensure!(
                client.status().is_none(),
                "{moment}: it still says that it is redirected"
            );
            let files =
                cluster.node_sh("find /run/sluice ! -type d; cat /etc/cni/net.d/*; nft list ruleset")?;
            ensure!(!files.contains("sluice"), "{moment}: something is left:\n{files}");
        }
        Ok(())
    })
}

fn check_nothing_left(cluster: &Cluster) -> anyhow::Result<()> {
    let conflists = cluster.node_sh("cat /etc/cni/net.d/*")?;
    ensure!(
        !conflists.contains("sluice"),
        "a chain entry is left:\n{conflists}"
    );
    let host = cluster.node_sh("nft list ruleset; ip -4 route show table all; ip -6 route show table all")?;
    ensure!(
        !host.contains("sluice") && !host.contains("169.254.7.127") && !host.contains("fd16:9254:7127"),
        "rules are left on the host:\n{host}"
    );
    let rules = made_by_somebody(&cluster.node_sh("ip -4 rule; ip -6 rule")?);
    ensure!(
        rules.trim().is_empty(),
        "policy rules are left on the host:\n{rules}"
    );
    let objects = cluster.kubectl(&[
        "get",
        "clusterroles,clusterrolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings",
        "-o",
        "name",
    ])?;
    ensure!(!objects.contains("sluice"), "API objects are left:\n{objects}");
    let objects = cluster.kubectl(&[
        "-n",
        NAMESPACE,
        "get",
        "all,configmaps,secrets,serviceaccounts,roles,rolebindings",
        "-o",
        "name",
    ])?;
    let left: Vec<&str> = objects
        .lines()
        .filter(|name| !["configmap/kube-root-ca.crt", "serviceaccount/default"].contains(name))
        .collect();
    ensure!(left.is_empty(), "API objects are left: {left:?}");
    Ok(())
}

/// Pods that ran before the agent came join the mesh as they are.
fn check_adoption(cluster: &Cluster, namespace: &Namespace<'_>) -> anyhow::Result<()> {
    cluster.apply(&[deployment(namespace, "early", 3, &server_spec(&probes()))])?;
    let early = namespace.wait_ready(3, PATIENCE)?;

    let sluice = Sluice::ensure(cluster)?;

    let ready = Instant::now();
    sluice.ztunnel.wait_held(&early, ADOPTION_LIMIT)?;
    for pod in &early {
        let left = ADOPTION_LIMIT.saturating_sub(ready.elapsed());
        let now = namespace.wait_pod(&pod.name, "annotated", left, |pod| {
            pod.status() == Some("enabled")
        })?;
        ensure!(
            now.uid == pod.uid && now.restarts == 0,
            "replaced or restarted: {pod:?}, now {now:?}"
        );
    }
    println!(
        "pods that ran before the agent: enrolled {:?} after it was ready",
        ready.elapsed()
    );
    Ok(())
}

/// The command of the chart's page, as it stands there; gives what it printed, on success or not.
fn purge(cluster: &Cluster) -> anyhow::Result<String> {
    let page = std::fs::read_to_string(repository().join("charts/sluice/README.md"))?;
    let begin = page.find("kubectl debug").context("no command to purge")?;
    let (command, _) = page[begin..]
        .split_once("\n```")
        .context("no end of the command")?;
    let nodes = cluster.kubectl(&["get", "nodes", "-o", "name"])?;
    let command = command
        .replace("\\\n", " ")
        .replace("node/NODE", nodes.trim())
        .replace("IMAGE", "localhost/sluice:dev");
    let args: Vec<&str> = command.split_whitespace().skip(1).collect();
    let printed = cluster
        .kubectl(&args)
        .unwrap_or_else(|error| format!("{error:#}"));
    let pods = ["-n", "kube-system", "get", "pods", "-o", "name"];
    for pod in cluster
        .kubectl(&pods)?
        .lines()
        .filter(|name| name.contains("node-debugger"))
    {
        cluster.kubectl(&["-n", "kube-system", "delete", pod])?;
    }
    Ok(printed)
}

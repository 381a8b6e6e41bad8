//! What the agent costs the API server, by the API server's own audit log.

use std::collections::BTreeMap;

use anyhow::{Context, ensure};
use serde_json::Value;

use crate::harness::{Cluster, Mesh, Namespace, PATIENCE, eventually, on_cluster};
use crate::load::client_spec;
use crate::pods::deployment;
use crate::sluice::Sluice;

const PODS: usize = 100;

/// Requests of the agent's accounts since a position of the audit log, by account, verb and resource; about pods of other
/// namespaces, which may be on their way out, nothing counts.
fn requests(
    cluster: &Cluster,
    namespace: &str,
    since: usize,
) -> anyhow::Result<BTreeMap<(String, String, String), usize>> {
    let log = cluster.log("audit")?;
    let mut counted = BTreeMap::new();
    for line in log[since..].lines() {
        let event: Value = serde_json::from_str(line).with_context(|| format!("audit log: {line}"))?;
        let text = |pointer: &str| {
            let text = event.pointer(pointer).and_then(Value::as_str);
            text.unwrap_or_default().to_owned()
        };
        let about = text("/objectRef/namespace");
        if text("/objectRef/resource") == "pods" && !about.is_empty() && about != namespace {
            continue;
        }
        let account = text("/user/username");
        let account = account.rsplit(':').next().unwrap_or_default().to_owned();
        let resource = [text("/objectRef/resource"), text("/objectRef/subresource")];
        let key = (
            account,
            text("/verb"),
            resource.join("/").trim_end_matches('/').to_owned(),
        );
        *counted.entry(key).or_default() += 1;
    }
    Ok(counted)
}

#[test]
fn an_add_costs_no_request_of_the_plugin_and_at_most_one_patch() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let namespace = Namespace::create(cluster, "audit", Mesh::In)?;
        let since = cluster.log("audit")?.len();
        cluster.apply(&[deployment(&namespace, "many", PODS, &client_spec())])?;
        let pods = namespace.wait_ready(PODS, 3 * PATIENCE)?;
        eventually("every pod is annotated", PATIENCE, || {
            let pods = namespace.pods()?;
            Ok(pods
                .iter()
                .all(|pod| pod.status() == Some("enabled"))
                .then_some(()))
        })?;
        sluice.ztunnel.wait_held(&pods, PATIENCE)?;

        let requests = requests(cluster, &namespace.name, since)?;
        println!("{PODS} ADDs: {requests:?}");
        let of = |wanted: &dyn Fn(&str, &str, &str) -> bool| -> usize {
            let matching = requests
                .iter()
                .filter(|((account, verb, resource), _)| wanted(account, verb, resource));
            matching.map(|(_, count)| count).sum()
        };
        ensure!(
            of(&|account, _, _| account.contains("plugin")) == 0,
            "the plugin asked: {requests:?}"
        );
        let patches = of(&|_, verb, resource| verb == "patch" && resource.starts_with("pods"));
        ensure!((1..=PODS).contains(&patches), "{patches} patches of {PODS} pods");
        let asked = of(&|_, verb, resource| verb == "get" && resource == "pods");
        ensure!(
            asked == 0,
            "{asked} pods were asked for although they are watched: {requests:?}"
        );
        Ok(())
    })
}

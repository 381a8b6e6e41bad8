//! Somebody else changes what the agent put in place: noticed and mended.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::Value;
use sluice_integration::uds_http::get;

use crate::enrol::netns_of;
use crate::harness::{Cluster, Mesh, Namespace, PATIENCE, eventually, on_cluster};
use crate::load::client;
use crate::pods::{pod, probes, server_spec};
use crate::sluice::{NAMESPACE, Sluice};

/// Until a change is noticed and mended; the drift pass comes every 4 s by default.
const LIMIT: Duration = Duration::from_secs(5);

#[test]
fn a_pods_flushed_rules_come_back() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let namespace = Namespace::create(cluster, "flushed", Mesh::In)?;
        let client = client(&namespace, "client", cluster)?;
        cluster.apply(&[pod(&namespace, "web", &server_spec(&probes()))])?;
        let web = namespace.wait_pod("web", "is Ready", PATIENCE, |pod| pod.ready)?;
        let netns = format!("--net={}", netns_of(cluster, &namespace.name, "client")?);
        let rules = || cluster.node(&["nsenter", &netns, "nft", "list", "ruleset"]);
        let before = rules()?;

        cluster.node(&["nsenter", &netns, "nft", "flush", "ruleset"])?;
        let took = mended("the pod's rules", || Ok(rules()? == before))?;

        println!("flushed rules were back after {took:?}");
        let captured = sluice.ztunnel.workload(&client)?.counts.outbound;
        namespace.fetch("client", &format!("http://{}:8080/", web.ip))?;
        ensure!(
            sluice.ztunnel.workload(&client)?.counts.outbound == captured + 1,
            "not captured again"
        );
        Ok(())
    })
}

#[test]
fn the_hosts_emptied_probe_set_is_filled_again() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let _sluice = Sluice::ensure(cluster)?;
        let namespace = Namespace::create(cluster, "probeset", Mesh::In)?;
        cluster.apply(&[pod(&namespace, "web", &server_spec(&probes()))])?;
        let web = namespace.wait_pod("web", "is Ready", PATIENCE, |pod| pod.ready)?;
        let rules = || cluster.node(&["nft", "list", "ruleset"]);
        let listed = rules()?;
        ensure!(
            listed.contains(&web.ip),
            "the pod's address is not in the host's rules:\n{listed}"
        );
        let table = listed
            .split("table ")
            .find(|table| table.contains(&web.ip))
            .and_then(|table| table.split(" {").next())
            .context("no table with the address")?
            .to_owned();

        for set in listed
            .split("table ")
            .find(|t| t.contains(&web.ip))
            .into_iter()
            .flat_map(set_names)
        {
            let mut command = vec!["nft", "flush", "set"];
            command.extend(table.split(' '));
            command.push(&set);
            cluster.node(&command)?;
        }
        let took = mended("the host's probe set", || Ok(rules()?.contains(&web.ip)))?;

        println!("the emptied probe set was filled after {took:?}");
        Ok(())
    })
}

fn set_names(table: &str) -> Vec<String> {
    let names = table.lines().filter_map(|line| line.trim().strip_prefix("set "));
    names
        .filter_map(|name| name.split(' ').next())
        .map(str::to_owned)
        .collect()
}

#[test]
fn a_removed_chain_entry_comes_back() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        ensure!(sluice.chained()?);

        cluster.node_sh("rm \"$(ls -d /etc/cni/net.d/*.conflist | head -n 1)\"")?;
        let took = mended("the chain entry", || Ok(sluice.chained().unwrap_or(false)))?;

        println!("the chain entry was back after {took:?}");
        Ok(())
    })
}

#[test]
fn a_configuration_that_takes_precedence_is_chained_or_told() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;

        let started = Instant::now();
        cluster.node_sh(
        "cd /etc/cni/net.d && sed 's/\"podnet\"/\"intruder\"/' 10-podnet.conflist >.t && mv .t 00-intruder.conflist",
    )?;
        let outcome = mended("chained, or not ready", || {
            if sluice.chained().unwrap_or(false) {
                return Ok(true);
            }
            let pods = cluster.pods_of(NAMESPACE, "sluice-node")?;
            let conditions = pods
                .first()
                .and_then(|pod| pod.pointer("/status/conditions"))
                .and_then(|c| c.as_array());
            Ok(conditions
                .into_iter()
                .flatten()
                .any(|c| c["type"] == "Ready" && c["status"] == "False"))
        });
        let chained = sluice.chained();
        // Where it is told and not chained, operators find it where they look: metrics, and Events of the agent's pod.
        let told = match chained {
            Ok(true) => Ok(true),
            _ => told(cluster, &sluice),
        };
        let all = started.elapsed();
        cluster.node_sh("rm -f /etc/cni/net.d/00-intruder.conflist")?;
        ensure!(told?, "neither metric nor Event tell of it");

        println!(
            "a configuration of higher priority: noticed after {:?}, in metric and Event after {all:?} at most, chained: {:?}",
            outcome?, chained
        );
        sluice.wait_ready()
    })
}

/// Whether a metric and an Event of the agent's pod tell that another configuration is in use.
fn told(cluster: &Cluster, sluice: &Sluice<'_>) -> anyhow::Result<bool> {
    let agent = sluice.pod()?;
    let events = format!("/api/v1/namespaces/{NAMESPACE}/events?fieldSelector=involvedObject.name={agent}");
    eventually("an Event names the file", PATIENCE, || {
        let list = cluster.api.get(&events)?;
        let ours = |event: &Value| {
            event["reason"] == "NetworkConfiguration"
                && event["message"]
                    .as_str()
                    .is_some_and(|text| text.contains("not-first-in-cni-dir: 00-intruder.conflist"))
        };
        let told = list["items"]
            .as_array()
            .is_some_and(|events| events.iter().any(ours));
        Ok(told.then_some(()))
    })?;
    let socket = cluster.node_path("/run/sluice/broker/http.sock")?;
    let metrics = get(&socket, "/metrics")?.body;
    Ok(metrics.lines().any(|line| line == "istio_cni_install_ready 0"))
}

/// How long it takes until `mended` holds.
pub(crate) fn mended(what: &str, mended: impl Fn() -> anyhow::Result<bool>) -> anyhow::Result<Duration> {
    let started = Instant::now();
    eventually(&format!("{what}: mended"), PATIENCE, || {
        Ok(mended()?.then_some(()))
    })?;
    let took = started.elapsed();
    ensure!(took <= LIMIT, "{what}: mended after {took:?} only");
    Ok(took)
}

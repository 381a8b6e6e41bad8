//! Moving a node over from a running istio-cni and back, as `charts/sluice/README.md` says it.

use std::time::Duration;

use anyhow::ensure;

use crate::enrol::rules_of;
use crate::harness::{Cluster, Mesh, Namespace, PATIENCE, eventually, on_cluster};
use crate::incumbent::Incumbent;
use crate::kubectl::Plugin;
use crate::load::{Load, client, client_spec};
use crate::pods::{pod, probes, server_spec};
use crate::sluice::Sluice;
use crate::ztunnel::Ztunnel;

const TAKE_OVER: &str = "takeover.istioCni=true";

/// Types of the plugins of the network in use.
fn chain(sluice: &Sluice<'_>) -> anyhow::Result<Vec<String>> {
    let chain = sluice.chain()?;
    let plugins = chain["plugins"].as_array().into_iter().flatten();
    Ok(plugins
        .filter_map(|plugin| plugin["type"].as_str().map(str::to_owned))
        .collect())
}

/// Names of the nftables tables of a pod.
fn tables(cluster: &Cluster, namespace: &Namespace<'_>, pod: &str) -> anyhow::Result<Vec<String>> {
    let rules = rules_of(cluster, namespace, pod)?;
    Ok(rules
        .lines()
        .filter_map(|line| line.strip_prefix("table "))
        .map(|table| table.trim_end_matches(" {").to_owned())
        .collect())
}

#[test]
fn a_node_moves_over_from_istio_cni_and_back_without_a_lost_request() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        // Istio's node: its agent, ztunnel, and two enrolled pods that talk to each other.
        let sluice = Sluice {
            cluster,
            ztunnel: Ztunnel::ensure(cluster)?,
        };
        sluice.uninstall()?;
        let mut istio = Incumbent::install(cluster)?;
        let namespace = Namespace::create(cluster, "moving", Mesh::In)?;
        cluster.apply(&[pod(&namespace, "web", &server_spec(&probes()))])?;
        let web = namespace.wait_pod("web", "is Ready", PATIENCE, |pod| pod.ready)?;
        let client = client(&namespace, "client", cluster)?;
        let old = [web.clone(), client];
        istio.enrol(&namespace, &old)?;
        sluice.ztunnel.wait_held(&old, PATIENCE)?;
        let load = Load::start(&namespace, "client", 100, &[format!("http://{}:8080/", web.ip)])?;
        ensure!(
            chain(&sluice)?.contains(&"istio-cni".to_owned()),
            "no entry of Istio's"
        );

        // Beside it. ztunnel stays with whom it is connected to, so the pods stay as they are.
        sluice.upgrade(&[TAKE_OVER])?;
        sluice.return_agent()?;
        sluice.wait_ready()?;
        ensure!(
            chain(&sluice)? == ["bridge", "portmap", "sluice-cni"],
            "{:?}",
            chain(&sluice)?
        );
        for pod in &old {
            let tables = tables(cluster, &namespace, &pod.name)?;
            ensure!(
                tables.iter().all(|table| table.contains("istio")) && !tables.is_empty(),
                "{} was touched while ztunnel was not ours: {tables:?}",
                pod.name
            );
        }

        // A pod that is made now is not let through; it comes once ztunnel does.
        namespace.create_pod("between", &client_spec())?;
        eventually("the pod is refused for want of a proxy", PATIENCE, || {
            let events = namespace.events("between", "FailedCreatePodSandBox")?;
            Ok(events.iter().any(|event| event.contains("ztunnel")).then_some(()))
        })?;

        // Istio's agent goes, and unlinks what it thinks its own.
        istio.leave()?;
        let plugin = Plugin::new(cluster)?;
        for pod in &old {
            eventually(&format!("{} has only our rules", pod.name), PATIENCE, || {
                let tables = tables(cluster, &namespace, &pod.name)?;
                ensure!(tables == ["inet sluice"], "{tables:?}");
                Ok(Some(()))
            })?;
            let told = plugin.well(&["explain", &format!("{}/{}", namespace.name, pod.name)])?;
            ensure!(told.contains("enrolled"), "{told}");
        }
        sluice.ztunnel.wait_held(&old, PATIENCE)?;
        let between = namespace.wait_pod("between", "is Ready", PATIENCE, |pod| pod.ready)?;
        namespace.create_pod("next", &client_spec())?;
        let next = namespace.wait_pod("next", "is Ready", PATIENCE, |pod| pod.ready)?;
        sluice
            .ztunnel
            .wait_held(&[between, next], Duration::from_secs(10))?;
        let report = load.stop()?;
        report.assert_flawless()?;
        println!(
            "moving over: {} requests, none failed, slowest {} ms",
            report.requests, report.max_millis
        );

        // The way back.
        let istio = Incumbent::install(cluster)?;
        sluice.uninstall()?;
        ensure!(
            chain(&sluice)? == ["bridge", "portmap", "istio-cni"],
            "{:?}",
            chain(&sluice)?
        );
        namespace.create_pod("after", &client_spec())?;
        namespace.wait_pod("after", "is Ready", PATIENCE, |pod| pod.ready)?;
        istio.leave()
    })
}

//! A pod with a second interface from a network that Sluice is chained into as well, attached as Multus does it: another chain
//! for the same sandbox under another interface name.

use anyhow::{Context, ensure};
use serde_json::json;
use sluice_testkit::cni::{Attachment, Chain};

use crate::enrol::{netns_of, rules_of, sandbox_of};
use crate::harness::{Cluster, Mesh, Namespace, PATIENCE, on_cluster};
use crate::load::client;
use crate::pods::{Pod, pod, probes, server_spec};
use crate::sluice::Sluice;

#[test]
fn a_second_chained_network_neither_enrols_a_pod_again_nor_takes_it_out() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let mesh = Namespace::create(cluster, "second", Mesh::In)?;
        cluster.apply(&[pod(&mesh, "web", &server_spec(&probes()))])?;
        let web = mesh.wait_pod("web", "is Ready", PATIENCE, |pod| pod.ready)?;
        let caller = client(&mesh, "caller", cluster)?;
        sluice
            .ztunnel
            .wait_held(&[web.clone(), caller.clone()], PATIENCE)?;
        let (rules, recorded) = (rules_of(cluster, &mesh, "web")?, records(cluster)?);
        let still_enrolled = || -> anyhow::Result<()> {
            ensure!(
                rules_of(cluster, &mesh, "web")? == rules,
                "the pod's rules have changed:\n{rules}\nnow:\n{}",
                rules_of(cluster, &mesh, "web")?
            );
            let before = sluice.ztunnel.workload(&web)?.counts.inbound;
            let answer = mesh.fetch(&caller.name, &format!("http://{}:8080/", web.ip))?;
            ensure!(answer.contains(&web.name), "{answer}");
            let after = sluice.ztunnel.workload(&web)?.counts.inbound;
            ensure!(after > before, "the request went around the proxy");
            Ok(())
        };

        let chain = second_chain(cluster, &sluice)?;
        let attachment = attachment(cluster, &mesh, &web)?;
        let added = chain.add(&attachment, None)?.ok()?;
        let result = added.result.context("no result")?;
        ensure!(!interface(cluster, &attachment)?.is_empty());
        ensure!(records(cluster)? == recorded, "the executor has another sandbox");
        still_enrolled()?;
        chain.check(&attachment, Some(&result))?.ok()?;

        chain.del(&attachment, Some(&result))?.ok()?;
        ensure!(interface(cluster, &attachment).is_err(), "the interface is left");
        ensure!(
            records(cluster)? == recorded,
            "the sandbox went with its second interface"
        );
        still_enrolled()
    })
}

/// The real `bridge` plugin, and the entry that the installer made for the pod network.
fn second_chain(cluster: &Cluster, sluice: &Sluice<'_>) -> anyhow::Result<Chain> {
    let primary = sluice.chain()?;
    let plugins = primary["plugins"].as_array().context("no plugins")?;
    let ours = plugins.iter().find(|plugin| plugin["type"] == "sluice-cni");
    let bridge = json!({
        "type": "bridge", "bridge": "second0", "isGateway": true,
        "ipam": {"type": "host-local", "dataDir": "/run/second-network", "ranges": [[{"subnet": "10.66.0.0/24"}]]},
    });
    let plugins = vec![bridge, ours.context("no entry of ours")?.clone()];
    let bin_dir = cluster.node_path("/opt/cni/bin")?;
    Ok(Chain::new(&cluster.node_place()?, "second", "1.0.0", plugins).bin_dir(bin_dir))
}

fn attachment(cluster: &Cluster, namespace: &Namespace<'_>, pod: &Pod) -> anyhow::Result<Attachment> {
    let container_id = sandbox_of(cluster, &namespace.name, &pod.name)?;
    Ok(Attachment {
        netns: netns_of(cluster, &namespace.name, &pod.name)?,
        ifname: "net1".to_owned(),
        args: format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={};K8S_POD_INFRA_CONTAINER_ID={container_id};K8S_POD_UID={}",
            namespace.name, pod.name, pod.uid
        ),
        container_id,
    })
}

/// The pod's second interface, as `ip` tells.
fn interface(cluster: &Cluster, attachment: &Attachment) -> anyhow::Result<String> {
    let netns = format!("--net={}", attachment.netns);
    cluster.node(&["nsenter", &netns, "ip", "-j", "addr", "show", &attachment.ifname])
}

/// Names of the executor's records of sandboxes.
fn records(cluster: &Cluster) -> anyhow::Result<String> {
    cluster.node(&["ls", "/run/sluice/state"])
}

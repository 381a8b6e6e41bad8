//! Networks that Sluice is chained to: plugins and CNI versions of the primary network, and a peer that keeps rewriting it.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use crate::drift::mended;
use crate::harness::{Cluster, Mesh, Namespace, PATIENCE, eventually, on_cluster};
use crate::pods::{pod, probes, server_spec};
use crate::sluice::{Sluice, cri};

/// The primary network's file (`integration/cluster/conf/podnet.conflist.in`).
const PRIMARY: &str = "/etc/cni/net.d/10-podnet.conflist";

/// The CNI version with STATUS and GC.
const NEWEST: &str = "1.1.0";

/// Puts the primary network's file back when dropped.
pub(crate) struct Original<'a> {
    cluster: &'a Cluster,
    pub(crate) text: String,
}

impl<'a> Original<'a> {
    pub(crate) fn keep(cluster: &'a Cluster) -> anyhow::Result<Self> {
        Ok(Self {
            cluster,
            text: cluster.node(&["cat", PRIMARY])?,
        })
    }

    /// Replaces the file as a network's own agent does: a temporary file in the same directory, renamed.
    pub(crate) fn replace(&self, text: &str) -> anyhow::Result<()> {
        let part = self.cluster.node_path("/etc/cni/net.d/.podnet.part")?;
        std::fs::write(&part, text)?;
        std::fs::rename(part, self.cluster.node_path(PRIMARY)?)?;
        Ok(())
    }

    /// Makes it one of this plugin and CNI version with `more` plugins behind, and waits until the chain is.
    fn change(&self, sluice: &Sluice<'_>, plugin: &str, version: &str, more: &[Value]) -> anyhow::Result<()> {
        let mut conflist: Value = serde_json::from_str(&self.text)?;
        conflist["cniVersion"] = version.into();
        conflist["plugins"][0]["type"] = plugin.into();
        let plugins = conflist["plugins"].as_array_mut().context("no plugins")?;
        plugins.extend_from_slice(more);
        let types = plugins.iter().map(|plugin| plugin["type"].clone());
        let expected: Vec<Value> = types.chain([json!("sluice-cni")]).collect();
        self.replace(&conflist.to_string())?;
        eventually("the chain follows its primary", PATIENCE, || {
            let chain = sluice.chain()?;
            let plugins = chain["plugins"].as_array().context("a list without plugins")?;
            let same = plugins.iter().map(|plugin| &plugin["type"]).eq(&expected);
            Ok((chain["cniVersion"] == version && same).then_some(()))
        })
    }
}

impl Drop for Original<'_> {
    fn drop(&mut self) {
        let _ = self.replace(&self.text);
    }
}

#[test]
fn pods_are_enrolled_on_bridge_and_ptp_of_every_cni_version() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let original = Original::keep(cluster)?;
        let namespace = Namespace::create(cluster, "primary", Mesh::In)?;
        for (plugin, version) in [
            ("bridge", "0.3.1"),
            ("bridge", "0.4.0"),
            ("ptp", "0.3.1"),
            ("ptp", "1.0.0"),
            ("ptp", NEWEST),
            ("bridge", NEWEST),
        ] {
            original.change(&sluice, plugin, version, &[])?;

            let name = format!("{plugin}-{}", version.replace('.', "-"));
            cluster.apply(&[pod(&namespace, &name, &server_spec(&probes()))])?;
            let made = namespace.wait_pod(&name, "is Ready", PATIENCE, |pod| pod.ready)?;

            sluice.ztunnel.wait_held(&[made], Duration::from_secs(10))?;
        }
        Ok(())
    })
}

#[test]
fn in_chained_mode_the_entry_is_put_into_the_primarys_own_file_and_taken_out_again() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let original = Original::keep(cluster)?;
        let sluice = Sluice::ensure_with(cluster, &["cni.mode=chained"])?;
        let chained = || -> anyhow::Result<bool> {
            let files = cluster.node_sh("ls -d /etc/cni/net.d/*.conflist")?;
            Ok(files.trim() == PRIMARY && sluice.chained()?)
        };
        eventually("only the primary's file is there", PATIENCE, || {
            Ok(chained()?.then_some(()))
        })?;
        let namespace = Namespace::create(cluster, "chained", Mesh::In)?;
        cluster.apply(&[pod(&namespace, "web", &server_spec(&probes()))])?;
        let web = namespace.wait_pod("web", "is Ready", PATIENCE, |pod| pod.ready)?;
        sluice.ztunnel.wait_held(&[web], Duration::from_secs(10))?;

        original.replace(&original.text)?;
        let took = mended("the entry in the primary's file", chained)?;
        println!("the entry in the primary's file was back after {took:?}");

        namespace.delete_pod("web")?;
        sluice.uninstall()?;
        let left = cluster.node(&["cat", PRIMARY])?;
        ensure!(
            left == original.text,
            "not as it was:\n{}\nnow:\n{left}",
            original.text
        );
        Ok(())
    })
}

/// The runtime asks all plugins of a network of CNI 1.1.0 for their status. An error would take the node's network away, and
/// with it what the agent needs to start again.
#[test]
fn a_node_without_the_agent_keeps_its_network() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let original = Original::keep(cluster)?;
        // This runtime does ask, and believes a plugin that refuses.
        let refuses =
            format!(r#"echo '{{"cniVersion": "{NEWEST}", "code": 50, "msg": "not today"}}'; exit 1"#);
        std::fs::write(
            cluster.node_path("/opt/cni/bin/refuses")?,
            format!("#!/bin/sh\n{refuses}\n"),
        )?;
        cluster.node(&["chmod", "755", "/opt/cni/bin/refuses"])?;
        original.change(&sluice, "bridge", NEWEST, &[json!({"type": "refuses"})])?;
        eventually("the network is away", PATIENCE, || {
            Ok((!has_network(cluster)?).then_some(()))
        })?;
        original.change(&sluice, "bridge", NEWEST, &[])?;
        cluster.node(&["rm", "/opt/cni/bin/refuses"])?;
        eventually("the network is back", PATIENCE, || {
            Ok(has_network(cluster)?.then_some(()))
        })?;

        sluice.remove_agent()?;
        // The kubelet asks every 5 s.
        let until = Instant::now() + Duration::from_secs(11);
        while Instant::now() < until {
            ensure!(has_network(cluster)?, "the agent took the network with it");
        }
        sluice.return_agent()?;
        sluice.wait_ready()
    })
}

/// Whether the runtime says that pods can have a network.
fn has_network(cluster: &Cluster) -> anyhow::Result<bool> {
    let info: Value = serde_json::from_str(&cri(cluster, &["info"])?)?;
    let conditions = info.pointer("/status/conditions").and_then(Value::as_array);
    let network = conditions
        .and_then(|all| all.iter().find(|condition| condition["type"] == "NetworkReady"))
        .context("the runtime has no condition NetworkReady")?;
    Ok(network["status"] == true)
}

#[test]
fn a_peer_that_keeps_rewriting_its_network_never_gets_an_invalid_chain() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let original = Original::keep(cluster)?;
        let mut conflist: Value = serde_json::from_str(&original.text)?;
        let until = Instant::now() + Duration::from_mins(1);
        let mut writes = 0_u32;
        let mut without = 0_u32;
        while Instant::now() < until {
            writes += 1;
            conflist["plugins"][0]["mtu"] = (1400 + writes % 50).into();
            original.replace(&conflist.to_string())?;
            // Always a valid configuration in use, whoever wrote last.
            without += u32::from(!sluice.chained()?);
        }
        eventually("the chain has settled", Duration::from_secs(10), || {
            let mtu = conflist["plugins"][0]["mtu"].clone();
            Ok((sluice.chained()? && sluice.chain()?["plugins"][0]["mtu"] == mtu).then_some(()))
        })?;

        println!("{writes} rewrites by a peer; {without} times the chain was looked at without our entry");
        // In owned mode the file in use is ours, and a peer's rewriting cannot take the entry away.
        ensure!(without == 0, "{without} of {writes} times without our entry");
        Ok(())
    })
}

//! Networks that Sluice is chained to: plugins and CNI versions of the primary network, and a peer that keeps rewriting it.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::Value;

use crate::harness::{Cluster, Mesh, Namespace, PATIENCE, eventually, on_cluster};
use crate::pods::{pod, probes, server_spec};
use crate::sluice::{Sluice, cri};

/// The primary network's file (`integration/cluster/conf/podnet.conflist.in`).
const PRIMARY: &str = "/etc/cni/net.d/10-podnet.conflist";

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

    /// Makes it one of this plugin and CNI version, and waits until the chain is.
    fn change(&self, sluice: &Sluice<'_>, plugin: &str, version: &str) -> anyhow::Result<()> {
        let mut conflist: Value = serde_json::from_str(&self.text)?;
        conflist["cniVersion"] = version.into();
        conflist["plugins"][0]["type"] = plugin.into();
        self.replace(&conflist.to_string())?;
        eventually("the chain follows its primary", PATIENCE, || {
            let chain = sluice.chain()?;
            let follows = chain["cniVersion"] == version && chain["plugins"][0]["type"] == plugin;
            Ok((follows && sluice.chained()?).then_some(()))
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
            ("ptp", "1.1.0"),
            ("bridge", "1.1.0"),
        ] {
            original.change(&sluice, plugin, version)?;

            let name = format!("{plugin}-{}", version.replace('.', "-"));
            cluster.apply(&[pod(&namespace, &name, &server_spec(&probes()))])?;
            let made = namespace.wait_pod(&name, "is Ready", PATIENCE, |pod| pod.ready)?;

            sluice.ztunnel.wait_held(&[made], Duration::from_secs(10))?;
        }
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
        original.change(&sluice, "bridge", "1.1.0")?;
        {
            // This runtime does ask: where the entry may fail, it believes it.
            let _gate = Gate::set(&sluice)?;
            let executor = sluice.service_pid(&sluice.init_pid("netns-executor")?)?;
            cluster.node(&["kill", "-STOP", &executor])?;
            let away = eventually("the network is away", PATIENCE, || {
                Ok((!has_network(cluster)?).then_some(()))
            });
            cluster.node(&["kill", "-CONT", &executor])?;
            away?;
            eventually("the network is back", PATIENCE, || {
                Ok(has_network(cluster)?.then_some(()))
            })?;
        }
        sluice.wait_ready()?;
        eventually("the entry may not fail", PATIENCE, || {
            Ok((!may_fail(&sluice.chain()?)).then_some(()))
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

/// Whether our entry in this chain may fail STATUS.
fn may_fail(chain: &Value) -> bool {
    let plugins = chain["plugins"].as_array();
    plugins.is_some_and(|plugins| plugins.iter().any(|plugin| plugin["status"]["gateNode"] == true))
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

/// Lets our entry fail STATUS until dropped.
struct Gate<'a>(&'a Sluice<'a>);

impl<'a> Gate<'a> {
    fn set(sluice: &'a Sluice<'a>) -> anyhow::Result<Self> {
        sluice.set_env("installer", "SLUICE_GATE_NODE=true")?;
        let gate = Self(sluice);
        sluice.wait_ready()?;
        eventually("the entry may fail", PATIENCE, || {
            Ok(may_fail(&sluice.chain()?).then_some(()))
        })?;
        Ok(gate)
    }
}

impl Drop for Gate<'_> {
    fn drop(&mut self) {
        let _ = self.0.set_env("installer", "SLUICE_GATE_NODE-");
    }
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

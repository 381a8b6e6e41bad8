//! Networks that Sluice is chained to: plugins and CNI versions of the primary network, and a peer that keeps rewriting it.

use std::time::{Duration, Instant};

use anyhow::ensure;

use crate::harness::{Cluster, Mesh, Namespace, PATIENCE, eventually, on_cluster};
use crate::pods::{pod, probes, server_spec};
use crate::sluice::Sluice;

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
        let mut conflist: serde_json::Value = serde_json::from_str(&original.text)?;
        for (plugin, version) in [
            ("bridge", "0.3.1"),
            ("bridge", "0.4.0"),
            ("ptp", "0.3.1"),
            ("ptp", "1.0.0"),
        ] {
            conflist["cniVersion"] = version.into();
            conflist["plugins"][0]["type"] = plugin.into();
            original.replace(&conflist.to_string())?;
            eventually("the chain follows its primary", PATIENCE, || {
                let chain = sluice.chain()?;
                let follows = chain["cniVersion"] == version && chain["plugins"][0]["type"] == plugin;
                Ok((follows && sluice.chained()?).then_some(()))
            })?;

            let name = format!("{plugin}-{}", version.replace('.', "-"));
            cluster.apply(&[pod(&namespace, &name, &server_spec(&probes()))])?;
            let made = namespace.wait_pod(&name, "is Ready", PATIENCE, |pod| pod.ready)?;

            sluice.ztunnel.wait_held(&[made], Duration::from_secs(10))?;
        }
        Ok(())
    })
}

#[test]
fn a_peer_that_keeps_rewriting_its_network_never_gets_an_invalid_chain() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let sluice = Sluice::ensure(cluster)?;
        let original = Original::keep(cluster)?;
        let mut conflist: serde_json::Value = serde_json::from_str(&original.text)?;
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

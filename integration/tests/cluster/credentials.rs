//! The plugin's credentials: where they are, and that no other token lies about on the node.

use anyhow::ensure;

use crate::harness::{Mesh, Namespace, PATIENCE, on_cluster};
use crate::load::client_spec;
use crate::pods::pod;
use crate::sluice::{NAMESPACE, Sluice};

/// Where the chart has them.
const CREDENTIALS: &str = "/var/lib/sluice/kubeconfig";

#[test]
fn no_token_is_on_the_node_but_the_plugins_which_survives_a_reboot() -> anyhow::Result<()> {
    on_cluster(|cluster| {
        let _sluice = Sluice::ensure(cluster)?;
        let mesh = Namespace::create(cluster, "tokens", Mesh::In)?;
        cluster.apply(&[pod(&mesh, "web", &client_spec())])?;
        mesh.wait_pod("web", "is Ready", PATIENCE, |pod| pod.ready)?;

        // A JWT begins so, in whatever file.
        let found = cluster.node_sh(&format!(
            "grep -rlIE 'eyJ[A-Za-z0-9_-]{{20,}}' /etc/cni /opt/cni /run/sluice /var/lib/sluice /var/log/pods/{NAMESPACE}_* || true"
        ))?;
        ensure!(found.trim() == CREDENTIALS, "tokens are in {found:?}");
        let mode = cluster.node(&["stat", "-c", "%a %u:%g", CREDENTIALS])?;
        ensure!(mode.trim() == "600 0:0", "{mode}");

        // The agent's pods come back on their own, but pods start, and ask for this file, before they do.
        cluster.script("node.sh", &["reboot"])?;
        cluster.node(&["test", "-s", CREDENTIALS])?;
        Sluice::ensure(cluster).map(drop)
    })
}

//! Further stand-ins beside the one of [`Mesh`]: ztunnel runs twice on a node while it is upgraded.

use std::time::Duration;

use sluice_testkit::netns::Netns;
use sluice_testkit::pod::Pod;
use sluice_testkit::process::{Process, Spawn};
use sluice_testkit::standin::{Behaviour, Control};
use sluice_testkit::wait::poll_true;

use crate::mesh::{Mesh, MeshOptions};
use crate::scene::PATIENCE;

/// A node that no proxy has connected to yet, with namespace `default` in the mesh.
pub fn node_without_proxy() -> anyhow::Result<Mesh> {
    let mesh = Mesh::start_with(MeshOptions {
        without_proxy: true,
        ..MeshOptions::default()
    })?;
    mesh.manifests.namespace("default", "ambient")?;
    Ok(mesh)
}

/// Waits until a proxy was sent a message of `kind` (`add`, `keep`, `del`) about a pod.
pub fn wait_told(control: &Control, kind: &str, pod: &Pod) -> anyhow::Result<()> {
    let told = || {
        control.report().is_ok_and(|report| {
            report
                .messages
                .iter()
                .any(|m| m.kind == kind && m.uid == pod.uid())
        })
    };
    Ok(poll_true(&format!("{kind} of {}", pod.name()), PATIENCE, told)?)
}

/// A stand-in that only answers ZDS messages and opens nothing inside the pods.
#[derive(Debug)]
pub struct Handoff {
    /// The process.
    pub process: Process,
    /// Its control.
    pub control: Control,
}

impl Handoff {
    /// Starts one with a name of its own; it is not waited for.
    pub fn start(mesh: &Mesh, name: &str, behaviour: &Behaviour) -> anyhow::Result<Self> {
        let node = mesh.node();
        let socket = node.dir().join(format!("{name}-control.sock"));
        let process = Spawn::binary("standin-proxy")?
            .arg("--zds")
            .arg(mesh.run.zds_socket())
            .arg("--control")
            .arg(&socket)
            .args(["--no-listeners", "--grace-ms", "0", "--behaviour"])
            .arg(serde_json::to_string(behaviour)?)
            .place(node.place_with(&Netns::new()?))
            .log(node.dir().join(format!("{name}.log")))
            .start()?;
        let control = Control::new(socket);
        process.wait_ready(Duration::from_secs(10), || control.counts().is_ok())?;
        Ok(Self { process, control })
    }

    /// Starts one and waits until its snapshot was taken.
    pub fn ready(mesh: &Mesh, name: &str) -> anyhow::Result<Self> {
        let handoff = Self::start(mesh, name, &Behaviour::default())?;
        handoff.control.wait_ready(Duration::from_secs(30))?;
        Ok(handoff)
    }
}

//! Further stand-ins beside the one of [`Mesh`]: ztunnel runs twice on a node while it is upgraded.

use std::time::Duration;

use sluice_testkit::netns::Netns;
use sluice_testkit::process::{Process, Spawn};
use sluice_testkit::standin::{Behaviour, Control};

use crate::mesh::Mesh;

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

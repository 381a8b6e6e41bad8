//! What most node tests start from: two enrolled pods, an application in one, a steady stream from the other.

use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sluice_proto::pb::workload::PodState;
use sluice_testkit::pod::Pod;
use sluice_testkit::traffic::client::{Load, LoadOptions};
use sluice_testkit::traffic::server::EchoServer;

use crate::manifests::PodOptions;
use crate::mesh::{Mesh, MeshOptions};

/// Long enough for anything that should happen soon, on a machine that other tests keep busy.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Port of the application.
pub const APP_PORT: u16 = 8080;

/// Tests that make a steady load take turns: a machine that cannot answer in time would fail them all.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A node with a client and a server pod, both in the mesh.
#[derive(Debug)]
pub struct Scene {
    /// The application in the server pod.
    pub app: EchoServer,
    /// The pod that requests come from.
    pub client: Pod,
    /// The pod that answers.
    pub server: Pod,
    // Last: the processes go before the pods would leave a trace in their logs only.
    /// The node.
    pub mesh: Mesh,
}

impl Scene {
    /// Everything started and both pods enrolled; IPv4 only.
    pub fn start() -> anyhow::Result<Self> {
        Self::start_with(MeshOptions::default())
    }

    /// The same with options.
    pub fn start_with(options: MeshOptions) -> anyhow::Result<Self> {
        let mesh = Mesh::start_with(options)?;
        mesh.manifests.namespace("default", "ambient")?;
        let client = mesh_pod(&mesh, "client")?;
        let server = mesh_pod(&mesh, "server")?;
        let app = EchoServer::start(server.netns(), APP_PORT)?;
        Ok(Self {
            app,
            client,
            server,
            mesh,
        })
    }

    /// Where the application listens.
    pub fn target(&self) -> SocketAddr {
        SocketAddr::new(self.server.ip(), APP_PORT)
    }

    /// Starts a load from the client to the application and waits until it flows.
    pub fn load(&self, options: LoadOptions) -> anyhow::Result<Load> {
        let load = Load::start(self.client.netns(), options)?;
        load.wait_answered(20, PATIENCE)?;
        Ok(load)
    }

    /// 200 requests a second over new connections; an answer may take 5 s on a busy machine.
    pub fn steady(&self) -> LoadOptions {
        LoadOptions {
            timeout: Duration::from_secs(5),
            ..LoadOptions::new(self.target()).only_new(200)
        }
    }

    /// Waits until both pods are enrolled (again).
    pub fn wait_enrolled(&self) -> anyhow::Result<()> {
        for pod in [&self.client, &self.server] {
            self.mesh.wait_state(pod, PodState::Enrolled, PATIENCE)?;
        }
        Ok(())
    }
}

/// Makes a pod in namespace `default`, declares it, adds it through the plugin and waits until it is in the mesh.
pub fn mesh_pod(mesh: &Mesh, name: &str) -> anyhow::Result<Pod> {
    let pod = mesh.node().pod(name).create()?;
    mesh.manifests.pod(&pod, &PodOptions::default())?;
    mesh.add(&pod)?.ok()?;
    mesh.wait_state(&pod, PodState::Enrolled, PATIENCE)?;
    Ok(pod)
}

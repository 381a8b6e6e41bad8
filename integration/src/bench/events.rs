//! When the broker told what of a pod.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::Context;
use sluice_proto::pb::workload::PodState;
use sluice_testkit::pod::Pod;

use crate::mesh::Mesh;
use crate::watch::follow;

/// A subscription; ends with the broker.
#[derive(Debug)]
pub(super) struct Events(mpsc::Receiver<(Instant, String, PodState)>);

impl Events {
    /// Subscribes; what changes after the return is told.
    pub(super) fn subscribe(mesh: &Mesh) -> anyhow::Result<Self> {
        let socket = mesh.run.workload_socket();
        let (sender, receiver) = mpsc::channel();
        let (ready, listed) = mpsc::channel();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let follow = follow(socket, ready, move |pod| {
            let uid = pod.pod.as_ref().map(|pod| pod.uid.clone()).unwrap_or_default();
            sender.send((Instant::now(), uid, pod.state())).is_ok()
        });
        std::thread::spawn(move || runtime.block_on(follow));
        listed
            .recv_timeout(Duration::from_secs(10))
            .context("no snapshot of the pods")?;
        Ok(Self(receiver))
    }

    /// Waits until the broker says that a pod is in `state`; gives when it came.
    pub(super) fn wait(&self, pod: &Pod, state: PodState) -> anyhow::Result<Instant> {
        loop {
            let (at, uid, told) = self
                .0
                .recv_timeout(Duration::from_secs(20))
                .with_context(|| format!("{state:?} was not told"))?;
            if uid == pod.uid() && told == state {
                return Ok(at);
            }
        }
    }
}

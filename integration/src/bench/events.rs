//! When the broker told what of a pod.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::Context;
use sluice_proto::pb::workload::pod_netns_client::PodNetnsClient;
use sluice_proto::pb::workload::{PodState, SubscribeRequest, pod_event};
use sluice_proto::transport::grpc::{UdsChannel, origin};
use sluice_testkit::pod::Pod;

use crate::mesh::Mesh;

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
        let follow = async move {
            let channel = UdsChannel::handshake(tokio::net::UnixStream::connect(socket).await?).await?;
            let mut client = PodNetnsClient::with_origin(channel, origin());
            let mut events = client.subscribe(SubscribeRequest {}).await?.into_inner();
            while let Some(event) = events.message().await? {
                match event.event {
                    Some(pod_event::Event::SnapshotDone(_)) => drop(ready.send(())),
                    Some(pod_event::Event::Changed(pod)) => {
                        let (state, uid) = (pod.state(), pod.pod.map(|pod| pod.uid).unwrap_or_default());
                        if sender.send((Instant::now(), uid, state)).is_err() {
                            break;
                        }
                    }
                    _ => {}
                }
            }
            anyhow::Ok(())
        };
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

//! Every change of every pod from a moment on, as the broker's subscribers are told.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use sluice_proto::pb::workload::pod_netns_client::PodNetnsClient;
use sluice_proto::pb::workload::{Pod as PodStatus, PodState, SubscribeRequest, pod_event};
use sluice_proto::transport::grpc::{UdsChannel, origin};
use sluice_testkit::pod::Pod;
use sluice_testkit::wait::poll_until;
use tokio::sync::oneshot;

use crate::mesh::Mesh;

/// A subscription that remembers everything. Ends when dropped or with the broker.
#[derive(Debug)]
pub struct PodWatch {
    seen: Arc<Mutex<Vec<PodStatus>>>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<anyhow::Result<()>>>,
}

impl PodWatch {
    /// Subscribes; what happens after the return is remembered, the state at this moment is not.
    pub fn start(mesh: &Mesh) -> anyhow::Result<Self> {
        let socket = mesh.run.workload_socket();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (stop, stopped) = oneshot::channel();
        let (ready, listed) = mpsc::channel();
        let remembered = seen.clone();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let follow = follow(socket, ready, move |pod| {
            lock(&remembered).push(pod.clone());
            true
        });
        let thread = std::thread::spawn(move || {
            runtime.block_on(async {
                tokio::select! { ended = follow => ended, _ = stopped => Ok(()) }
            })
        });
        listed
            .recv_timeout(Duration::from_secs(10))
            .context("no snapshot of the pods")?;
        Ok(Self {
            seen,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Every report of a pod so far, in order.
    pub fn reports(&self, pod: &Pod) -> Vec<PodStatus> {
        let of_pod = |status: &&PodStatus| status.pod.as_ref().is_some_and(|known| known.uid == pod.uid());
        lock(&self.seen).iter().filter(of_pod).cloned().collect()
    }

    /// The states of a pod so far, in order, without repetitions.
    pub fn states(&self, pod: &Pod) -> Vec<PodState> {
        let mut states: Vec<PodState> = self.reports(pod).iter().map(PodStatus::state).collect();
        states.dedup();
        states
    }

    /// Waits until a pod was not enrolled and then was enrolled again.
    pub fn wait_withdrawn_and_back(&self, pod: &Pod, within: Duration) -> anyhow::Result<()> {
        let back = poll_until("status was withdrawn and came back", within, || {
            let states = self.states(pod);
            let withdrawn = states.iter().position(|state| *state != PodState::Enrolled)?;
            states[withdrawn..].contains(&PodState::Enrolled).then_some(())
        });
        back.with_context(|| format!("seen: {:?}", self.states(pod)))
    }
}

impl Drop for PodWatch {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Follows the pods of the broker at `socket` until it ends or `told` wants no more; sends to `listed` once the present
/// state has gone by.
pub(crate) async fn follow(
    socket: PathBuf,
    listed: mpsc::Sender<()>,
    mut told: impl FnMut(&PodStatus) -> bool,
) -> anyhow::Result<()> {
    let channel = UdsChannel::dial("broker", &socket).await?;
    let mut client = PodNetnsClient::with_origin(channel, origin());
    let mut events = client.subscribe(SubscribeRequest {}).await?.into_inner();
    while let Some(event) = events.message().await? {
        match event.event {
            Some(pod_event::Event::SnapshotDone(_)) => drop(listed.send(())),
            Some(pod_event::Event::Changed(pod)) if !told(&pod) => break,
            _ => {}
        }
    }
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

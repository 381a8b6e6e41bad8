//! What the tests start from.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use sluice_netns_executor::kernel::fake::FakeKernel;
use sluice_proto::ambient::Desired;
use sluice_proto::pb::cni::add_response::Outcome;
use sluice_proto::pb::executor::Sandbox;
use sluice_proto::pb::types::{self, Mode};

use crate::harness::{Broker, Executor, Pod, eventually};
use crate::opener::FakeOpener;

/// An executor with host and broker, without an opener.
pub(crate) struct Setup {
    pub(crate) kernel: FakeKernel,
    pub(crate) executor: Arc<Executor>,
    pub(crate) broker: Broker,
}

pub(crate) async fn setup() -> Setup {
    let kernel = FakeKernel::default();
    let executor = Arc::new(Executor::start(Arc::new(kernel.clone())).await);
    let host = sluice_netns_executor::kernel::Kernel::open_host(&kernel, Vec::new()).unwrap();
    executor.node.probes.attach(host).await.unwrap();
    let mut broker = executor.broker().await;
    assert!(broker.snapshot().await.is_empty());
    Setup {
        kernel,
        executor,
        broker,
    }
}

impl Setup {
    /// Nothing of any sandbox is left.
    pub(crate) fn assert_clean(&self, pods: &[&Pod]) {
        for pod in pods {
            assert_eq!(
                self.kernel.netns(pod.inode()).programmed,
                Desired::None,
                "{}",
                pod.container
            );
        }
        assert_eq!(self.kernel.state().probes.len(), 0);
        assert_eq!(self.executor.sandbox_files(), 0);
        assert_eq!(self.executor.node.hub.sandboxes(), 0);
    }

    pub(crate) async fn assert_closed(&self, pod: &Pod) {
        eventually("descriptors closed", || self.kernel.netns(pod.inode()).open == 0).await;
    }
}

pub(crate) fn refused(outcome: Outcome) -> types::Failure {
    match outcome {
        Outcome::Refused(failure) => failure,
        other => panic!("not refused: {other:?}"),
    }
}

pub(crate) fn admitted(outcome: Outcome) -> Mode {
    match outcome {
        Outcome::Admitted(admitted) => admitted.mode(),
        other => panic!("not admitted: {other:?}"),
    }
}

/// An executor with opener and broker.
pub(crate) struct WithOpener {
    pub(crate) kernel: FakeKernel,
    pub(crate) executor: Executor,
    pub(crate) broker: Broker,
    pub(crate) opener: FakeOpener,
    pub(crate) host: PathBuf,
}

pub(crate) async fn setup_with_opener() -> WithOpener {
    let kernel = FakeKernel::default();
    let executor = Executor::start(Arc::new(kernel.clone())).await;
    let host = executor.run.root().join("host");
    std::fs::write(&host, "").unwrap();
    let opener = connect(&executor, Some(&host)).await;
    let mut broker = executor.broker().await;
    broker.snapshot().await;
    WithOpener {
        kernel,
        executor,
        broker,
        opener,
        host,
    }
}

pub(crate) async fn connect(executor: &Executor, host: Option<&Path>) -> FakeOpener {
    let opener = FakeOpener::connect(&executor.run.opener_socket(), host);
    if host.is_some() {
        eventually("opener connected", || executor.node.opener.is_connected()).await;
    }
    opener
}

/// A pod that was admitted outside the mesh, and runs.
pub(crate) async fn outside(executor: &Executor, broker: &mut Broker) -> (Pod, Sandbox) {
    let pod = Pod::new(executor, "c1", "u1");
    let add = executor.add(&pod);
    let sandbox = broker.pending().await;
    broker.admit(&sandbox, Mode::None).await;
    add.await.unwrap();
    (pod, sandbox)
}

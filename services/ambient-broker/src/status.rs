//! Telling the control plane which pods take HBONE.

use std::sync::Arc;

use sluice_proto::id::PodRef;
use tokio::sync::oneshot;

use crate::reconcile::report::PodReport;

/// Where a pod's enrolment is made known.
pub trait StatusWriter: std::fmt::Debug + Send + Sync {
    /// The pod is enrolled, or no longer. Must not block; what cannot be written at once is the writer's to retry.
    ///
    /// What it returns is told once that is written, and dropped if something else is to be written first; `None`:
    /// there is nothing to write.
    fn write(&self, pod: &PodRef, enrolled: bool) -> Option<oneshot::Receiver<()>>;

    /// How the pod stands now; `None`: it is gone. For those who tell people. Must not block.
    fn report(&self, pod: &PodRef, report: Option<&Arc<PodReport>>) {
        let _ = (pod, report);
    }
}

/// Nowhere: a manifest directory has no status. Node-local tools see it in the pod event stream.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoStatus;

impl StatusWriter for NoStatus {
    fn write(&self, pod: &PodRef, enrolled: bool) -> Option<oneshot::Receiver<()>> {
        tracing::debug!(%pod, enrolled, "status");
        None
    }
}

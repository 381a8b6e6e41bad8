//! Telling the control plane which pods take HBONE.

use std::sync::Arc;

use sluice_proto::id::PodRef;

use crate::reconcile::report::PodReport;

/// Where a pod's enrolment is made known.
pub trait StatusWriter: std::fmt::Debug + Send + Sync {
    /// The pod is enrolled, or no longer. Must not block; what cannot be written at once is the writer's to retry.
    fn write(&self, pod: &PodRef, enrolled: bool);

    /// How the pod stands now; `None`: it is gone. For those who tell people. Must not block.
    fn report(&self, pod: &PodRef, report: Option<&Arc<PodReport>>) {
        let _ = (pod, report);
    }
}

/// Nowhere: a manifest directory has no status. Node-local tools see it in the pod event stream.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoStatus;

impl StatusWriter for NoStatus {
    fn write(&self, pod: &PodRef, enrolled: bool) {
        tracing::debug!(%pod, enrolled, "status");
    }
}

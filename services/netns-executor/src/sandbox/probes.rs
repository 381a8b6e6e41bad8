//! The pod's addresses in the host's probe set during its ADD. They enter it beside the rules: nothing runs in the pod
//! yet, so neither needs the other. However the ADD ends, its end takes them out again unless the pod was admitted.

use sluice_proto::ambient::Desired;
use sluice_proto::code::ErrorCode;
use sluice_proto::sandbox::Failure;
use tokio::time::Instant;

use super::task::Task;
use crate::metrics::Stage;
use crate::pool::COMPONENT;

impl Task {
    /// Puts the addresses into the set if `desired` redirects; says whether it did. Borrows nothing, so that it can run
    /// beside what programs the namespace.
    pub(super) fn enter_probe_set(
        &self,
        desired: &Desired,
    ) -> impl Future<Output = Result<bool, Failure>> + use<> {
        let redirects = matches!(desired, Desired::Ambient(_));
        let entered = self.add.as_ref().is_some_and(|add| add.in_probe_set);
        let node = self.node.clone();
        let (addresses, owner) = (self.record.addresses.clone(), self.record.pod.uid.clone());
        async move {
            if !redirects || entered {
                return Ok(entered);
            }
            let begun = Instant::now();
            // Whatever the reason, for the pod it is the probe set that failed.
            let failed = |failure: Failure| {
                Failure::new(ErrorCode::ProbeSet, COMPONENT, &failure.stage, failure.cause)
            };
            node.probes.add(addresses, owner).await.map_err(failed)?;
            node.metrics.observe(Stage::ProbeSet, begun.elapsed());
            Ok(true)
        }
    }

    /// What became of [`Self::enter_probe_set`]. A failure is no news yet: it is tried again when the pod is admitted.
    pub(super) fn note_probe_set(&mut self, entered: Result<bool, Failure>) {
        match (entered, self.add.as_mut()) {
            (Ok(entered), Some(add)) => add.in_probe_set = entered,
            (Ok(_), None) => {}
            (Err(failure), _) => {
                tracing::debug!(attachment = %self.record.attachment, error = %failure, "not in the probe set yet");
            }
        }
    }

    /// Takes the addresses out again: the pod is not redirected after all.
    pub(super) async fn leave_probe_set(&mut self) -> Result<(), Failure> {
        let Some(add) = self.add.as_mut().filter(|add| add.in_probe_set) else {
            return Ok(());
        };
        let (addresses, owner) = (self.record.addresses.clone(), self.record.pod.uid.clone());
        self.node.probes.remove(addresses, owner).await?;
        add.in_probe_set = false;
        Ok(())
    }
}

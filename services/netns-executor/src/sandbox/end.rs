//! The end of a sandbox: everything that was done for it is undone, whatever fails on the way.

use sluice_proto::ambient::Desired;
use sluice_proto::code::ErrorCode;
use sluice_proto::pb::executor::Gone;
use sluice_proto::pb::executor::sandbox_event::Event;
use sluice_proto::sandbox::Failure;

use super::registry::END_DEADLINE;
use super::task::{End, Task};
use super::{Answer, Reason};
use crate::pool::COMPONENT;

impl Task {
    /// Undoes everything, then tells who waits for the ADD.
    pub(super) async fn end(mut self, end: End) {
        let End {
            reason,
            answer,
            completed,
        } = end;
        let record = &self.record;
        self.node
            .registry
            .mark_ending(&record.attachment, record.generation);
        tracing::info!(attachment = %record.attachment, pod = %record.pod, reason = reason.as_str(), "sandbox ends");
        let undo = async {
            // Nobody is there any more; or, with the pod gone at the source only, whoever is must not leave the mesh.
            if ![Reason::InterfaceGone, Reason::NetnsGone, Reason::PodGone].contains(&reason)
                && record.programmed.is_some()
                && self.descriptor.is_some()
            {
                let undone = self.apply(Desired::None).await;
                report(&self, "rules not removed", undone.map(drop));
            }
            let removed = self
                .node
                .probes
                .remove(record.addresses.clone(), record.pod.uid.clone())
                .await;
            report(&self, "probe addresses not removed", removed.map(drop));
        };
        if tokio::time::timeout(END_DEADLINE, undo).await.is_err() {
            tracing::error!(attachment = %record.attachment, "clean-up is slow; the sandbox is let go of");
        }
        if self
            .node
            .registry
            .is_current(&record.attachment, record.generation)
            && let Err(error) = self.node.table.remove(&record.attachment)
        {
            tracing::error!(attachment = %record.attachment, error = %sluice_runtime::telemetry::chain(&error),
                "sandbox file not removed");
        }
        self.detach();
        let record = &self.record;
        let gone = Gone {
            attachment: Some((&record.attachment).into()),
            generation: record.generation,
            pod: Some((&record.pod).into()),
            reason: reason.as_str().to_owned(),
        };
        self.node
            .hub
            .gone(&record.attachment, record.generation, &Event::Gone(gone));
        let answer = answer.unwrap_or_else(|| {
            let cause = format!("the sandbox was removed meanwhile: {}", reason.as_str());
            Answer::Refused(Failure::new(
                ErrorCode::TooLate,
                COMPONENT,
                "wait for broker",
                cause,
            ))
        });
        self.answer(&answer);
        if let Some((reply, completed)) = completed {
            // A broker that has gone needs no answer.
            let _ = reply.send(completed);
        }
        self.node
            .registry
            .forget(&self.record.attachment, self.record.generation);
        self.ended.cancel();
    }
}

fn report(task: &Task, what: &'static str, outcome: Result<(), Failure>) {
    if let Err(failure) = outcome {
        tracing::warn!(attachment = %task.record.attachment, error = %failure, what, "clean-up incomplete");
    }
}

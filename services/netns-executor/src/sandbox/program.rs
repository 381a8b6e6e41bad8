//! What the broker asks of a sandbox: to program it, and to end its ADD.

use sluice_proto::ambient::Desired;
use sluice_proto::code::ErrorCode;
use sluice_proto::pb::executor::sandbox_event::Event;
use sluice_proto::pb::types::Mode;
use sluice_proto::sandbox::Failure;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::pending::mode_of;
use super::task::{End, Flow, Task};
use super::{Answer, Completed, Programmed, Reason, Verdict, not_at_hand};
use crate::metrics::Stage;
use crate::pool::COMPONENT;
use crate::rules::RULE_SCHEMA;

impl Task {
    /// Makes the namespace match. The intent is recorded first: a crash in between is then mended by the drift pass.
    pub(super) async fn program(
        &mut self,
        generation: u64,
        desired: Desired,
        reply: oneshot::Sender<Programmed>,
    ) {
        let outcome = if generation == self.record.generation {
            self.heard();
            // Whoever programs it knows of the pod.
            self.pod_gone = None;
            if self.descriptor.is_none() {
                // Not even on record: later, when the namespace is back, nobody may want it any more.
                Programmed::Failed(not_at_hand("program rules"))
            } else if self.add.is_some() {
                // Nothing runs there yet.
                let probes = self.enter_probe_set(&desired);
                let (outcome, probes) = tokio::join!(self.set(desired), probes);
                self.note_probe_set(probes);
                outcome
            } else {
                return self.program_running(desired, reply).await;
            }
        } else {
            Programmed::TooLate
        };
        let _ = reply.send(outcome);
    }

    /// Records what is wanted, and makes the namespace match.
    pub(super) async fn set(&mut self, desired: Desired) -> Programmed {
        let earlier = self.record.programmed.replace(desired.clone());
        if earlier.as_ref() != Some(&desired)
            && let Err(failure) = self.save()
        {
            self.record.programmed = earlier;
            return Programmed::Failed(failure);
        }
        self.carry_out(earlier, desired).await
    }

    /// Announces a sandbox and programs what the broker has decided ahead while the broker and the proxy prepare
    /// themselves: the broker's verdict waits in the inbox until the rules are there. Intent and record are one write.
    pub(super) async fn announce_and_program(&mut self, desired: Desired) -> Flow {
        self.record.programmed = Some(desired.clone());
        let flow = self.announce();
        if flow.is_continue() {
            let probes = self.enter_probe_set(&desired);
            let (outcome, probes) = tokio::join!(self.carry_out(None, desired), probes);
            self.note_probe_set(probes);
            if let Programmed::Failed(failure) = outcome {
                self.ahead_failed = Some(Box::new(failure));
                self.publish(Event::Changed);
            }
        }
        flow
    }

    /// Makes the namespace match what is on record; `earlier` was there before.
    async fn carry_out(&mut self, earlier: Option<Desired>, desired: Desired) -> Programmed {
        let is_new = earlier.as_ref() != Some(&desired);
        let begun = Instant::now();
        let outcome = self.apply(desired).await;
        let record = &self.record;
        match outcome {
            Ok(applied) => {
                tracing::info!(target: "audit", attachment = %record.attachment, pod = %record.pod,
                    netns = record.netns.inode, mode = ?mode_of(record.programmed.as_ref()),
                    changed = applied.changed, "rules programmed");
                for line in &applied.taken_over {
                    tracing::info!(attachment = %record.attachment, what = line, "taken over from another agent");
                }
                match record.programmed {
                    // From the first packet on, or made known before.
                    Some(Desired::Ambient(_)) => self.connections_known = true,
                    Some(Desired::Joining(_) | Desired::Draining(_)) => {}
                    Some(Desired::None) | None => self.connections_known = false,
                }
                self.ahead_failed = None;
                self.fingerprint.clone_from(&applied.fingerprint);
                self.set_verified();
                let was_broken = self.broken.take().is_some();
                self.note();
                if let Some(add) = self.add.as_mut() {
                    let now = Instant::now();
                    self.node.metrics.observe(Stage::Rules, now - begun);
                    add.programmed = Some(now);
                    add.waits_for("the hand-over to the proxy");
                    self.publish_silently();
                } else if is_new || was_broken || applied.changed {
                    self.publish(Event::Changed);
                }
                Programmed::Done {
                    fingerprint: applied.fingerprint,
                    changed: applied.changed,
                }
            }
            Err(failure) => {
                tracing::warn!(attachment = %record.attachment, pod = %record.pod, error = %failure,
                    "rules not programmed");
                self.take_back(earlier, &failure).await;
                Programmed::Failed(failure)
            }
        }
    }

    /// A failure may come after the rules were committed. If they cannot be taken back either, the record keeps them,
    /// so that they are watched and removed with the sandbox.
    async fn take_back(&mut self, earlier: Option<Desired>, failure: &Failure) {
        self.verified = false;
        self.connections_known = false;
        let undone = self.apply(earlier.clone().unwrap_or(Desired::None)).await;
        if let Err(error) = undone {
            tracing::error!(attachment = %self.record.attachment, %error, "what was programmed cannot be taken back");
            self.note();
            if self.add.is_none() {
                self.set_broken(failure.clone());
            }
            return;
        }
        self.set_verified();
        if self.record.programmed == earlier {
            return;
        }
        self.record.programmed = earlier;
        if let Err(error) = self.save() {
            tracing::error!(attachment = %self.record.attachment, %error, "sandbox file is ahead of the kernel");
        }
    }

    /// Makes sure that the namespace is as recorded, unless that was seen in this life.
    pub(super) async fn verify(&mut self) -> Result<(), Failure> {
        if !self.verified {
            let recorded = self.record.programmed.clone().unwrap_or(Desired::None);
            let applied = self.apply(recorded).await?;
            if applied.changed {
                tracing::warn!(target: "audit", attachment = %self.record.attachment, pod = %self.record.pod,
                    "the namespace was not as recorded and was mended");
            }
            self.set_verified();
        }
        Ok(())
    }

    /// The namespace was seen, or made, to be as recorded by the rules of this version.
    pub(super) fn set_verified(&mut self) {
        self.verified = true;
        if std::mem::replace(&mut self.record.rule_schema, RULE_SCHEMA) == RULE_SCHEMA {
            return;
        }
        if let Err(failure) = self.save() {
            tracing::warn!(attachment = %self.record.attachment, error = %failure, "sandbox file names an old rule schema");
        }
        self.publish_silently();
    }

    /// Ends the ADD.
    pub(super) async fn complete(
        &mut self,
        generation: u64,
        verdict: Verdict,
        reply: oneshot::Sender<Completed>,
    ) -> Flow {
        if generation != self.record.generation {
            let _ = reply.send(Completed::TooLate);
            return Flow::Continue(());
        }
        self.heard();
        let Some(add) = self.add.as_ref() else {
            // The answer to an earlier call was lost, or the runtime was answered otherwise.
            let again = matches!(&verdict, Verdict::Admit(mode)
                if self.record.admitted && *mode == mode_of(self.record.programmed.as_ref()));
            let _ = reply.send(if again {
                Completed::Accepted
            } else {
                Completed::TooLate
            });
            return Flow::Continue(());
        };
        if let Some(programmed) = add.programmed {
            self.node.metrics.observe(Stage::Handoff, programmed.elapsed());
        }
        let mode = match verdict {
            Verdict::Refuse(failure) => {
                return Flow::Break(End {
                    reason: Reason::Cancelled,
                    answer: Some(Answer::Refused(failure)),
                    completed: Some((reply, Completed::Accepted)),
                });
            }
            Verdict::Admit(mode) => mode,
        };
        match self.admit(mode).await {
            Ok(()) => {
                self.answer(&Answer::Admitted(mode));
                let _ = reply.send(Completed::Accepted);
                self.publish(Event::Changed);
                Flow::Continue(())
            }
            Err(failure) => Flow::Break(End {
                reason: Reason::Cancelled,
                answer: Some(Answer::Refused(failure.clone())),
                completed: Some((reply, Completed::Failed(failure))),
            }),
        }
    }

    /// Everything that must be true before the runtime hears that the pod may start.
    async fn admit(&mut self, mode: Mode) -> Result<(), Failure> {
        let programmed = mode_of(self.record.programmed.as_ref());
        if mode != programmed {
            if let Some(failure) = self.ahead_failed.take() {
                return Err(*failure);
            }
            let cause =
                format!("asked to admit as {mode:?}, but the namespace is programmed as {programmed:?}");
            return Err(Failure::new(
                ErrorCode::InvalidInput,
                COMPONENT,
                "complete",
                cause,
            ));
        }
        self.verify().await?;
        match (mode, self.record.programmed.as_ref()) {
            (Mode::Ambient, Some(desired)) => {
                self.enter_probe_set(desired).await?;
            }
            _ => self.leave_probe_set().await?,
        }
        self.record.admitted = true;
        self.record.pending = false;
        self.save()
    }

    fn heard(&mut self) {
        if let Some(add) = self.add.as_mut().filter(|add| !add.heard) {
            add.heard = true;
            self.node
                .metrics
                .observe(Stage::Classify, add.announced.elapsed());
        }
    }
}

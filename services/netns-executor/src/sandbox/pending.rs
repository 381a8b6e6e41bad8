//! An ADD that waits for the broker: who waits, for what, until when.

use std::net::IpAddr;
use std::time::Duration;

use sluice_proto::ambient::Desired;
use sluice_proto::code::ErrorCode;
use sluice_proto::pb::executor::sandbox_event::Event;
use sluice_proto::pb::types::Mode;
use sluice_proto::sandbox::Failure;
use tokio::time::Instant;

use super::task::{End, Flow, Task};
use super::{Answer, Reason, Waiter};
use crate::kernel::Opened;
use crate::metrics::Stage;
use crate::pool::COMPONENT;

/// How far an ADD has got.
#[derive(Debug)]
pub(super) struct PendingAdd {
    pub(super) waiters: Vec<Waiter>,
    pub(super) started: Instant,
    pub(super) announced: Instant,
    /// The broker has said something about it.
    pub(super) heard: bool,
    /// When the namespace was programmed.
    pub(super) programmed: Option<Instant>,
    /// The pod's addresses are in the host's probe set.
    pub(super) in_probe_set: bool,
    /// What is being waited for, and since when.
    stage: (&'static str, Instant),
    deadline: Instant,
    /// Since when nobody watches, and how long that is borne.
    unwatched: Option<Instant>,
    no_broker: Duration,
}

impl PendingAdd {
    pub(super) fn wake_at(&self) -> Instant {
        match self.unwatched {
            Some(since) => self.deadline.min(since + self.no_broker),
            None => self.deadline,
        }
    }

    pub(super) fn waits_for(&mut self, stage: &'static str) {
        self.stage = (stage, Instant::now());
    }
}

impl Task {
    /// An ADD begins.
    pub(super) fn start_add(&mut self, waiter: Waiter, started: Instant, called: Instant) {
        let now = Instant::now();
        let deadlines = self.node.settings.deadlines;
        self.add = Some(Box::new(PendingAdd {
            waiters: vec![waiter],
            started,
            announced: called,
            heard: false,
            programmed: None,
            in_probe_set: false,
            stage: ("the broker's decision", now),
            deadline: started + deadlines.executor,
            unwatched: (!self.node.hub.is_watched()).then_some(now),
            no_broker: deadlines.no_broker,
        }));
    }

    /// Records the sandbox and tells watchers.
    pub(super) fn announce(&mut self) -> Flow {
        let Some(add) = self.add.as_mut() else {
            self.publish_silently();
            return Flow::Continue(());
        };
        add.waits_for("the broker's decision");
        let called = std::mem::replace(&mut add.announced, Instant::now());
        if let Err(failure) = self.save() {
            return refuse(failure);
        }
        self.publish(Event::Pending);
        self.node.metrics.observe(Stage::Netns, called.elapsed());
        Flow::Continue(())
    }

    /// The broker has decided ahead that the pod passes: as [`Task::announce`] and the verdict in one step.
    pub(super) fn pass(&mut self) -> Flow {
        self.record.admitted = true;
        self.record.pending = false;
        if let Err(failure) = self.save() {
            return refuse(failure);
        }
        if let Some(add) = self.add.as_ref() {
            let metrics = &self.node.metrics;
            metrics.observe(Stage::Netns, add.announced.elapsed());
        }
        self.answer(&Answer::Admitted(Mode::None));
        self.publish(Event::Changed);
        Flow::Continue(())
    }

    /// An identical ADD came.
    pub(super) async fn join(&mut self, waiter: Waiter, addresses: Vec<IpAddr>, opened: Opened) -> Flow {
        if self.descriptor.is_none() {
            self.attach(opened);
            // As after any return of a namespace: watchers hear of it, and the drift pass looks at it next.
            self.publish(Event::Changed);
        } else {
            self.node.reaper.close(opened);
        }
        if let Some(add) = self.add.as_mut() {
            add.waiters.push(waiter);
            return Flow::Continue(());
        }
        if self.record.admitted {
            // The pod runs already: whatever is wrong, its sandbox stays.
            self.verified = false;
            let answer = match self.verify().await {
                Ok(()) => Answer::Admitted(mode_of(self.record.programmed.as_ref())),
                Err(failure) => Answer::Refused(failure),
            };
            let _ = waiter.answer.send(answer);
            return Flow::Continue(());
        }
        // Nobody has decided about this sandbox yet: the executor restarted in the middle, or no broker was there.
        let generation = self.node.registry.lock().next_generation();
        let now = crate::node::unix_ms();
        let (attachment, old) = (self.record.attachment.clone(), self.record.generation);
        self.node.registry.update(&attachment, old, |handle| {
            handle.generation = generation;
            handle.addresses.clone_from(&addresses);
            handle.added_unix_ms = now;
        });
        self.record.generation = generation;
        self.record.addresses = addresses;
        self.record.pending = true;
        self.record.added_unix_ms = now;
        let now = Instant::now();
        self.start_add(waiter, now, now);
        self.announce()
    }

    /// A caller went away; the last one takes the ADD with it.
    pub(super) fn left(&mut self, id: u64) -> Flow {
        let Some(add) = self.add.as_mut() else {
            return Flow::Continue(());
        };
        add.waiters.retain(|waiter| waiter.id != id);
        if add.waiters.is_empty() {
            tracing::warn!(attachment = %self.record.attachment, stage = add.stage.0, "caller of ADD went away");
            return Flow::Break(Reason::Cancelled.into());
        }
        Flow::Continue(())
    }

    /// A deadline may have passed, or watchers have come or gone.
    pub(super) async fn look_at_the_clock(&mut self) -> Flow {
        let watched = self.node.hub.is_watched();
        let Some(add) = self.add.as_mut() else {
            return Flow::Continue(());
        };
        let now = Instant::now();
        if watched {
            add.unwatched = None;
        } else {
            add.unwatched.get_or_insert(now);
        }
        if now >= add.deadline {
            let waited = now - add.started;
            let cause = format!(
                "pod {} (uid {}) was not admitted within {:.1} s; it has waited for {} for {:.1} s",
                self.record.pod,
                self.record.pod.uid,
                waited.as_secs_f32(),
                add.stage.0,
                (now - add.stage.1).as_secs_f32(),
            );
            return refuse(Failure::new(
                ErrorCode::BrokerTimeout,
                COMPONENT,
                "wait for broker",
                cause,
            ));
        }
        match add.unwatched {
            Some(since) if now >= since + add.no_broker => self.without_broker(now - since).await,
            _ => Flow::Continue(()),
        }
    }

    /// Nobody decides: what was done is undone, the sandbox is kept for later, the caller decides by itself.
    async fn without_broker(&mut self, waited: Duration) -> Flow {
        if self.record.programmed.is_some() {
            if let Err(failure) = self.apply(Desired::None).await {
                return refuse(failure);
            }
            self.record.programmed = None;
        }
        if let Err(failure) = self.leave_probe_set().await {
            return refuse(failure);
        }
        self.record.pending = false;
        if let Err(failure) = self.save() {
            return refuse(failure);
        }
        self.answer(&Answer::NoBroker(waited));
        self.note();
        self.publish(Event::Changed);
        Flow::Continue(())
    }

    /// Tells everybody who waits.
    pub(super) fn answer(&mut self, answer: &Answer) {
        if let Some(add) = self.add.take() {
            self.node.metrics.observe(Stage::Total, add.started.elapsed());
            for waiter in add.waiters {
                // A caller that has gone needs no answer.
                let _ = waiter.answer.send(answer.clone());
            }
        }
    }
}

/// Ends the sandbox; who waits is told why once everything is undone.
fn refuse(failure: Failure) -> Flow {
    Flow::Break(End {
        reason: Reason::Cancelled,
        answer: Some(Answer::Refused(failure)),
        completed: None,
    })
}

/// In which mode a pod runs.
pub(super) fn mode_of(programmed: Option<&Desired>) -> Mode {
    match programmed {
        None | Some(Desired::None) => Mode::None,
        Some(Desired::Ambient(_) | Desired::Joining(_)) => Mode::Ambient,
        Some(Desired::Draining(_)) => Mode::Draining,
    }
}

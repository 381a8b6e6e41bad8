//! The task that owns one sandbox: its record, its namespace, and the ADD that may be waiting.

use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use sluice_proto::ambient::Desired;
use sluice_proto::code::ErrorCode;
use sluice_proto::pb::executor::Sandbox;
use sluice_proto::pb::executor::sandbox_event::Event;
use sluice_proto::sandbox::Failure;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::links::{LinkChange, LinkWatch};
use super::pending::PendingAdd;
use super::registry::{Handle, wait_for_end};
use super::{Answer, Completed, Emptied, Inbox, Message, Reason, Slot, not_at_hand};
use crate::kernel::{Applied, Netns, Opened};
use crate::node::Node;
use crate::pool::{self, COMPONENT};
use crate::rules::RULE_SCHEMA;
use crate::table::Record;

/// Why a task ends, and what those who wait for its ADD are told.
pub(super) struct End {
    pub(super) reason: Reason,
    pub(super) answer: Option<Answer>,
    /// The broker's call that ended it; answered when everything is undone, too.
    pub(super) completed: Option<(oneshot::Sender<Completed>, Completed)>,
}

impl From<Reason> for End {
    fn from(reason: Reason) -> Self {
        Self {
            reason,
            answer: None,
            completed: None,
        }
    }
}

/// A sandbox that this one replaces.
pub(super) struct Predecessor {
    pub(super) ended: CancellationToken,
    pub(super) slot: Arc<Slot>,
}

impl From<&Handle> for Predecessor {
    fn from(handle: &Handle) -> Self {
        Self {
            ended: handle.ended.clone(),
            slot: Arc::clone(&handle.slot),
        }
    }
}

pub(super) type Flow = ControlFlow<End>;

/// One sandbox.
pub(super) struct Task {
    pub(super) node: Arc<Node>,
    pub(super) record: Record,
    pub(super) slot: Arc<Slot>,
    pub(super) descriptor: Option<Arc<OwnedFd>>,
    pub(super) broken: Option<Failure>,
    /// In this life the namespace was seen to be as recorded. A record alone proves nothing: it is written first.
    pub(super) verified: bool,
    /// Conntrack knows every connection there is in the namespace, as far as was seen in this life.
    pub(super) connections_known: bool,
    /// Since when, and how often, the namespace was looked for everywhere and is nowhere.
    pub(super) vanished: Option<(Instant, u32)>,
    /// How often the namespace was looked for in vain.
    pub(super) attempts: u32,
    /// Since when the pod is gone at the source.
    pub(super) pod_gone: Option<Instant>,
    pub(super) add: Option<Box<PendingAdd>>,
    /// What the broker has decided ahead.
    pub(super) ahead: Option<Desired>,
    /// Why that could not be programmed.
    pub(super) ahead_failed: Option<Box<Failure>>,
    /// Of the rules as they were programmed last in this life.
    pub(super) fingerprint: String,
    pub(super) inbox: Inbox,
    pub(super) ended: CancellationToken,
    pub(super) links: Option<LinkWatch>,
    watching: watch::Receiver<usize>,
}

enum Woken {
    Message(Option<Box<Message>>),
    Time,
    Watchers,
    Links(LinkChange),
}

impl Task {
    pub(super) fn new(
        node: Arc<Node>,
        record: Record,
        slot: Arc<Slot>,
        inbox: Inbox,
        ended: CancellationToken,
    ) -> Self {
        let watching = node.hub.watching();
        Self {
            node,
            record,
            slot,
            descriptor: None,
            broken: None,
            verified: false,
            connections_known: false,
            vanished: None,
            attempts: 0,
            pod_gone: None,
            add: None,
            ahead: None,
            ahead_failed: None,
            fingerprint: String::new(),
            inbox,
            ended,
            links: None,
            watching,
        }
    }

    /// Runs until the sandbox ends, after those it replaces.
    pub(super) async fn run(mut self, predecessors: Vec<Predecessor>) {
        let ended = predecessors.iter().map(|p| p.ended.clone()).collect();
        wait_for_end(ended).await;
        for late in predecessors.iter().filter(|p| !p.ended.is_cancelled()) {
            // It may have the same namespace: what it has not begun yet must not undo ours.
            late.slot.close();
        }
        let mut flow = match self.ahead.take() {
            Some(Desired::None) => self.pass(),
            Some(desired) => Box::pin(self.announce_and_program(desired)).await,
            None => self.announce(),
        };
        while let Flow::Continue(()) = flow {
            self.listen_for_routing();
            flow = match self.next().await {
                Woken::Message(Some(message)) => self.handle(*message).await,
                Woken::Message(None) => Flow::Break(Reason::Cancelled.into()),
                Woken::Time | Woken::Watchers => self.look_at_the_clock().await,
                Woken::Links(LinkChange::Gone) => self.look_for_interface().await,
                Woken::Links(LinkChange::Unheard) => {
                    self.poll_links();
                    Flow::Continue(())
                }
            };
        }
        if let Flow::Break(end) = flow {
            self.end(end).await;
        }
    }

    async fn next(&mut self) -> Woken {
        let wake_at = self.add.as_ref().map(|add| add.wake_at());
        let waits = self.add.is_some();
        tokio::select! {
            biased;
            message = self.inbox.recv() => Woken::Message(message),
            () = sleep_until(wake_at) => Woken::Time,
            _ = self.watching.changed(), if waits => Woken::Watchers,
            change = LinkWatch::changed(self.links.as_ref(), &self.record.attachment.ifname, &self.slot) => Woken::Links(change),
        }
    }

    async fn handle(&mut self, message: Message) -> Flow {
        match message {
            Message::Join {
                waiter,
                addresses,
                opened,
            } => return Box::pin(self.join(waiter, addresses, opened)).await,
            Message::Left(id) => return self.left(id),
            Message::Program {
                generation,
                desired,
                reply,
            } => Box::pin(self.program(generation, desired, reply)).await,
            Message::Complete {
                generation,
                verdict,
                reply,
            } => {
                return Box::pin(self.complete(generation, verdict, reply)).await;
            }
            Message::Remove(reason) => return Flow::Break(reason.into()),
            Message::PodGone {
                generation,
                used,
                reply,
            } => return self.pod_gone(generation, used, reply),
            Message::Attach {
                opened,
                found_by_address,
                reply,
            } => {
                return self.reattach(opened, found_by_address, reply);
            }
            Message::NotFound { failure, vanished } => return self.not_found(failure, vanished),
            Message::Inspect(reply) => {
                let _ = reply.send(Box::pin(self.inspect()).await);
            }
            Message::Check(reply) => {
                let _ = reply.send(Box::pin(self.check()).await);
            }
            Message::Examine => Box::pin(self.examine()).await,
            Message::LookForInterface => return Box::pin(self.look_for_interface()).await,
        }
        Flow::Continue(())
    }

    /// Takes a namespace that was checked.
    pub(super) fn attach(&mut self, opened: Opened) {
        let Opened {
            identity,
            descriptor,
            notifications,
            netns,
        } = opened;
        self.record.netns = identity;
        self.links = notifications.and_then(LinkWatch::start);
        // Another slot: whoever still works with the old one may take long.
        let slot = Arc::new(Slot::of(netns));
        slot.set_poll_links(self.links.is_none());
        let old = std::mem::replace(&mut self.slot, slot);
        self.node.reaper.close(Emptied(old));
        self.verified = false;
        self.connections_known = false;
        self.vanished = None;
        if let Some(old) = self.descriptor.replace(descriptor) {
            self.node.reaper.close(old);
        }
        self.broken = None;
        self.attempts = 0;
        self.note();
    }

    /// Lets go of the namespace.
    pub(super) fn detach(&mut self) {
        if let Some(links) = self.links.take() {
            self.node.reaper.close(links.into_fd());
        }
        // Not here: a call that hangs may still hold the slot.
        self.node.reaper.close(Emptied(Arc::clone(&self.slot)));
        let descriptor = self.descriptor.take();
        self.note();
        // The last reference, so that closing does not happen here.
        if let Some(descriptor) = descriptor {
            self.node.reaper.close(descriptor);
        }
    }

    /// Keeps the registry and the slot in step with this task.
    pub(super) fn note(&self) {
        let reachable = self.descriptor.is_some();
        self.slot.set_watched(reachable && self.has_rules());
        let record = &self.record;
        self.node
            .registry
            .update(&record.attachment, record.generation, |handle| {
                handle.descriptor.clone_from(&self.descriptor);
                handle.slot = Arc::clone(&self.slot);
                handle.netns.clone_from(&record.netns);
            });
    }

    /// Blocking work on the namespace.
    pub(super) async fn with_netns<T: Send + 'static>(
        &self,
        stage: &'static str,
        work: impl FnOnce(&mut dyn Netns) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        if self.descriptor.is_none() {
            return Err(not_at_hand(stage));
        }
        let slot = Arc::clone(&self.slot);
        pool::run(stage, move || slot.with(stage, work)).await
    }

    pub(super) async fn apply(&self, desired: Desired) -> Result<Applied, Failure> {
        self.with_netns("program rules", move |netns| netns.apply(&desired))
            .await
    }

    /// Writes the record.
    pub(super) fn save(&self) -> Result<(), Failure> {
        self.node.table.write(&self.record).map_err(|error| {
            let cause = sluice_runtime::telemetry::chain(&error);
            Failure::new(ErrorCode::StateFile, COMPONENT, "record sandbox", cause)
        })
    }

    /// Rules of ours are in the namespace, as far as is on record.
    pub(super) fn has_rules(&self) -> bool {
        let programmed = self.record.programmed.as_ref();
        programmed.is_some_and(|desired| *desired != Desired::None)
    }

    /// As watchers see it.
    pub(super) fn view(&self) -> Sandbox {
        let record = &self.record;
        Sandbox {
            attachment: Some((&record.attachment).into()),
            generation: record.generation,
            pod: Some((&record.pod).into()),
            addresses: record.addresses.iter().map(ToString::to_string).collect(),
            netns: Some((&record.netns).into()),
            netns_path: record.netns_path.clone(),
            programmed: record.programmed.as_ref().map(Into::into),
            reachable: self.descriptor.is_some(),
            broken: self.broken.as_ref().map(Into::into),
            pending: self.add.is_some(),
            adopted: record.adopted,
            fingerprint: self.fingerprint.clone(),
            attempts: self.attempts,
            rule_schema: if self.has_rules() {
                record.rule_schema
            } else {
                RULE_SCHEMA
            },
        }
    }

    pub(super) fn publish(&self, event: fn(Sandbox) -> Event) {
        self.node.hub.publish(&self.record.attachment, self.view(), event);
    }

    /// Changes what a new watcher would see.
    pub(super) fn publish_silently(&self) {
        self.node.hub.record(&self.record.attachment, self.view());
    }
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::fake::FakeKernel;
    use crate::node::Settings;
    use std::time::Duration;

    #[tokio::test]
    async fn a_sandbox_costs_little_memory() {
        let directory = tempfile::tempdir().unwrap();
        let settings = Settings {
            state: directory.path().into(),
            tombstones: directory.path().into(),
            agent: String::new(),
            deadlines: sluice_proto::paths::DEADLINES,
            drift: Duration::from_secs(5),
            full_drift: Duration::from_secs(30),
            recovery: Duration::from_secs(2),
            give_up: Duration::from_mins(1),
            unused: Duration::from_mins(10),
            pod_gone: Duration::from_secs(30),
            self_test: Duration::from_mins(1),
            stuck: Duration::from_secs(10),
            host: crate::rules::HostOptions::default(),
        };
        let node = Node::new(settings, Arc::new(FakeKernel::default())).unwrap();
        let (_sender, inbox) = tokio::sync::mpsc::unbounded_channel();
        let record = crate::table::tests::record("one");
        let task = Task::new(node, record, Arc::default(), inbox, CancellationToken::new());
        let future = task.run(Vec::new());
        let bytes = size_of_val(&future);
        assert!(bytes < 4096, "{bytes} bytes a sandbox");
    }
}

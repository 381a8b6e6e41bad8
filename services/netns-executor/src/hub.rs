//! What watchers see: a view of every sandbox, and a bounded queue a watcher.
//!
//! A snapshot is taken and a watcher registered under one lock, so that no change falls between the two. Nobody
//! waits for a watcher: one whose queue is full is cut off and lists again.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use sluice_proto::id::Attachment;
use sluice_proto::pb::executor::sandbox_event::Event;
use sluice_proto::pb::executor::{Heartbeat, Sandbox, SandboxEvent, SnapshotDone};
use sluice_proto::pb::types::PodRef;
use tokio::sync::{mpsc, watch};
use tonic::Status;

use crate::foresight::Foresight;
use crate::rules::RULE_SCHEMA;

/// Changes that a watcher may be behind.
pub const QUEUE: usize = 2048;
/// A watcher hears something at least this often.
pub const HEARTBEAT: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct Watcher {
    queue: mpsc::Sender<SandboxEvent>,
    overflowed: Arc<AtomicBool>,
}

#[derive(Debug, Default)]
struct State {
    views: BTreeMap<Attachment, Sandbox>,
    watchers: Vec<Watcher>,
}

/// The views and the watchers.
#[derive(Debug)]
pub struct Hub {
    state: Mutex<State>,
    watching: watch::Sender<usize>,
    /// Those of them that belong to our own agent; `None` before the first one came.
    own: watch::Sender<Option<usize>>,
    /// What the newest broker has decided ahead.
    pub foresight: Foresight,
}

impl Default for Hub {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            watching: watch::Sender::new(0),
            own: watch::Sender::new(None),
            foresight: Foresight::default(),
        }
    }
}

impl Hub {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Each holder leaves the state whole at every point where it could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new watcher: first the snapshot, then every change.
    pub fn subscribe(self: &Arc<Self>, broker: Option<Broker>) -> Subscription {
        let (queue, changes) = mpsc::channel(QUEUE);
        let overflowed = Arc::new(AtomicBool::new(false));
        let mut state = self.lock();
        let mut snapshot: Vec<_> = state.views.values().cloned().map(Event::Present).collect();
        snapshot.push(Event::SnapshotDone(SnapshotDone {}));
        // Whoever waits in an ADD is announced again, after the snapshot.
        snapshot.extend(
            state
                .views
                .values()
                .filter(|view| view.pending)
                .cloned()
                .map(Event::Pending),
        );
        state.watchers.push(Watcher {
            queue,
            overflowed: Arc::clone(&overflowed),
        });
        if let Some(Broker { session, own }) = broker {
            self.foresight.begin(session);
            self.watching.send_modify(|count| *count += 1);
            if own {
                self.own
                    .send_modify(|count| *count = Some(count.unwrap_or(0) + 1));
            }
        }
        Subscription {
            broker,
            snapshot: snapshot.into_iter(),
            changes,
            overflowed,
            hub: Arc::clone(self),
        }
    }

    /// How many brokers watch now; changes wake the receiver.
    pub fn watching(&self) -> watch::Receiver<usize> {
        self.watching.subscribe()
    }

    /// How many brokers of our own agent watch now; `None`: none has come yet.
    pub fn own_brokers(&self) -> watch::Receiver<Option<usize>> {
        self.own.subscribe()
    }

    /// Whether a broker watches.
    pub fn is_watched(&self) -> bool {
        *self.watching.borrow() > 0
    }

    /// The view of a sandbox.
    pub fn view(&self, attachment: &Attachment) -> Option<Sandbox> {
        self.lock().views.get(attachment).cloned()
    }

    /// How many sandboxes there are.
    pub fn sandboxes(&self) -> usize {
        self.lock().views.len()
    }

    /// Pods whose rules were made by another rule schema than this executor's.
    pub fn with_other_rules(&self) -> Vec<PodRef> {
        let state = self.lock();
        let other = state
            .views
            .values()
            .filter(|view| view.rule_schema != RULE_SCHEMA);
        other.filter_map(|view| view.pod.clone()).collect()
    }

    /// Changes a view without telling anybody.
    pub fn record(&self, attachment: &Attachment, view: Sandbox) {
        self.lock().views.insert(attachment.clone(), view);
    }

    /// Changes a view and tells every watcher.
    pub fn publish(&self, attachment: &Attachment, view: Sandbox, event: fn(Sandbox) -> Event) {
        let mut state = self.lock();
        state.views.insert(attachment.clone(), view.clone());
        state.send(&event(view));
    }

    /// Removes the view of a sandbox's generation and tells every watcher.
    pub fn gone(&self, attachment: &Attachment, generation: u64, event: &Event) {
        let mut state = self.lock();
        if state
            .views
            .get(attachment)
            .is_some_and(|view| view.generation == generation)
        {
            state.views.remove(attachment);
        }
        state.send(event);
    }

    /// Tells every watcher something that changes no view.
    pub fn tell(&self, event: &Event) {
        self.lock().send(event);
    }

    /// Sends heartbeats for ever.
    pub async fn beat(self: Arc<Self>) {
        let mut interval = tokio::time::interval(HEARTBEAT / 2);
        loop {
            interval.tick().await;
            self.tell(&Event::Heartbeat(Heartbeat {}));
        }
    }
}

impl State {
    fn send(&mut self, event: &Event) {
        self.watchers.retain(|watcher| {
            let event = SandboxEvent {
                event: Some(event.clone()),
            };
            match watcher.queue.try_send(event) {
                Ok(()) => true,
                Err(mpsc::error::TrySendError::Closed(_)) => false,
                Err(mpsc::error::TrySendError::Full(_)) => {
                    watcher.overflowed.store(true, Ordering::Release);
                    tracing::warn!(queue = QUEUE, "watcher is too slow and was cut off");
                    false
                }
            }
        });
    }
}

/// A watcher that decides.
#[derive(Debug, Clone, Copy)]
pub struct Broker {
    /// By which its descriptors and decisions are told from those of any other.
    pub session: u64,
    /// It belongs to the agent's pod that we do.
    pub own: bool,
}

/// One watcher's stream.
#[derive(Debug)]
pub struct Subscription {
    snapshot: std::vec::IntoIter<Event>,
    changes: mpsc::Receiver<SandboxEvent>,
    overflowed: Arc<AtomicBool>,
    hub: Arc<Hub>,
    broker: Option<Broker>,
}

impl tokio_stream::Stream for Subscription {
    type Item = Result<SandboxEvent, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(event) = self.snapshot.next() {
            return Poll::Ready(Some(Ok(SandboxEvent { event: Some(event) })));
        }
        match self.changes.poll_recv(cx) {
            Poll::Ready(Some(event)) => Poll::Ready(Some(Ok(event))),
            Poll::Ready(None) if self.overflowed.swap(false, Ordering::AcqRel) => {
                let status = Status::resource_exhausted("the watcher fell behind; list again");
                Poll::Ready(Some(Err(status)))
            }
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.changes.close();
        if let Some(Broker { session, own }) = self.broker {
            self.hub.foresight.end(session);
            self.hub.watching.send_modify(|count| *count -= 1);
            if own {
                self.hub
                    .own
                    .send_modify(|count| *count = count.map(|count| count - 1));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio_stream::StreamExt;

    const OURS: Broker = Broker {
        session: 1,
        own: true,
    };

    fn attachment(container: &str) -> Attachment {
        crate::table::tests::record(container).attachment
    }

    fn view(generation: u64) -> Sandbox {
        Sandbox {
            generation,
            ..Sandbox::default()
        }
    }

    #[tokio::test]
    async fn a_watcher_sees_the_snapshot_then_changes() {
        let hub = Arc::new(Hub::default());
        hub.record(&attachment("one"), view(1));
        let mut watcher = hub.subscribe(Some(OURS));
        assert!(hub.is_watched());
        hub.publish(&attachment("one"), view(2), Event::Changed);
        let mut events = Vec::new();
        for _ in 0..3 {
            events.push(watcher.next().await.unwrap().unwrap().event.unwrap());
        }
        assert_eq!(
            events,
            [
                Event::Present(view(1)),
                Event::SnapshotDone(SnapshotDone {}),
                Event::Changed(view(2))
            ]
        );
        drop(watcher);
        assert!(!hub.is_watched());
        let _onlooker = hub.subscribe(None);
        assert!(!hub.is_watched(), "nobody who decides");
    }

    #[tokio::test]
    async fn the_broker_of_another_agent_watches_as_ours_does_but_is_not_ours() {
        let hub = Arc::new(Hub::default());
        let count = || (*hub.watching().borrow(), *hub.own_brokers().borrow());
        let next = hub.subscribe(Some(Broker {
            session: 2,
            own: false,
        }));
        assert_eq!(count(), (1, None));
        let ours = hub.subscribe(Some(OURS));
        assert_eq!(count(), (2, Some(1)));
        drop(ours);
        assert_eq!(count(), (1, Some(0)));
        drop(next);
        assert_eq!(count(), (0, Some(0)));
    }

    #[tokio::test]
    async fn a_slow_watcher_is_cut_off_and_told_so() {
        let hub = Arc::new(Hub::default());
        let mut watcher = hub.subscribe(Some(OURS));
        for _ in 0..=QUEUE {
            hub.tell(&Event::Heartbeat(Heartbeat {}));
        }
        let mut last = None;
        while let Some(item) = watcher.next().await {
            last = Some(item);
        }
        assert_eq!(last.unwrap().unwrap_err().code(), tonic::Code::ResourceExhausted);
    }
}

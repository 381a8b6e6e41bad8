//! Sandboxes: one detached task each owns a sandbox's state, and everything else sends it messages. A gRPC handler is
//! dropped when its client dies, so nothing that must be undone lives in one.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::time::Duration;

use sluice_proto::ambient::Desired;
use sluice_proto::code::ErrorCode;
use sluice_proto::pb::executor::InspectResponse;
use sluice_proto::pb::types::Mode;
use sluice_proto::sandbox::Failure;
use tokio::sync::oneshot;

use crate::kernel::{Netns, Opened};
use crate::pool::COMPONENT;

pub mod add;
pub mod adopt;
mod connections;
mod end;
mod examine;
mod index;
mod links;
mod pending;
mod probes;
mod program;
pub mod recovery;
pub mod registry;
pub mod restore;
mod task;
pub mod unused;

/// What the runtime is told about an ADD.
#[derive(Debug, Clone)]
pub enum Answer {
    /// The pod may start.
    Admitted(Mode),
    /// It must not.
    Refused(Failure),
    /// Nobody decided.
    NoBroker(Duration),
}

/// What the broker is told about `Program`.
#[derive(Debug)]
pub enum Programmed {
    /// The namespace is as desired.
    Done {
        /// Names the rule set.
        fingerprint: String,
        /// Whether anything was changed.
        changed: bool,
    },
    /// The generation is over.
    TooLate,
    /// It could not be done; nothing was changed.
    Failed(Failure),
}

/// How the broker ends an ADD.
#[derive(Debug)]
pub enum Verdict {
    /// The pod may start.
    Admit(Mode),
    /// It must not.
    Refuse(Failure),
}

/// What the broker is told about `Complete`.
#[derive(Debug)]
pub enum Completed {
    /// The runtime has been answered as asked.
    Accepted,
    /// Somebody else ended the generation.
    TooLate,
    /// The pod was refused for this.
    Failed(Failure),
}

/// Why a sandbox ends; the text goes to watchers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The runtime's DEL.
    Del,
    /// The runtime's GC does not list it.
    Gc,
    /// Its interface vanished.
    InterfaceGone,
    /// The ADD was refused, timed out, or its caller went away.
    Cancelled,
    /// Another sandbox took its place.
    Replaced,
    /// Its namespace is nowhere to be found, or nobody but us has it.
    NetnsGone,
    /// The agent leaves the node.
    Retired,
    /// Its pod no longer exists at the source.
    PodGone,
}

impl Reason {
    /// As watchers see it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Del => "DEL",
            Self::Gc => "GC",
            Self::InterfaceGone => "interface-gone",
            Self::Cancelled => "cancelled",
            Self::Replaced => "replaced",
            Self::NetnsGone => "netns-gone",
            Self::Retired => "retired",
            Self::PodGone => "pod-gone",
        }
    }
}

/// Somebody who waits for the answer to an ADD.
#[derive(Debug)]
pub(crate) struct Waiter {
    pub(crate) id: u64,
    pub(crate) answer: oneshot::Sender<Answer>,
}

/// Messages are boxed: a channel sets aside room for 32 of them, and there is one channel a sandbox.
pub(crate) type Sender = tokio::sync::mpsc::UnboundedSender<Box<Message>>;
pub(crate) type Inbox = tokio::sync::mpsc::UnboundedReceiver<Box<Message>>;

/// What a sandbox's task can be asked.
pub(crate) enum Message {
    /// An identical ADD.
    Join {
        waiter: Waiter,
        addresses: Vec<IpAddr>,
        opened: Opened,
    },
    /// A caller of ADD went away.
    Left(u64),
    /// Make the namespace match.
    Program {
        generation: u64,
        desired: Desired,
        reply: oneshot::Sender<Programmed>,
    },
    /// End the ADD.
    Complete {
        generation: u64,
        verdict: Verdict,
        reply: oneshot::Sender<Completed>,
    },
    /// End the sandbox.
    Remove(Reason),
    /// The pod is gone at the source; who else has the namespace, if anybody.
    PodGone {
        generation: u64,
        used: Option<String>,
        reply: oneshot::Sender<Result<(), String>>,
    },
    /// The namespace is at hand again.
    Attach {
        opened: Opened,
        /// It was found by the pod's UID and one of its addresses, so another cookie is not a mistake.
        found_by_address: bool,
        reply: oneshot::Sender<Result<(), Failure>>,
    },
    /// The namespace was looked for and not found.
    NotFound {
        failure: Failure,
        /// Every place was looked at, and it is in none.
        vanished: bool,
    },
    /// Read back and compare.
    Inspect(oneshot::Sender<InspectResponse>),
    /// As [`Message::Inspect`], in the form of CNI CHECK.
    Check(oneshot::Sender<Vec<Failure>>),
    /// The drift pass saw that something moved, or it is time for a full comparison.
    Examine,
    /// The link poll did not see the interface.
    LookForInterface,
}

/// Where a sandbox's namespace is kept, so that the drift pass can look at many at once.
#[derive(Default)]
pub(crate) struct Slot {
    netns: Mutex<Option<Box<dyn Netns>>>,
    /// Rules should be there.
    watched: AtomicBool,
    /// No link notifications come: the interface must be polled.
    poll_links: AtomicBool,
    /// Changes of routes and routing rules are heard of: each sets `routing_moved`.
    hears_routing: AtomicBool,
    /// Policy routing may have changed since it was looked at.
    routing_moved: AtomicBool,
    /// Another sandbox may have the namespace now.
    closed: AtomicBool,
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slot").finish_non_exhaustive()
    }
}

impl Slot {
    pub(crate) fn of(netns: Box<dyn Netns>) -> Self {
        Self {
            netns: Mutex::new(Some(netns)),
            ..Self::default()
        }
    }

    /// Blocking, but does not wait for somebody else who uses the namespace; None then.
    pub(crate) fn try_with<T>(
        &self,
        stage: &'static str,
        work: impl FnOnce(&mut dyn Netns) -> Result<T, Failure>,
    ) -> Option<Result<T, Failure>> {
        let mut netns = match self.netns.try_lock() {
            Ok(netns) => netns,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(self.use_it(netns.as_mut(), stage, work))
    }

    fn use_it<T>(
        &self,
        netns: Option<&mut Box<dyn Netns>>,
        stage: &'static str,
        work: impl FnOnce(&mut dyn Netns) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        match netns {
            Some(_) if self.closed.load(Ordering::Acquire) => Err(Failure::new(
                ErrorCode::TooLate,
                COMPONENT,
                stage,
                "another sandbox has taken the namespace over",
            )),
            Some(netns) => work(netns.as_mut()),
            None => Err(not_at_hand(stage)),
        }
    }

    /// Lets nothing more begin.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Blocking: uses the namespace.
    pub(crate) fn with<T>(
        &self,
        stage: &'static str,
        work: impl FnOnce(&mut dyn Netns) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        // A panic in the middle of a netlink exchange leaves a socket whose next answer may be an old one; the
        // sequence numbers tell.
        let mut netns = self.netns.lock().unwrap_or_else(PoisonError::into_inner);
        self.use_it(netns.as_mut(), stage, work)
    }

    pub(crate) fn set_watched(&self, watched: bool) {
        self.watched.store(watched, Ordering::Relaxed);
    }

    pub(crate) fn is_watched(&self) -> bool {
        self.watched.load(Ordering::Relaxed)
    }

    pub(crate) fn set_poll_links(&self, poll: bool) {
        self.poll_links.store(poll, Ordering::Relaxed);
    }

    pub(crate) fn polls_links(&self) -> bool {
        self.poll_links.load(Ordering::Relaxed)
    }

    pub(crate) fn set_hears_routing(&self, hears: bool) {
        self.hears_routing.store(hears, Ordering::Relaxed);
    }

    pub(crate) fn hears_routing(&self) -> bool {
        self.hears_routing.load(Ordering::Relaxed)
    }

    pub(crate) fn routing_moved(&self) {
        self.routing_moved.store(true, Ordering::Relaxed);
    }

    /// Whether policy routing may have changed; whoever asks must look. What changes from now on is told next time.
    pub(crate) fn take_routing_moved(&self) -> bool {
        self.routing_moved.swap(false, Ordering::Relaxed)
    }
}

/// Empties a slot where it is dropped, as soon as whoever uses it is done.
pub(crate) struct Emptied(pub(crate) Arc<Slot>);

impl Drop for Emptied {
    fn drop(&mut self) {
        let mut held = self.0.netns.lock().unwrap_or_else(PoisonError::into_inner);
        drop(held.take());
    }
}

pub(crate) fn not_at_hand(stage: &'static str) -> Failure {
    Failure::new(
        ErrorCode::SandboxGone,
        COMPONENT,
        stage,
        "the namespace's sockets are not at hand in this life of the executor",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Kernel as _;
    use crate::kernel::fake::FakeKernel;

    fn slot(kernel: &FakeKernel) -> Slot {
        let file = tempfile::tempfile().unwrap();
        Slot::of(kernel.open(vec![file.into()]).unwrap().netns)
    }

    #[test]
    fn nothing_begins_in_a_closed_slot() {
        let kernel = FakeKernel::default();
        let slot = slot(&kernel);
        slot.close();
        let late = slot.with("program rules", |netns| netns.apply(&Desired::None));
        assert_eq!(late.unwrap_err().code, ErrorCode::TooLate);
    }

    #[test]
    fn a_busy_slot_is_passed_over() {
        let slot = slot(&FakeKernel::default());
        let busy = slot.with("work", |_| {
            Ok(slot.try_with("look", |netns| netns.moved()).is_none())
        });
        assert!(busy.unwrap());
        assert!(slot.try_with("look", |netns| netns.moved()).is_some());
    }
}

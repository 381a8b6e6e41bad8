//! What the state machine is told.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use sluice_proto::ambient::Desired;
use sluice_proto::id::{Attachment, PodRef, PodUid};
use sluice_proto::sandbox::{Failure, NetnsIdentity};

use crate::source;

/// One ztunnel connection of this life of the broker; grows with each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// One attempt to give one pod one netns to ztunnel; grows with each. A late answer to an older one means nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u64);

/// One generation of one attachment.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SandboxId {
    /// Which attachment.
    pub attachment: Attachment,
    /// Grows with each new ADD.
    pub generation: u64,
}

impl fmt::Display for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.attachment, self.generation)
    }
}

/// A sandbox as the executor tells of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sandbox {
    /// Its key.
    pub id: SandboxId,
    /// The pod as the runtime named it.
    pub pod: PodRef,
    /// Addresses of the interface, from the primary plugin's result.
    pub addresses: Vec<IpAddr>,
    /// The namespace.
    pub netns: NetnsIdentity,
    /// What was programmed last.
    pub programmed: Desired,
    /// The executor has the namespace's sockets.
    pub reachable: bool,
    /// Why not, or what the drift pass could not mend.
    pub broken: Option<Failure>,
    /// An ADD waits.
    pub pending: bool,
    /// Of the rules, if they were programmed in this life of the executor.
    pub fingerprint: String,
    /// How often the executor has looked for the namespace in vain.
    pub attempts: u32,
}

/// How a call to the executor ended without doing what it should.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refused {
    /// The sandbox was deleted, replaced or timed out: whatever was done for it has to be taken back.
    TooLate,
    /// The executor says that it failed. A failed completion ends the ADD.
    Failed(Failure),
    /// No answer: nobody knows what was done.
    Lost(Failure),
}

/// A fact.
#[derive(Debug, Clone)]
pub enum Event {
    /// The source has told everything that exists.
    SourceSynced,
    /// A pod exists, as it is now.
    PodApplied(Arc<source::Pod>),
    /// A pod is gone.
    PodDeleted(Arc<source::Pod>),
    /// A namespace exists, as it is now.
    NamespaceApplied(Arc<source::Namespace>),
    /// A namespace is gone.
    NamespaceDeleted(Arc<source::Namespace>),
    /// Whether namespaces that nobody told of may exist all the same.
    Undetermined(bool),
    /// The answer to [`Effect::Lookup`](super::Effect::Lookup).
    LookedUp {
        /// The pod that was asked for.
        pod: PodRef,
        /// What the source has, or why it cannot tell.
        found: Result<source::Lookup, String>,
    },

    /// The executor's watch has begun; its sandboxes follow.
    ExecutorConnected,
    /// The executor's watch has ended.
    ExecutorDisconnected,
    /// Part of the executor's snapshot.
    SandboxPresent(Box<Sandbox>),
    /// The snapshot is complete.
    SandboxesListed,
    /// An ADD waits for a decision.
    SandboxPending(Box<Sandbox>),
    /// A sandbox is different now.
    SandboxChanged(Box<Sandbox>),
    /// A sandbox is gone.
    SandboxGone {
        /// Which.
        id: SandboxId,
        /// Whose.
        pod: PodUid,
    },

    /// Answer to [`Effect::Program`](super::Effect::Program).
    Programmed {
        /// Which sandbox.
        id: SandboxId,
        /// Whose.
        pod: PodUid,
        /// What was asked for.
        desired: Desired,
        /// Fingerprint of the rules, or how it went wrong.
        result: Result<String, Refused>,
    },
    /// Answer to [`Effect::FetchDescriptor`](super::Effect::FetchDescriptor).
    Fetched {
        /// Which sandbox.
        id: SandboxId,
        /// Whose.
        pod: PodUid,
        /// How it went.
        result: Result<(), Failure>,
    },
    /// Answer to [`Effect::OfferDescriptor`](super::Effect::OfferDescriptor).
    DescriptorOffered {
        /// Which sandbox.
        id: SandboxId,
        /// Whose.
        pod: PodUid,
        /// How it went.
        result: Result<(), Failure>,
    },
    /// Answer to [`Effect::Inspect`](super::Effect::Inspect).
    Inspected {
        /// Which sandbox.
        id: SandboxId,
        /// Whose.
        pod: PodUid,
        /// Connections that still lead through the proxy.
        result: Result<u32, Failure>,
    },
    /// Answer to [`Effect::Complete`](super::Effect::Complete).
    Completed {
        /// Which sandbox.
        id: SandboxId,
        /// Whose.
        pod: PodUid,
        /// How it went.
        result: Result<(), Refused>,
    },
    /// Answer to [`Effect::Adopt`](super::Effect::Adopt).
    Adopted {
        /// Whose sandbox.
        pod: PodUid,
        /// The sandbox found.
        result: Result<Box<Sandbox>, Failure>,
    },
    /// Answer to [`Effect::LetGo`](super::Effect::LetGo).
    LetGo {
        /// Which sandbox.
        id: SandboxId,
        /// Whose.
        pod: PodUid,
        /// Whether it is gone, or who still has its namespace.
        result: Result<(), String>,
    },
    /// Answer to [`Effect::SyncProbes`](super::Effect::SyncProbes).
    ProbesSynced(Result<(), Failure>),

    /// A ztunnel has said hello.
    ZdsConnected(ConnectionId),
    /// A connection has acknowledged its snapshot, with these workloads in it.
    ZdsReady {
        /// Which connection.
        connection: ConnectionId,
        /// What it acknowledged.
        acked: Vec<(PodUid, Epoch)>,
        /// When, Unix time in milliseconds.
        unix_ms: u64,
    },
    /// A ready connection has acknowledged a workload.
    ZdsAcked {
        /// Which connection.
        connection: ConnectionId,
        /// Which workload.
        pod: PodUid,
        /// Which attempt.
        epoch: Epoch,
        /// From the message to its answer, on the wire.
        took: Duration,
        /// When, Unix time in milliseconds.
        unix_ms: u64,
    },
    /// A connection has refused a workload, in its snapshot or after.
    ZdsNacked {
        /// Which connection.
        connection: ConnectionId,
        /// Which workload.
        pod: PodUid,
        /// Which attempt.
        epoch: Epoch,
        /// What ztunnel says.
        error: String,
    },
    /// A connection was closed because this workload's answer did not come.
    ZdsExpired {
        /// Which connection.
        connection: ConnectionId,
        /// Which workload.
        pod: PodUid,
        /// Which attempt.
        epoch: Epoch,
        /// How long it was the oldest unanswered.
        waited: Duration,
    },
    /// A connection is gone.
    ZdsClosed(ConnectionId),
    /// Every connection has answered the withdrawal, or is gone.
    ZdsWithdrawn {
        /// Which workload.
        pod: PodUid,
        /// Which attempt was withdrawn.
        epoch: Epoch,
    },

    /// Whether the executor has taken what was foreseen.
    Foreseen {
        /// Which call.
        call: u64,
        /// Whether it has.
        result: Result<(), Failure>,
    },

    /// Time has passed.
    Tick,
}

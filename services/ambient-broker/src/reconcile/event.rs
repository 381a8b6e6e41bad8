//! What the state machine is told, and what it wants done.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

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
    /// The answer to [`Effect::Lookup`].
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

    /// Answer to [`Effect::Program`].
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
    /// Answer to [`Effect::FetchDescriptor`].
    Fetched {
        /// Which sandbox.
        id: SandboxId,
        /// Whose.
        pod: PodUid,
        /// How it went.
        result: Result<(), Failure>,
    },
    /// Answer to [`Effect::OfferDescriptor`].
    DescriptorOffered {
        /// Which sandbox.
        id: SandboxId,
        /// Whose.
        pod: PodUid,
        /// How it went.
        result: Result<(), Failure>,
    },
    /// Answer to [`Effect::Inspect`].
    Inspected {
        /// Which sandbox.
        id: SandboxId,
        /// Whose.
        pod: PodUid,
        /// Connections that still lead through the proxy.
        result: Result<u32, Failure>,
    },
    /// Answer to [`Effect::Complete`].
    Completed {
        /// Which sandbox.
        id: SandboxId,
        /// Whose.
        pod: PodUid,
        /// How it went.
        result: Result<(), Refused>,
    },
    /// Answer to [`Effect::Adopt`].
    Adopted {
        /// Whose sandbox.
        pod: PodUid,
        /// The sandbox found.
        result: Result<Box<Sandbox>, Failure>,
    },
    /// Answer to [`Effect::LetGo`].
    LetGo {
        /// Which sandbox.
        id: SandboxId,
        /// Whose.
        pod: PodUid,
        /// Whether it is gone, or who still has its namespace.
        result: Result<(), String>,
    },
    /// Answer to [`Effect::SyncProbes`].
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

/// How a pending ADD ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Not in the mesh.
    Pass,
    /// In the mesh, everything in place.
    Ambient,
    /// It must not start now.
    Refuse(Failure),
}

/// What ztunnel is told of a workload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkloadInfo {
    /// The pod's name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// `spec.serviceAccountName`.
    pub service_account: String,
}

/// One address of the host's probe set with its owner.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProbeEntry {
    /// The pod's address.
    pub address: IpAddr,
    /// The pod.
    pub owner: PodUid,
}

/// How loud a message to people is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// A pod changed state.
    Info,
    /// Degraded, will be tried again.
    Warn,
}

/// Something to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Ask the source for one pod as it is this moment.
    Lookup(PodRef),
    /// Make a sandbox's namespace match `desired`.
    Program {
        /// Which sandbox.
        id: SandboxId,
        /// Whose.
        pod: PodUid,
        /// How it should be.
        desired: Desired,
    },
    /// Get a descriptor of a sandbox's netns from the executor and hold it under `id`.
    FetchDescriptor {
        /// Which sandbox.
        id: SandboxId,
        /// Whose.
        pod: PodUid,
        /// What the descriptor must be.
        netns: NetnsIdentity,
    },
    /// Give the executor the descriptor held under `held`.
    OfferDescriptor {
        /// Which sandbox.
        id: SandboxId,
        /// Whose.
        pod: PodUid,
        /// Under which key the descriptor is held.
        held: SandboxId,
    },
    /// Close the descriptor held under this key.
    DropDescriptor(SandboxId),
    /// Count the connections that still lead through the proxy.
    Inspect {
        /// Which sandbox.
        id: SandboxId,
        /// Whose.
        pod: PodUid,
    },
    /// Tell the executor ahead of time what is decided about pods without a sandbox.
    Foresee {
        /// Number of this call.
        call: u64,
        /// How they should be; [`Desired::None`]: they pass.
        decided: Vec<(PodUid, Desired)>,
        /// Which have to be asked about (again).
        ask: Vec<PodUid>,
    },
    /// End a pending ADD.
    Complete {
        /// Which sandbox.
        id: SandboxId,
        /// Whose.
        pod: PodUid,
        /// How.
        verdict: Verdict,
    },
    /// Find the netns of a running pod.
    Adopt {
        /// The pod.
        pod: PodRef,
        /// Its addresses.
        addresses: Vec<IpAddr>,
    },
    /// Tell the executor that the pod of a sandbox no longer exists.
    LetGo {
        /// Which sandbox.
        id: SandboxId,
        /// Whose.
        pod: PodUid,
    },
    /// Change the host's probe set.
    SyncProbes {
        /// What must be in it.
        add: Vec<ProbeEntry>,
        /// What must not, if it still belongs to that owner.
        remove: Vec<ProbeEntry>,
        /// Remove whatever is not in `add`.
        prune: bool,
    },
    /// Put a workload into the snapshot of connections to come, into the snapshots being sent, and send it to `to`.
    ZdsOffer {
        /// The workload.
        pod: PodUid,
        /// Which attempt.
        epoch: Epoch,
        /// Under which key its descriptor is held.
        held: SandboxId,
        /// What ztunnel is told.
        info: WorkloadInfo,
        /// A ready connection.
        to: Option<ConnectionId>,
    },
    /// Take a workload out of the snapshot and tell every connection.
    ZdsWithdraw {
        /// The workload.
        pod: PodUid,
        /// Which attempt.
        epoch: Epoch,
    },
    /// From now on snapshots are complete and may be ended.
    ZdsOpen,
    /// Tell the control plane whether the pod takes HBONE.
    WriteStatus {
        /// The pod.
        pod: PodRef,
        /// Whether it does.
        enrolled: bool,
    },
    /// A pod's report changed; `None`: the pod is gone.
    Publish {
        /// The pod.
        pod: PodRef,
        /// How it is now.
        report: Option<Arc<PodReport>>,
    },
    /// A step of an ADD took so long.
    Timed {
        /// Which step.
        stage: &'static str,
        /// How long.
        elapsed: Duration,
    },
    /// Something for people.
    Log {
        /// How loud.
        level: Level,
        /// About whom.
        pod: PodRef,
        /// What happened.
        message: &'static str,
        /// Details.
        details: String,
    },
}

/// Where a pod stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Standing {
    /// Not selected.
    Out,
    /// Selected, on its way or waiting.
    Pending,
    /// Rules are right and a live connection has acknowledged the netns.
    Enrolled,
    /// Selected, but something is wrong.
    Broken,
    /// Leaving.
    Draining,
}

/// What node-local tools are told of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodReport {
    /// The pod.
    pub pod: PodRef,
    /// Where it stands.
    pub standing: Standing,
    /// Why it is in or out.
    pub verdict: String,
    /// For pending and broken: a stable reason.
    pub reason: &'static str,
    /// What failed last.
    pub last_error: Option<Failure>,
    /// Its netns.
    pub netns: Option<NetnsIdentity>,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// How long each step took.
    pub timings: Vec<(&'static str, Duration)>,
    /// Who acknowledged it and when (Unix time in milliseconds).
    pub acked: Option<(ConnectionId, u64)>,
    /// Failed attempts in a row.
    pub retries: u32,
    /// Short fingerprint of the rules in the netns; empty: none, or not programmed in this life of the broker.
    pub rules_version: String,
}

/// A point in time the machine wants a [`Event::Tick`] at.
pub(super) fn earliest(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (one, other) => one.or(other),
    }
}

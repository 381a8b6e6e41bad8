//! What the state machine wants done.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use sluice_proto::ambient::Desired;
use sluice_proto::id::{PodRef, PodUid};
use sluice_proto::sandbox::{Failure, NetnsIdentity};

use super::event::{ConnectionId, Epoch, SandboxId};
use super::report::PodReport;

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

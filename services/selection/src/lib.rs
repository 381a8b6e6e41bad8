//! Which pods are in the mesh, and why: pure decisions shared by the CNI plugin, the broker and `sluicectl`.
//!
//! Nothing here does I/O, keeps state or knows where a pod came from. A caller fills a [`PodView`], calls
//! [`select`] and gets a [`Verdict`] that says not only in or out but which label, annotation or rule decided.
//! Two processes that hold the same [`SelectionConfig`] (compare [`SelectionConfig::hash`]) decide alike.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod config;
#[cfg(feature = "file")]
mod file;
mod identity;
mod labels;
mod overrides;
mod verdict;

use std::collections::BTreeMap;

pub use config::{EnablementSelector, SelectionConfig, parse_excluded_namespaces};
#[cfg(feature = "file")]
pub use file::{SelectionFileError, parse_selection_file};
pub use identity::{CONFIG_HASH, CONFIG_MIRROR, OwnPods, is_static_uid, sandbox_uid};
pub use labels::{InvalidConfig, LabelSelector, Operator, Requirement};
pub use overrides::{
    BYPASS_INBOUND_CAPTURE, DNS_CAPTURE, MAX_VIRTUAL_INTERFACES, OverrideWarning, Overrides,
    REROUTE_VIRTUAL_INTERFACES,
};
pub use verdict::{Mode, Reason, Step, Verdict, select};

/// Labels or annotations of an object.
pub type Labels = BTreeMap<String, String>;

/// Label that puts a namespace or pod in the mesh (`ambient`) or a pod out of it (`none`).
pub const DATAPLANE_MODE: &str = "istio.io/dataplane-mode";

/// Annotation that the sidecar injector leaves on a pod it has injected. Present with any value, even empty,
/// it keeps the pod out of ambient mode.
pub const SIDECAR_STATUS: &str = "sidecar.istio.io/status";

/// Status annotation the broker writes. Never an input.
pub const REDIRECTION_STATUS: &str = "ambient.istio.io/redirection";

/// Where a pod is in its life (Kubernetes `status.phase`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Phase {
    /// Accepted, containers not all started.
    #[default]
    Pending,
    /// At least one container runs or restarts.
    Running,
    /// All containers ended well and stay ended.
    Succeeded,
    /// All containers ended, at least one badly, and stay ended.
    Failed,
    /// The node does not answer, or a value this version does not know.
    Unknown,
}

impl Phase {
    /// From `status.phase`; empty counts as `Pending`, anything unheard of as `Unknown`.
    pub fn parse(phase: &str) -> Self {
        match phase {
            "" | "Pending" => Self::Pending,
            "Running" => Self::Running,
            "Succeeded" => Self::Succeeded,
            "Failed" => Self::Failed,
            _ => Self::Unknown,
        }
    }

    /// As Kubernetes writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Running => "Running",
            Self::Succeeded => "Succeeded",
            Self::Failed => "Failed",
            Self::Unknown => "Unknown",
        }
    }

    /// The pod's containers have ended for good.
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }
}

/// What a decision needs to know of a pod.
#[derive(Debug, Clone, Copy)]
pub struct PodView<'a> {
    /// `metadata.namespace`.
    pub namespace: &'a str,
    /// `metadata.name`.
    pub name: &'a str,
    /// `metadata.labels`.
    pub labels: &'a Labels,
    /// `metadata.annotations`.
    pub annotations: &'a Labels,
    /// `spec.hostNetwork`.
    pub host_network: bool,
    /// `status.phase`; `None` while a sandbox is being added, when a phase in a cache can only be an old one.
    pub phase: Option<Phase>,
}

/// What a decision needs to know of a pod's namespace.
#[derive(Debug, Clone, Copy)]
pub struct NamespaceView<'a> {
    /// `metadata.labels`.
    pub labels: &'a Labels,
}

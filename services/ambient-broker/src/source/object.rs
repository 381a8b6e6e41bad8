//! Pods and namespaces as the broker needs them; everything else in a manifest is ignored.

use std::net::IpAddr;

use sluice_proto::id::PodRef;
use sluice_selection::{Labels, NamespaceView, Phase, PodView};

/// A pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// Namespace, name and UID.
    pub id: PodRef,
    /// `metadata.labels`.
    pub labels: Labels,
    /// `metadata.annotations`.
    pub annotations: Labels,
    /// `metadata.deletionTimestamp`, as written; set while the pod is being deleted.
    pub deletion_timestamp: Option<String>,
    /// `spec.hostNetwork`.
    pub host_network: bool,
    /// `spec.serviceAccountName`; `default` where the manifest names none.
    pub service_account: String,
    /// `spec.nodeName`.
    pub node_name: Option<String>,
    /// `status.phase`.
    pub phase: Phase,
    /// `status.podIPs`, else `status.podIP`; empty where the status says nothing.
    pub ips: Vec<IpAddr>,
}

impl Pod {
    /// What selection needs to know of it.
    pub fn view(&self) -> PodView<'_> {
        PodView {
            namespace: self.id.namespace.as_str(),
            name: self.id.name.as_str(),
            labels: &self.labels,
            annotations: &self.annotations,
            host_network: self.host_network,
            phase: Some(self.phase),
        }
    }

    /// The UID that the container runtime knows it by: for a mirror pod the static pod's hash.
    pub fn sandbox_uid(&self) -> &str {
        sluice_selection::sandbox_uid(self.id.uid.as_str(), &self.annotations)
    }
}

/// A namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Namespace {
    /// Its name.
    pub name: sluice_proto::id::Namespace,
    /// `metadata.labels`.
    pub labels: Labels,
}

impl Namespace {
    /// What selection needs to know of it.
    pub fn view(&self) -> NamespaceView<'_> {
        NamespaceView { labels: &self.labels }
    }
}

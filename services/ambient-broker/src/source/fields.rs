//! The few fields of a pod's `spec` and `status` that count, as they are written in manifests and by the API.

use std::net::IpAddr;

use serde::{Deserialize, Deserializer};
use sluice_proto::id::PodRef;
use sluice_selection::{Labels, Phase};

use super::Pod;

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Spec {
    #[serde(default)]
    host_network: Option<bool>,
    #[serde(default)]
    service_account_name: Option<String>,
    /// The older name of the same.
    #[serde(default)]
    service_account: Option<String>,
    #[serde(default)]
    node_name: Option<String>,
}

impl Spec {
    fn service_account(&mut self) -> String {
        let name = self.service_account_name.take().or(self.service_account.take());
        name.filter(|name| !name.is_empty())
            .unwrap_or_else(|| "default".into())
    }
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Status {
    #[serde(default, deserialize_with = "phase")]
    phase: Option<Phase>,
    #[serde(default, rename = "podIP")]
    pod_ip: Option<IpAddr>,
    #[serde(default, rename = "podIPs")]
    pod_ips: Option<Vec<PodIp>>,
}

#[derive(Debug, Clone, Deserialize)]
struct PodIp {
    ip: IpAddr,
}

impl Status {
    fn ips(&self) -> Vec<IpAddr> {
        match &self.pod_ips {
            Some(ips) if !ips.is_empty() => ips.iter().map(|ip| ip.ip).collect(),
            _ => self.pod_ip.into_iter().collect(),
        }
    }
}

/// A pod of these fields and what its metadata say.
pub(crate) fn pod(
    id: PodRef,
    labels: Labels,
    annotations: Labels,
    deletion_timestamp: Option<String>,
    mut spec: Spec,
    status: &Status,
) -> Pod {
    Pod {
        id,
        labels,
        annotations,
        deletion_timestamp,
        host_network: spec.host_network.unwrap_or(false),
        service_account: spec.service_account(),
        node_name: spec.node_name,
        phase: status.phase.unwrap_or_default(),
        ips: status.ips(),
    }
}

fn phase<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Phase>, D::Error> {
    Ok(Option::<String>::deserialize(deserializer)?.map(|phase| Phase::parse(&phase)))
}

//! The few fields of a pod's `spec` and `status` that count, as they are written in manifests and by the API.

use std::net::IpAddr;

use serde::{Deserialize, Deserializer};
use sluice_selection::Phase;

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Spec {
    #[serde(default)]
    pub(crate) host_network: Option<bool>,
    #[serde(default)]
    service_account_name: Option<String>,
    /// The older name of the same.
    #[serde(default)]
    service_account: Option<String>,
    #[serde(default)]
    pub(crate) node_name: Option<String>,
}

impl Spec {
    pub(crate) fn service_account(&mut self) -> String {
        let name = self.service_account_name.take().or(self.service_account.take());
        name.filter(|name| !name.is_empty())
            .unwrap_or_else(|| "default".into())
    }
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Status {
    #[serde(default, deserialize_with = "phase")]
    pub(crate) phase: Option<Phase>,
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
    pub(crate) fn ips(&self) -> Vec<IpAddr> {
        match &self.pod_ips {
            Some(ips) if !ips.is_empty() => ips.iter().map(|ip| ip.ip).collect(),
            _ => self.pod_ip.into_iter().collect(),
        }
    }
}

fn phase<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Phase>, D::Error> {
    Ok(Option::<String>::deserialize(deserializer)?.map(|phase| Phase::parse(&phase)))
}

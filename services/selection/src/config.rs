//! The configuration of selection: read once, checked as a whole, compared between processes by its hash.

use std::net::{Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

use crate::labels::{InvalidConfig, LabelSelector, Operator, RawSelector, is_dns_label, is_dns_subdomain};
use crate::{DATAPLANE_MODE, Labels, NamespaceView, OwnPods, PodView, SIDECAR_STATUS};

/// One entry of the enablement list. A pod is enabled when pod and namespace selector both match; an absent or
/// empty one matches everything.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(try_from = "RawEntry", rename_all = "camelCase")]
pub struct EnablementSelector {
    /// On the pod's labels.
    pub pod_selector: LabelSelector,
    /// On the labels of the pod's namespace.
    pub namespace_selector: LabelSelector,
}

impl EnablementSelector {
    fn compile(raw: RawEntry, path: &str) -> Result<Self, InvalidConfig> {
        let compile = |raw: Option<RawSelector>, field: &str| {
            LabelSelector::compile(raw.unwrap_or_default(), &format!("{path}{field}."))
        };
        Ok(Self {
            pod_selector: compile(raw.pod_selector, "podSelector")?,
            namespace_selector: compile(raw.namespace_selector, "namespaceSelector")?,
        })
    }
}

impl TryFrom<RawEntry> for EnablementSelector {
    type Error = InvalidConfig;
    fn try_from(raw: RawEntry) -> Result<Self, InvalidConfig> {
        Self::compile(raw, "")
    }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawEntry {
    #[serde(default)]
    pod_selector: Option<RawSelector>,
    #[serde(default)]
    namespace_selector: Option<RawSelector>,
}

/// Everything that decides whether and how a pod is in the mesh, the pod itself apart.
///
/// Reads from JSON (the conflist) and YAML (a configuration file) alike, keys in camel case; what is left out
/// has the chart's default, what is unknown is refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "RawConfig", rename_all = "camelCase")]
pub struct SelectionConfig {
    /// Any of these enables a pod. An empty list enables none.
    pub enablement_selectors: Vec<EnablementSelector>,
    /// Pods of these namespaces are never in the mesh, whatever their labels. Sorted.
    pub excluded_namespaces: Vec<String>,
    /// Redirect DNS to the proxy where the pod does not say otherwise.
    pub dns_capture: bool,
    /// Redirect IPv6 too.
    pub ipv6: bool,
    /// Source address of the host's probes as pods see it, IPv4.
    pub probe_ipv4: Ipv4Addr,
    /// Source address of the host's probes as pods see it, IPv6.
    pub probe_ipv6: Ipv6Addr,
    /// Namespace of the control plane and of the proxy.
    pub system_namespace: String,
    /// The node agent's own pods; `None` when it does not run as a pod.
    pub own_pods: Option<OwnPods>,
}

impl Default for SelectionConfig {
    fn default() -> Self {
        Self {
            enablement_selectors: default_selectors(),
            excluded_namespaces: vec!["kube-system".into()],
            dns_capture: true,
            ipv6: true,
            probe_ipv4: Ipv4Addr::new(169, 254, 7, 127),
            probe_ipv6: Ipv6Addr::new(0xfd16, 0x9254, 0x7127, 0x1337, 0xffff, 0xffff, 0xffff, 0xffff),
            system_namespace: "istio-system".into(),
            own_pods: None,
        }
    }
}

/// In the mesh is a pod that is labelled so, and one of a namespace that is labelled so unless the pod opts out.
fn default_selectors() -> Vec<EnablementSelector> {
    vec![
        EnablementSelector {
            pod_selector: LabelSelector::label(DATAPLANE_MODE, "ambient"),
            namespace_selector: LabelSelector::default(),
        },
        EnablementSelector {
            pod_selector: LabelSelector::one(DATAPLANE_MODE, Operator::NotIn, "none"),
            namespace_selector: LabelSelector::label(DATAPLANE_MODE, "ambient"),
        },
    ]
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawConfig {
    enablement_selectors: Option<Vec<RawEntry>>,
    excluded_namespaces: Option<Vec<String>>,
    dns_capture: Option<bool>,
    ipv6: Option<bool>,
    probe_ipv4: Option<Ipv4Addr>,
    probe_ipv6: Option<Ipv6Addr>,
    system_namespace: Option<String>,
    own_pods: Option<OwnPods>,
}

impl TryFrom<RawConfig> for SelectionConfig {
    type Error = InvalidConfig;

    fn try_from(raw: RawConfig) -> Result<Self, InvalidConfig> {
        let default = Self::default();
        let enablement_selectors = match raw.enablement_selectors {
            None => default.enablement_selectors,
            Some(entries) => entries
                .into_iter()
                .enumerate()
                .map(|(index, raw)| {
                    EnablementSelector::compile(raw, &format!("enablementSelectors[{index}]."))
                })
                .collect::<Result<_, _>>()?,
        };
        let excluded_namespaces = match raw.excluded_namespaces {
            None => default.excluded_namespaces,
            Some(names) => clean_names(names.iter().map(String::as_str)),
        };
        let system_namespace = raw.system_namespace.unwrap_or(default.system_namespace);
        for name in &excluded_namespaces {
            check_namespace("excludedNamespaces", name)?;
        }
        check_namespace("systemNamespace", &system_namespace)?;
        if let Some(own) = &raw.own_pods {
            check_namespace("ownPods.namespace", &own.namespace)?;
            check_name("ownPods.daemonSet", &own.daemon_set)?;
        }
        Ok(Self {
            enablement_selectors,
            excluded_namespaces,
            dns_capture: raw.dns_capture.unwrap_or(default.dns_capture),
            ipv6: raw.ipv6.unwrap_or(default.ipv6),
            probe_ipv4: raw.probe_ipv4.unwrap_or(default.probe_ipv4),
            probe_ipv6: raw.probe_ipv6.unwrap_or(default.probe_ipv6),
            system_namespace,
            own_pods: raw.own_pods,
        })
    }
}

impl SelectionConfig {
    /// Whether pods of this namespace are kept out whatever their labels.
    pub fn excludes(&self, namespace: &str) -> bool {
        self.excluded_namespaces
            .iter()
            .any(|excluded| excluded == namespace)
    }

    /// Whether this is a pod of the node agent itself.
    pub fn is_own_pod(&self, namespace: &str, name: &str) -> bool {
        self.own_pods
            .as_ref()
            .is_some_and(|own| own.contains(namespace, name))
    }

    /// Whether this is the node's proxy: label `app=ztunnel` in the system namespace.
    pub fn is_proxy(&self, namespace: &str, labels: &Labels) -> bool {
        namespace == self.system_namespace && labels.get("app").is_some_and(|app| app == "ztunnel")
    }

    /// The selectors' own answer, without excluded namespaces and without the phase. For a deleted pod: if this
    /// holds it may have been enrolled without its status annotation ever having been seen.
    pub fn selectors_match(&self, pod: &PodView<'_>, namespace: Option<NamespaceView<'_>>) -> bool {
        let none = Labels::new();
        let namespace = namespace.map_or(&none, |view| view.labels);
        !pod.host_network
            && !pod.annotations.contains_key(SIDECAR_STATUS)
            && self.enablement_selectors.iter().any(|entry| {
                entry.namespace_selector.matches(namespace) && entry.pod_selector.matches(pod.labels)
            })
    }

    /// Whether the namespace as such is meant to be in the mesh: a non-empty namespace selector matches. For
    /// messages only; pods are decided by [`crate::select`].
    pub fn namespace_matches(&self, labels: &Labels) -> bool {
        self.enablement_selectors
            .iter()
            .any(|entry| !entry.namespace_selector.is_empty() && entry.namespace_selector.matches(labels))
    }

    /// Hash of what was configured, 16 hexadecimal digits: the same for equal configurations on every machine and in
    /// every version that knows the same fields. Detects difference, not tampering.
    pub fn hash(&self) -> String {
        // FNV-1a, 64 bit, over a text in which no two configurations look alike.
        let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
        for byte in self.canonical().bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        format!("{hash:016x}")
    }

    /// One line per value, each value quoted, so that none can run into the next.
    fn canonical(&self) -> String {
        let mut lines = vec!["selection/1".to_owned()];
        for (index, entry) in self.enablement_selectors.iter().enumerate() {
            lines.push(format!("entry {index}"));
            for (whose, selector) in [
                ("pod", &entry.pod_selector),
                ("namespace", &entry.namespace_selector),
            ] {
                lines.extend(selector.requirements().iter().map(|requirement| {
                    format!(
                        "{whose} {:?} {} {:?}",
                        requirement.key,
                        requirement.operator.as_str(),
                        requirement.values
                    )
                }));
            }
        }
        lines.push(format!("excluded {:?}", self.excluded_namespaces));
        lines.push(format!("dns {} ipv6 {}", self.dns_capture, self.ipv6));
        lines.push(format!("probe {} {}", self.probe_ipv4, self.probe_ipv6));
        lines.push(format!("system {:?}", self.system_namespace));
        if let Some(own) = &self.own_pods {
            lines.push(format!("own {:?} {:?}", own.namespace, own.daemon_set));
        }
        lines.join("\n")
    }
}

/// Reads a comma-separated list of namespaces: items trimmed, empty ones dropped.
pub fn parse_excluded_namespaces(list: &str) -> Vec<String> {
    clean_names(list.split(','))
}

fn clean_names<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut names: Vec<String> = names
        .map(str::trim)
        .filter(|name| !name.is_empty())
        .map(Into::into)
        .collect();
    names.sort();
    names.dedup();
    names
}

fn check_namespace(path: &str, name: &str) -> Result<(), InvalidConfig> {
    check(
        path,
        name,
        is_dns_label(name) && name.len() <= 63,
        "1 to 63 lower-case letters, digits and '-', not at the ends",
    )
}

fn check_name(path: &str, name: &str) -> Result<(), InvalidConfig> {
    check(
        path,
        name,
        is_dns_subdomain(name),
        "lower-case letters, digits, '-' and '.', at most 253 characters",
    )
}

fn check(path: &str, value: &str, valid: bool, allowed: &'static str) -> Result<(), InvalidConfig> {
    if valid {
        Ok(())
    } else {
        Err(InvalidConfig {
            path: path.into(),
            value: value.chars().take(128).collect(),
            allowed,
        })
    }
}

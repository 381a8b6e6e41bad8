//! Every setting does something: a value other than its default changes what is rendered.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::helm::{chart, rendered_text};

/// Another valid value of each setting that is no switch and no number, by the end of its path.
const OTHERS: &[(&str, &str)] = &[
    ("image.repository", "example.org/other"),
    ("image.tag", "other"),
    (
        "image.digest",
        "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    ),
    ("image.pullPolicy", "Always"),
    ("imagePullSecrets", "[0].name=registry"),
    ("profile", "enrolOnAdd"),
    ("resourceScope", "cluster"),
    ("platform", "k3s"),
    ("cni.binDir", "/srv/bin"),
    ("cni.binMount", "/opt/cni"),
    ("cni.confDir", "/srv/conf"),
    ("cni.netnsDir", "/run/other/netns"),
    ("cni.mode", "chained"),
    ("cni.ownedFileName", "00-sluice.conflist"),
    ("cni.primaryFileName", "10-net.conflist"),
    ("cni.whenPreempted", "chain"),
    ("cni.binDirCheck", "warn"),
    ("cni.runtimeConfig", "/etc/containerd/config.toml"),
    ("cni.staticPods", "refuse"),
    ("cni.pluginLogLevel", "debug"),
    (
        "selection.enablementSelectors",
        "[0].podSelector.matchLabels.mesh=yes",
    ),
    ("selection.excludedNamespaces", "{other}"),
    ("selection.systemNamespace", "mesh"),
    ("selection.probeIpv4", "169.254.7.128"),
    ("selection.probeIpv6", "fd00::1"),
    ("ztunnel.socketDir", "/run/other"),
    ("ztunnel.uids", "{7}"),
    ("takeover.socketDir", "/run/other-istio"),
    ("installer.capabilities", "{DAC_OVERRIDE}"),
    ("requests.cpu", "77m"),
    ("requests.memory", "77Mi"),
    ("limits.memory", "777Mi"),
    ("seccompProfile.type", "Localhost"),
    ("appArmorProfile", ".type=Unconfined"),
    ("appArmorProfile.type", "RuntimeDefault"),
    ("logLevel", "debug"),
    ("broker.address", "[::]"),
    ("seLinuxOptions", ".type=other_t"),
    ("daemonSetLabels", ".a=b"),
    ("podLabels", ".a=b"),
    ("podAnnotations", ".a=b"),
    ("nodeSelector.kubernetes\\.io/os", "other"),
    ("affinity", ".nodeAffinity.a=b"),
    ("tolerations", "[0].key=other"),
    ("priorityClassName", "other"),
    ("metrics.podMonitor.interval", "7s"),
    ("metrics.podMonitor.labels", ".a=b"),
    ("networkPolicy.egress", "[0].ports[0].port=443"),
];

/// What must be switched on for a setting to matter.
const NEEDS: &[(&str, &str)] = &[
    ("takeover.socketDir", "takeover.istioCni=true"),
    ("metrics.podMonitor.", "metrics.podMonitor.enabled=true"),
    ("networkPolicy.egress", "networkPolicy.enabled=true"),
    ("resourceQuota.pods", "resourceQuota.enabled=true"),
    ("openshift.", "platform=openshift"),
    (
        "seccompProfile.type",
        "%.seccompProfile.localhostProfile=own.json",
    ),
    ("updateStrategy.maxUnavailable", "updateStrategy.maxSurge=0"),
];

/// Exactly what these containers need; every other value is refused.
const FIXED: &[&str] = &[
    "executor.capabilities",
    "opener.capabilities",
    "broker.capabilities",
    "retire.capabilities",
];

/// Leaves of the values: a list, an empty map and whatever is no map.
fn leaves(values: &Value, path: &str, found: &mut BTreeMap<String, Value>) {
    match values.as_object() {
        Some(map) if !map.is_empty() => {
            for (key, value) in map {
                let key = key.replace('.', "\\.");
                let path = if path.is_empty() {
                    key
                } else {
                    format!("{path}.{key}")
                };
                leaves(value, &path, found);
            }
        }
        _ => drop(found.insert(path.to_owned(), values.clone())),
    }
}

/// The setting with another value, as helm takes it.
fn other(path: &str, default: &Value) -> String {
    if let Some(switch) = default.as_bool() {
        return format!("{path}={}", !switch);
    }
    if let Some(number) = default.as_u64() {
        return format!("{path}={}", number + 1);
    }
    // The most specific one.
    let known = OTHERS.iter().filter(|(end, _)| path.ends_with(end));
    let Some((_, value)) = known.max_by_key(|(end, _)| end.len()) else {
        panic!("{path}: no other value is known to this test")
    };
    let is_below = value.starts_with('.') || (value.starts_with('[') && value.contains('='));
    if is_below {
        format!("{path}{value}")
    } else {
        format!("{path}={value}")
    }
}

fn needs(path: &str) -> Vec<String> {
    let container = path.split('.').next().unwrap_or_default();
    NEEDS
        .iter()
        .filter(|(part, needed)| path.contains(part) && !needed.starts_with(&format!("{path}=")))
        .map(|(_, needed)| needed.replace('%', container))
        .collect()
}

#[test]
fn every_setting_changes_something() {
    let text = std::fs::read_to_string(chart().join("values.yaml")).unwrap();
    let values: Value = serde_saphyr::from_str(&text).unwrap();
    let mut settings = BTreeMap::new();
    leaves(&values, "", &mut settings);
    assert!(settings.len() > 80, "{}", settings.len());
    let mut idle = Vec::new();
    for (path, default) in settings
        .iter()
        .filter(|(path, _)| !FIXED.contains(&path.as_str()))
    {
        let changed = other(path, default);
        let needs = needs(path);
        let with: Vec<&str> = needs
            .iter()
            .map(String::as_str)
            .chain([changed.as_str()])
            .collect();
        // Refused without the change, so part of it: the name of a profile where the profile is the runtime's, and two zeros.
        let without: Vec<&str> = needs
            .iter()
            .map(String::as_str)
            .filter(|needed| !needed.contains("seccompProfile") && !needed.contains("updateStrategy"))
            .collect();
        if rendered_text(&without) == rendered_text(&with) {
            idle.push(changed);
        }
    }
    assert!(idle.is_empty(), "these change nothing: {idle:#?}");
}

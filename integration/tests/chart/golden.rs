//! The whole output for the settings that people use: a change of the chart shows as a diff in review.

use crate::helm::{rendered_text, repository};

fn compare(name: &str, set: &[&str]) {
    let path = repository().join(format!("integration/tests/chart/golden/{name}.yaml"));
    let text = rendered_text(set);
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, text).unwrap();
        return;
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        text == expected,
        "{name} is not what {} has; BLESS=1 rewrites it. Now it is:\n{text}",
        path.display()
    );
}

#[test]
fn default_profile() {
    compare("default", &[]);
}

#[test]
fn profile_without_opener() {
    compare("enrol-on-add", &["profile=enrolOnAdd"]);
}

#[test]
fn openshift() {
    compare("openshift", &["platform=openshift"]);
}

#[test]
fn everything_switched_on() {
    compare(
        "everything",
        &[
            "platform=gke",
            "takeover.istioCni=true",
            "ztunnel.required=true",
            "metrics.podMonitor.enabled=true",
            "networkPolicy.enabled=true",
            "cni.groupRead=true",
            "cni.staticPods=refuse",
            "imagePullSecrets[0].name=registry",
            "selection.ipv6=false",
            "selection.enablementSelectors[0].namespaceSelector.matchLabels.mesh=yes",
        ],
    );
}

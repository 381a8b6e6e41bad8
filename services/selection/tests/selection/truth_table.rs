//! Who is in the mesh: the table of the default selectors, and each rule around them.

use serde_json::json;
use sluice_selection::{Labels, Mode, NamespaceView, Phase, PodView, SelectionConfig, Verdict, select};

use crate::{MODE, config};

#[derive(Default, Clone)]
struct Case {
    namespace: Labels,
    labels: Labels,
    annotations: Labels,
    host_network: bool,
    namespace_name: Option<&'static str>,
    phase: Option<Phase>,
}

impl Case {
    fn new(namespace_mode: Option<&str>, pod_mode: Option<&str>) -> Self {
        let labels = |mode: Option<&str>| {
            mode.map(|mode| (MODE.to_owned(), mode.to_owned()))
                .into_iter()
                .collect()
        };
        Self {
            namespace: labels(namespace_mode),
            labels: labels(pod_mode),
            ..Self::default()
        }
    }

    fn annotated(mut self, key: &str, value: &str) -> Self {
        self.annotations.insert(key.into(), value.into());
        self
    }

    fn pod(&self) -> PodView<'_> {
        PodView {
            namespace: self.namespace_name.unwrap_or("shop"),
            name: "web-0",
            labels: &self.labels,
            annotations: &self.annotations,
            host_network: self.host_network,
            phase: self.phase,
        }
    }

    fn verdict(&self, config: &SelectionConfig) -> Verdict {
        select(
            config,
            &self.pod(),
            Some(NamespaceView {
                labels: &self.namespace,
            }),
        )
    }

    fn is_in(&self, config: &SelectionConfig) -> bool {
        self.verdict(config).is_in()
    }
}

#[test]
fn default_selectors_follow_the_truth_table() {
    let config = SelectionConfig::default();
    let host = |case: Case| Case {
        host_network: true,
        ..case
    };
    let sidecar = |case: Case| case.annotated("sidecar.istio.io/status", "{}");
    let excluded = |case: Case| Case {
        namespace_name: Some("kube-system"),
        ..case
    };
    let plain = |namespace, pod| Case::new(namespace, pod);
    let table = [
        (plain(Some("ambient"), None), true),
        (plain(None, Some("ambient")), true),
        (plain(Some("ambient"), Some("ambient")), true),
        (plain(None, None), false),
        (plain(Some("ambient"), Some("none")), false),
        (plain(Some("ambient"), Some("foo")), true),
        (plain(None, Some("none")), false),
        (plain(None, Some("foo")), false),
        (plain(Some("Ambient"), None), false),
        (host(plain(Some("ambient"), Some("ambient"))), false),
        (sidecar(plain(Some("ambient"), Some("ambient"))), false),
        (
            plain(Some("ambient"), None).annotated("sidecar.istio.io/status", ""),
            false,
        ),
        (excluded(plain(Some("ambient"), Some("ambient"))), false),
    ];
    for (row, (case, expected)) in table.iter().enumerate() {
        let verdict = case.verdict(&config);
        assert_eq!(verdict.is_in(), *expected, "row {row}: {}", verdict.reason);
        let deciding = verdict.steps.iter().filter(|step| step.decides).count();
        assert_eq!(
            deciding, 1,
            "row {row}: exactly one step decides: {:?}",
            verdict.steps
        );
        assert!(verdict.steps.last().unwrap().decides);
    }
}

#[test]
fn reasons_name_what_decided() {
    let config = SelectionConfig::default();
    let reason = |case: Case| case.verdict(&config).reason.to_string();
    assert_eq!(
        reason(Case::new(Some("ambient"), None)),
        "namespace label istio.io/dataplane-mode=ambient (selector 2)"
    );
    assert_eq!(
        reason(Case::new(None, Some("ambient"))),
        "pod label istio.io/dataplane-mode=ambient (selector 1)"
    );
    assert_eq!(
        reason(Case::new(Some("ambient"), Some("none"))),
        "pod label istio.io/dataplane-mode=none keeps the pod out: selector 2 requires istio.io/dataplane-mode notin (none)"
    );
    assert_eq!(
        reason(Case::new(None, None)),
        "no enablement selector matches: selector 1 requires pod label istio.io/dataplane-mode=ambient, \
         found no pod label istio.io/dataplane-mode; selector 2 requires namespace label \
         istio.io/dataplane-mode=ambient, found no namespace label istio.io/dataplane-mode"
    );
    assert_eq!(
        reason(Case {
            namespace_name: Some("kube-system"),
            ..Case::default()
        }),
        "namespace kube-system is excluded by configuration"
    );
    assert_eq!(
        reason(Case {
            host_network: true,
            ..Case::default()
        }),
        "the pod uses the host's network (spec.hostNetwork)"
    );
    assert_eq!(
        reason(Case::default().annotated("sidecar.istio.io/status", "")),
        "the pod has a sidecar (annotation sidecar.istio.io/status)"
    );
    assert_eq!(
        reason(Case {
            phase: Some(Phase::Succeeded),
            ..Case::new(Some("ambient"), None)
        }),
        "the pod has ended (phase Succeeded)"
    );
}

#[test]
fn a_verdict_serialises_for_tools() {
    let verdict = Case::new(Some("ambient"), None).verdict(&SelectionConfig::default());
    let value = serde_json::to_value(&verdict).unwrap();
    assert_eq!(value["mode"], "in");
    assert_eq!(
        value["reason"],
        "namespace label istio.io/dataplane-mode=ambient (selector 2)"
    );
    assert_eq!(value["steps"][0]["check"], "excluded namespaces");
}

#[test]
fn names_status_and_injection_annotations_do_not_decide() {
    let config = SelectionConfig::default();
    for (key, value) in [
        ("ambient.istio.io/redirection", "enabled"),
        ("ambient.istio.io/redirection", "disabled"),
        ("sidecar.istio.io/inject", "true"),
    ] {
        assert!(
            Case::new(Some("ambient"), None)
                .annotated(key, value)
                .is_in(&config),
            "{key}"
        );
        assert!(
            !Case::new(None, None).annotated(key, value).is_in(&config),
            "{key}"
        );
    }
}

#[test]
fn an_ended_pod_is_out_and_a_pod_being_added_has_no_phase() {
    let config = SelectionConfig::default();
    let with = |phase| Case {
        phase,
        ..Case::new(Some("ambient"), None)
    };
    for phase in ["Failed", "Succeeded"] {
        assert!(!with(Some(Phase::parse(phase))).is_in(&config));
    }
    for phase in [
        None,
        Some(Phase::Pending),
        Some(Phase::Running),
        Some(Phase::parse("")),
        Some(Phase::parse("?")),
    ] {
        assert!(with(phase).is_in(&config), "{phase:?}");
    }
}

#[test]
fn no_selector_selects_nothing() {
    let config = config(json!({"enablementSelectors": []}));
    let verdict = Case::new(Some("ambient"), Some("ambient")).verdict(&config);
    assert_eq!(verdict.mode, Mode::Out);
    assert_eq!(verdict.reason.to_string(), "no enablement selector is configured");
}

#[test]
fn an_empty_entry_selects_every_pod_that_no_rule_rejects() {
    for entry in [
        json!({}),
        json!({"podSelector": {}, "namespaceSelector": null}),
        json!({"podSelector": {"matchLabels": {}}}),
    ] {
        let config = config(json!({"enablementSelectors": [entry]}));
        assert!(Case::default().is_in(&config));
        assert!(Case::new(None, Some("none")).is_in(&config));
        assert!(
            !Case {
                host_network: true,
                ..Case::default()
            }
            .is_in(&config)
        );
        assert!(
            !Case::default()
                .annotated("sidecar.istio.io/status", "")
                .is_in(&config)
        );
        assert!(
            !Case {
                namespace_name: Some("kube-system"),
                ..Case::default()
            }
            .is_in(&config)
        );
    }
}

#[test]
fn excluded_namespaces_put_out_what_the_selectors_match() {
    let config = config(json!({"excludedNamespaces": [" legacy ", "", "legacy"]}));
    assert_eq!(config.excluded_namespaces, ["legacy"]);
    let case = Case {
        namespace_name: Some("legacy"),
        ..Case::new(Some("ambient"), None)
    };
    assert!(!case.is_in(&config));
    // A deleted pod is cleaned up all the same.
    assert!(config.selectors_match(
        &case.pod(),
        Some(NamespaceView {
            labels: &case.namespace
        })
    ));
}

#[test]
fn an_unknown_namespace_has_no_labels_and_the_verdict_says_so() {
    let case = Case::new(None, None);
    let verdict = select(&SelectionConfig::default(), &case.pod(), None);
    assert_eq!(verdict.mode, Mode::Out);
    assert!(
        verdict
            .steps
            .iter()
            .any(|step| step.observed.contains("nothing known of shop"))
    );
}

//! Who is in the mesh: the table of the default selectors, and each rule around them.

use serde_json::{Value, json};
use sluice_selection::{
    EnablementSelector, Labels, Mode, NamespaceView, Overrides, OwnPods, Phase, PodView, SelectionConfig,
    Verdict, is_static_uid, parse_excluded_namespaces, sandbox_uid, select,
};

const MODE: &str = "istio.io/dataplane-mode";

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

#[expect(clippy::unwrap_used, reason = "a configuration of the tests' own")]
fn config(value: Value) -> SelectionConfig {
    serde_json::from_value(value).unwrap()
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
fn the_namespace_predicate_ignores_entries_without_namespace_selector() {
    let namespace = Labels::from([(MODE.to_owned(), "ambient".to_owned())]);
    assert!(SelectionConfig::default().namespace_matches(&namespace));
    assert!(!SelectionConfig::default().namespace_matches(&Labels::new()));
    let pods_only =
        config(json!({"enablementSelectors": [{"podSelector": {"matchLabels": {MODE: "ambient"}}}, {}]}));
    assert!(!pods_only.namespace_matches(&namespace));
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
fn exclusion_lists_are_trimmed_and_empty_items_dropped() {
    assert_eq!(parse_excluded_namespaces(" a ,,b,"), ["a", "b"]);
    assert_eq!(
        parse_excluded_namespaces(" kube-system , istio-system "),
        ["istio-system", "kube-system"]
    );
    for empty in ["", "  ", ",,"] {
        assert!(parse_excluded_namespaces(empty).is_empty(), "{empty:?}");
    }
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

#[test]
fn invalid_selectors_are_refused_with_their_place() {
    let entry = |expression: Value| json!({"enablementSelectors": [{}, {"podSelector": {"matchExpressions": [expression]}}]});
    for (value, expected) in [
        (
            entry(json!({"key": "a", "operator": "Equals", "values": ["b"]})),
            "enablementSelectors[1].podSelector.matchExpressions[0].operator: \"Equals\" is not valid: one of In, NotIn, Exists, DoesNotExist",
        ),
        (
            entry(json!({"key": "a", "operator": "In", "values": []})),
            "enablementSelectors[1].podSelector.matchExpressions[0].values: \"\" is not valid: at least one value",
        ),
        (
            entry(json!({"key": "a", "operator": "Exists", "values": ["b"]})),
            "no values with Exists and DoesNotExist",
        ),
        (
            entry(json!({"key": "a b", "operator": "Exists"})),
            "matchExpressions[0].key: \"a b\" is not valid",
        ),
        (
            entry(json!({"key": "a", "operator": "In", "values": ["b c"]})),
            "matchExpressions[0].values[0]: \"b c\"",
        ),
        (
            json!({"enablementSelectors": [{"namespaceSelector": {"matchLabels": {"A/b": "c"}}}]}),
            "matchLabels.A/b",
        ),
        (
            json!({"enablementSelectors": [{"podselector": {}}]}),
            "unknown field `podselector`",
        ),
        (
            json!({"excludedNamespaces": ["a b"]}),
            "excludedNamespaces: \"a b\" is not valid: 1 to 63 lower-case",
        ),
        (json!({"dnscapture": true}), "unknown field `dnscapture`"),
        (json!({"probeIpv4": "::1"}), "invalid IPv4 address"),
    ] {
        let error = serde_json::from_value::<SelectionConfig>(value)
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{error}\nexpected: {expected}");
    }
}

#[test]
fn the_charts_selectors_written_out_equal_the_default() {
    let written: Vec<EnablementSelector> = serde_json::from_value(json!([
        {"podSelector": {"matchLabels": {MODE: "ambient"}}},
        {"podSelector": {"matchExpressions": [{"key": MODE, "operator": "NotIn", "values": ["none"]}]},
         "namespaceSelector": {"matchLabels": {MODE: "ambient"}}},
    ]))
    .unwrap();
    assert_eq!(written, SelectionConfig::default().enablement_selectors);
}

#[test]
fn equal_configurations_hash_alike_and_different_ones_do_not() {
    let default = SelectionConfig::default();
    assert_eq!(default.hash(), config(json!({})).hash());
    // Fixed: a plugin and a broker of different builds must agree.
    assert_eq!(default.hash(), "1bb36f973b578776");
    let round_trip = serde_json::to_value(&default).unwrap();
    assert_eq!(config(round_trip).hash(), default.hash());
    assert_eq!(
        config(json!({"excludedNamespaces": ["a", "b"]})).hash(),
        config(json!({"excludedNamespaces": ["b", "a"]})).hash()
    );
    let others = [
        json!({"enablementSelectors": []}),
        json!({"enablementSelectors": [{}]}),
        json!({"enablementSelectors": [{"podSelector": {"matchLabels": {"a": "b"}}}]}),
        json!({"enablementSelectors": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]}),
        json!({"excludedNamespaces": []}),
        json!({"excludedNamespaces": ["a", "b"]}),
        json!({"excludedNamespaces": ["a-b"]}),
        json!({"dnsCapture": false}),
        json!({"ipv6": false}),
        json!({"probeIpv4": "169.254.7.128"}),
        json!({"systemNamespace": "mesh"}),
        json!({"ownPods": {"namespace": "mesh", "daemonSet": "sluice"}}),
    ];
    let mut hashes: Vec<String> = others.into_iter().map(|value| config(value).hash()).collect();
    hashes.push(default.hash());
    let count = hashes.len();
    hashes.sort();
    hashes.dedup();
    assert_eq!(hashes.len(), count);
}

fn overrides(pairs: &[(&str, &str)]) -> Overrides<String> {
    Overrides::parse(
        &pairs
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect(),
    )
}

#[test]
fn boolean_annotations_take_exactly_the_documented_words() {
    const DNS: &str = "ambient.istio.io/dns-capture";
    for (words, expected) in [
        (["1", "t", "T", "TRUE", "true", "True"], true),
        (["0", "f", "F", "FALSE", "false", "False"], false),
    ] {
        for word in words {
            let parsed = overrides(&[(DNS, word), ("ambient.istio.io/bypass-inbound-capture", word)]);
            assert_eq!(parsed.dns_capture, Some(expected), "{word}");
            assert_eq!(parsed.bypass_inbound_capture, expected, "{word}");
            assert!(parsed.warnings.is_empty());
        }
    }
    for word in ["yes", "tweedledum", "", " true", "tRUE", "on"] {
        let parsed = overrides(&[(DNS, word)]);
        assert_eq!(parsed.dns_capture, None, "{word}");
        assert_eq!(parsed.warnings.len(), 1, "{word}");
        assert!(
            parsed.warnings[0]
                .to_string()
                .starts_with("annotation ambient.istio.io/dns-capture: ")
        );
    }
    let absent = overrides(&[]);
    assert_eq!((absent.dns_capture, absent.bypass_inbound_capture), (None, false));
}

/// Stands for the type that checks interface names.
#[derive(Debug, PartialEq)]
struct Short(String);

impl std::str::FromStr for Short {
    type Err = &'static str;
    fn from_str(name: &str) -> Result<Self, &'static str> {
        if name.len() <= 15 && !name.contains(' ') {
            Ok(Self(name.into()))
        } else {
            Err("at most 15 characters")
        }
    }
}

#[test]
fn interface_lists_keep_order_and_report_what_they_drop() {
    const KEY: &str = "istio.io/reroute-virtual-interfaces";
    assert_eq!(
        overrides(&[(KEY, "en0ps1, en1ps1")]).virtual_interfaces,
        ["en0ps1", "en1ps1"]
    );
    assert_eq!(overrides(&[(KEY, "x,   ")]).virtual_interfaces, ["x"]);
    assert_eq!(overrides(&[(KEY, "b,a,b")]).virtual_interfaces, ["b", "a"]);

    let annotations = Labels::from([(KEY.to_owned(), "eth1, eth0; flush ruleset, eth2".to_owned())]);
    let parsed = Overrides::<Short>::parse(&annotations);
    assert_eq!(
        parsed.virtual_interfaces,
        [Short("eth1".into()), Short("eth2".into())]
    );
    assert_eq!(
        parsed.warnings[0].to_string(),
        "annotation istio.io/reroute-virtual-interfaces: \"eth0; flush ruleset\" is ignored: at most 15 characters"
    );

    let many: Vec<String> = (0..1000).map(|i| format!("eth{i}")).collect();
    let parsed = overrides(&[(KEY, &many.join(","))]);
    assert_eq!((parsed.virtual_interfaces.len(), parsed.warnings.len()), (16, 1));
    let hostile = Labels::from([(KEY.to_owned(), "a b,".repeat(10_000))]);
    assert!(Overrides::<Short>::parse(&hostile).warnings.len() <= 16);
}

#[test]
fn own_pods_have_the_daemon_sets_name_and_its_suffix() {
    let own = OwnPods {
        namespace: "mesh".into(),
        daemon_set: "sluice-node".into(),
    };
    for name in ["sluice-node-abcde", "sluice-node-x7k2p", "sluice-node-00000"] {
        assert!(own.contains("mesh", name), "{name}");
    }
    for name in [
        "sluice-node-",
        "sluice-node-abcd",
        "sluice-node-abcdef",
        "sluice-node-ABCDE",
        "sluice-node-ab-de",
        "sluice-nodeabcde",
        "xsluice-node-abcde",
        "sluice-node-évil",
        "sluice-node-x-abcde",
        "",
    ] {
        assert!(!own.contains("mesh", name), "{name}");
    }
    assert!(!own.contains("other", "sluice-node-abcde"));
    assert!(!SelectionConfig::default().is_own_pod("mesh", "sluice-node-abcde"));
    let config = SelectionConfig {
        own_pods: Some(own),
        ..SelectionConfig::default()
    };
    assert!(config.is_own_pod("mesh", "sluice-node-abcde"));
}

#[test]
fn the_proxy_is_known_by_namespace_and_label() {
    let config = SelectionConfig::default();
    let labels = Labels::from([("app".to_owned(), "ztunnel".to_owned())]);
    assert!(config.is_proxy("istio-system", &labels));
    assert!(!config.is_proxy("shop", &labels));
    assert!(!config.is_proxy("istio-system", &Labels::new()));
}

#[test]
fn a_mirror_pod_is_known_to_the_runtime_by_its_hash() {
    const UID: &str = "3f1c3d1e-6f4e-4a58-9f3e-0d4f3f0a1b2c";
    const HASH: &str = "0123456789abcdef0123456789abcdef";
    let with = |key: &str, value: &str| Labels::from([(key.to_owned(), value.to_owned())]);
    assert_eq!(sandbox_uid(UID, &with("kubernetes.io/config.mirror", HASH)), HASH);
    assert_eq!(
        sandbox_uid(UID, &with("kubernetes.io/config.mirror", "another-pods-uid")),
        UID
    );
    assert_eq!(sandbox_uid(UID, &Labels::new()), UID);
    assert!(is_static_uid(HASH));
    for uid in [UID, "", "0123456789ABCDEF0123456789ABCDEF", &HASH[1..]] {
        assert!(!is_static_uid(uid), "{uid}");
    }
}

//! The configuration: what is refused, what is equal.

use serde_json::{Value, json};
use sluice_selection::{EnablementSelector, Labels, SelectionConfig, parse_excluded_namespaces};

use crate::{MODE, config};

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

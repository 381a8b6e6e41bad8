//! Selection against a naive model, and against anything a pod's author can write.

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use serde_json::json;
use sluice_selection::{
    LabelSelector, Labels, NamespaceView, Overrides, Phase, PodView, SelectionConfig, sandbox_uid, select,
};

/// Few keys and values, so that they meet.
fn key() -> impl Strategy<Value = String> {
    prop::sample::select(vec!["a", "b", "istio.io/dataplane-mode"]).prop_map(Into::into)
}

fn value() -> impl Strategy<Value = String> {
    prop::sample::select(vec!["", "x", "y", "ambient", "none"]).prop_map(Into::into)
}

fn labels() -> impl Strategy<Value = Labels> {
    btree_map(key(), value(), 0..4)
}

#[derive(Debug, Clone)]
struct Expression {
    key: String,
    operator: &'static str,
    values: Vec<String>,
}

fn expression() -> impl Strategy<Value = Expression> {
    (
        key(),
        prop::sample::select(vec!["In", "NotIn", "Exists", "DoesNotExist"]),
        vec(value(), 1..4),
    )
        .prop_map(|(key, operator, values)| {
            let values = if operator.ends_with("In") { values } else { vec![] };
            Expression {
                key,
                operator,
                values,
            }
        })
}

#[derive(Debug, Clone)]
struct Selector {
    match_labels: Labels,
    expressions: Vec<Expression>,
}

impl Selector {
    fn to_json(&self) -> serde_json::Value {
        let expressions: Vec<_> = self
            .expressions
            .iter()
            .map(|e| json!({"key": e.key, "operator": e.operator, "values": e.values}))
            .collect();
        json!({"matchLabels": self.match_labels, "matchExpressions": expressions})
    }

    /// The semantics as the Kubernetes documentation words them.
    fn model(&self, labels: &Labels) -> bool {
        let pairs: Vec<(&str, &str)> = labels.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        let mut all = true;
        for (key, value) in &self.match_labels {
            all &= pairs.contains(&(key.as_str(), value.as_str()));
        }
        for e in &self.expressions {
            let present = pairs.iter().any(|(k, _)| *k == e.key);
            let listed = e
                .values
                .iter()
                .any(|v| pairs.contains(&(e.key.as_str(), v.as_str())));
            all &= match e.operator {
                "In" => present && listed,
                "NotIn" => !present || !listed,
                "Exists" => present,
                _ => !present,
            };
        }
        all
    }
}

fn selector() -> impl Strategy<Value = Selector> {
    (btree_map(key(), value(), 0..2), vec(expression(), 0..3)).prop_map(|(match_labels, expressions)| {
        Selector {
            match_labels,
            expressions,
        }
    })
}

/// Any text, and the texts that mean something.
fn text() -> impl Strategy<Value = String> {
    prop_oneof![".{0,40}", "[a-z0-9,;# \"{}]{0,40}", Just("true".to_owned())]
}

fn annotations() -> impl Strategy<Value = Labels> {
    let keys = prop::sample::select(vec![
        "ambient.istio.io/bypass-inbound-capture",
        "ambient.istio.io/dns-capture",
        "istio.io/reroute-virtual-interfaces",
        "kubernetes.io/config.mirror",
        "sidecar.istio.io/status",
        "other",
    ]);
    btree_map(keys.prop_map(Into::into), text(), 0..5)
}

proptest! {
    #[test]
    fn selectors_match_as_the_naive_model(selector in selector(), labels in labels()) {
        let parsed: LabelSelector = serde_json::from_value(selector.to_json()).unwrap();
        prop_assert_eq!(parsed.matches(&labels), selector.model(&labels));
        let again: LabelSelector = serde_json::from_value(serde_json::to_value(&parsed).unwrap()).unwrap();
        prop_assert_eq!(again, parsed);
    }

    #[test]
    fn entries_are_or_and_their_halves_and(
        entries in vec((selector(), selector()), 0..4), pod in labels(), namespace in labels(), host_network: bool,
    ) {
        let list: Vec<_> = entries
            .iter()
            .map(|(pod, namespace)| json!({"podSelector": pod.to_json(), "namespaceSelector": namespace.to_json()}))
            .collect();
        let config: SelectionConfig = serde_json::from_value(json!({"enablementSelectors": list})).unwrap();
        let none = Labels::new();
        let view = PodView {
            namespace: "n", name: "p", labels: &pod, annotations: &none, host_network, phase: Some(Phase::Running),
        };
        let namespace_view = Some(NamespaceView { labels: &namespace });
        let expected = !host_network && entries.iter().any(|(p, n)| p.model(&pod) && n.model(&namespace));
        prop_assert_eq!(select(&config, &view, namespace_view).is_in(), expected);
        prop_assert_eq!(config.selectors_match(&view, namespace_view), expected);
    }

    #[test]
    fn nothing_a_pods_author_writes_panics(
        namespace in ".*", name in ".*", labels in btree_map(".*", ".*", 0..4), annotations in annotations(),
        host_network: bool, phase in ".*", known: bool,
    ) {
        let config = SelectionConfig::default();
        let view = PodView {
            namespace: &namespace, name: &name, labels: &labels, annotations: &annotations, host_network,
            phase: Some(Phase::parse(&phase)),
        };
        let verdict = select(&config, &view, known.then_some(NamespaceView { labels: &labels }));
        prop_assert!(!verdict.reason.to_string().is_empty());
        let overrides = Overrides::<std::net::IpAddr>::parse(&annotations);
        prop_assert!(overrides.virtual_interfaces.len() <= 16);
        let _ = sandbox_uid("uid", &annotations);
        let _ = config.is_own_pod(&namespace, &name);
    }

    #[test]
    fn configuration_text_never_panics(text in ".*") {
        let _ = serde_json::from_str::<SelectionConfig>(&text);
        let _ = serde_json::from_value::<LabelSelector>(json!({"matchLabels": {&text: &text}}));
    }
}

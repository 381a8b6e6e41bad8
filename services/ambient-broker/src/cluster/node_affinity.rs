//! Whether a pod template accepts a node: `nodeSelector` and required node affinity (Kubernetes documentation,
//! "Assigning Pods to Nodes"). Taints and preferences do not decide this.

use std::collections::BTreeMap;

use serde::Deserialize;
use sluice_selection::Labels;

/// `spec.affinity`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Affinity {
    #[serde(default)]
    node_affinity: Option<NodeAffinity>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct NodeAffinity {
    #[serde(default)]
    required_during_scheduling_ignored_during_execution: Option<NodeSelector>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct NodeSelector {
    #[serde(default)]
    node_selector_terms: Vec<Term>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Term {
    #[serde(default)]
    match_expressions: Option<Vec<Requirement>>,
    #[serde(default)]
    match_fields: Option<Vec<Requirement>>,
}

#[derive(Debug, Clone, Deserialize)]
struct Requirement {
    key: String,
    operator: String,
    #[serde(default)]
    values: Option<Vec<String>>,
}

/// Why a node is not accepted, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unwanted(pub(super) String);

impl Affinity {
    /// Whether there is a required node affinity at all.
    pub(super) fn is_required(&self) -> bool {
        self.required().is_some()
    }

    fn required(&self) -> Option<&NodeSelector> {
        self.node_affinity
            .as_ref()?
            .required_during_scheduling_ignored_during_execution
            .as_ref()
    }

    /// Why the node is not accepted; `None`: it is.
    pub(super) fn unwanted(
        affinity: Option<&Self>,
        selector: &BTreeMap<String, String>,
        node: &str,
        labels: &Labels,
    ) -> Option<Unwanted> {
        let missing = selector
            .iter()
            .find(|(key, value)| labels.get(*key) != Some(value));
        if let Some((key, value)) = missing {
            return Some(Unwanted(format!("nodeSelector requires label {key}={value}")));
        }
        let required = affinity.and_then(Self::required)?;
        let accepted = required
            .node_selector_terms
            .iter()
            .any(|term| term.accepts(node, labels));
        (!accepted).then(|| Unwanted("its required node affinity does not match".into()))
    }
}

impl Term {
    fn accepts(&self, node: &str, labels: &Labels) -> bool {
        let expressions = self.match_expressions.as_deref().unwrap_or_default();
        let fields = self.match_fields.as_deref().unwrap_or_default();
        // A term without any requirement matches nothing.
        if expressions.is_empty() && fields.is_empty() {
            return false;
        }
        let field = |key: &str| (key == "metadata.name").then_some(node);
        expressions
            .iter()
            .all(|r| r.met(labels.get(&r.key).map(String::as_str)))
            && fields.iter().all(|r| r.met(field(&r.key)))
    }
}

impl Requirement {
    fn met(&self, found: Option<&str>) -> bool {
        let values = self.values.as_deref().unwrap_or_default();
        let listed = found.is_some_and(|found| values.iter().any(|value| value == found));
        let number = |text: Option<&str>| text?.parse::<i64>().ok();
        let bound = number(values.first().map(String::as_str));
        match self.operator.as_str() {
            "In" => listed,
            "NotIn" => !listed,
            "Exists" => found.is_some(),
            "DoesNotExist" => found.is_none(),
            "Gt" => number(found)
                .zip(bound)
                .is_some_and(|(found, bound)| found > bound),
            "Lt" => number(found)
                .zip(bound)
                .is_some_and(|(found, bound)| found < bound),
            // One that a later version of Kubernetes has: the scheduler knew it, and put the pod here.
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unwanted(terms: &serde_json::Value) -> bool {
        let affinity: Affinity = serde_json::from_value(serde_json::json!({"nodeAffinity":
            {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}))
        .unwrap();
        let labels = [("zone", "a"), ("cores", "8")];
        let labels = labels
            .into_iter()
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .collect();
        Affinity::unwanted(Some(&affinity), &BTreeMap::new(), "n1", &labels).is_some()
    }

    #[test]
    fn operators_mean_what_kubernetes_documents() {
        let one = |key: &str, operator: &str, values: &[&str]| {
            unwanted(
                &serde_json::json!([{"matchExpressions": [{"key": key, "operator": operator, "values": values}]}]),
            )
        };
        assert!(!one("zone", "In", &["a", "b"]) && one("zone", "In", &["b"]) && one("none", "In", &["b"]));
        assert!(!one("none", "NotIn", &["b"]) && one("zone", "NotIn", &["a"]));
        assert!(!one("zone", "Exists", &[]) && one("none", "Exists", &[]));
        assert!(!one("none", "DoesNotExist", &[]) && one("zone", "DoesNotExist", &[]));
        assert!(!one("cores", "Gt", &["4"]) && one("cores", "Gt", &["8"]) && one("zone", "Gt", &["1"]));
        assert!(!one("cores", "Lt", &["9"]) && one("cores", "Lt", &["8"]));
    }

    #[test]
    fn terms_are_alternatives_and_an_empty_one_is_none() {
        let never =
            serde_json::json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["z"]}]});
        let name = serde_json::json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]});
        assert!(!unwanted(&serde_json::json!([never, name])));
        assert!(unwanted(&serde_json::json!([never])));
        assert!(unwanted(&serde_json::json!([{}])));
        let other = serde_json::json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]});
        assert!(unwanted(&serde_json::json!([other])));
    }
}

//! The roles of the chart allow what is asked for, and nothing else.

use std::collections::BTreeSet;

use serde::Deserialize;

use super::api::{Api, Seen};
use super::*;
use sluice_ambient_broker::lifecycle::NodeFacts;
use sluice_ambient_broker::status::StatusWriter;

/// The chart with its default values, as its own tests keep it.
const CHART: &str = include_str!("../../../../integration/tests/chart/golden/default.yaml");

/// API group, resource, verb, and the one name that is meant where it is known.
type Permission = (String, String, String, Option<String>);

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    kind: String,
    #[serde(default)]
    metadata: Named,
    #[serde(default)]
    rules: Vec<Rule>,
}

#[derive(Default, Deserialize)]
struct Named {
    #[serde(default)]
    name: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Rule {
    api_groups: Vec<String>,
    resources: Vec<String>,
    verbs: Vec<String>,
    #[serde(default)]
    resource_names: Vec<String>,
}

/// What the chart's ClusterRole and Role of the broker allow.
fn allowed() -> BTreeSet<Permission> {
    let mut allowed = BTreeSet::new();
    let documents = CHART.split("\n---\n").filter(|text| text.contains("\nrules:"));
    for document in documents {
        let manifest: Manifest = serde_saphyr::from_str(document).unwrap();
        let ours = matches!(manifest.kind.as_str(), "Role" | "ClusterRole")
            && manifest.metadata.name == "sluice-node";
        for rule in manifest.rules.into_iter().filter(|_| ours) {
            for group in &rule.api_groups {
                for resource in &rule.resources {
                    let name = rule.resource_names.first();
                    let permission =
                        |verb: &String| (group.clone(), resource.clone(), verb.clone(), name.cloned());
                    allowed.extend(rule.verbs.iter().map(permission));
                }
            }
        }
    }
    allowed
}

/// A request as the authorizer sees it (Kubernetes documentation, "Authorization").
fn permission(seen: &Seen) -> Permission {
    let parts: Vec<&str> = seen.path.trim_start_matches('/').split('/').collect();
    let (group, mut rest) = match parts.as_slice() {
        ["api", _, rest @ ..] => ("", rest),
        ["apis", group, _, rest @ ..] => (*group, rest),
        other => panic!("{other:?}"),
    };
    if let ["namespaces", _, below @ ..] = rest
        && !below.is_empty()
    {
        rest = below;
    }
    let (resource, name) = match rest {
        [resource] => ((*resource).to_owned(), None),
        [resource, name] => ((*resource).to_owned(), Some(*name)),
        [resource, name, sub] => (format!("{resource}/{sub}"), Some(*name)),
        other => panic!("{other:?}"),
    };
    let verb = match (seen.method.as_str(), name) {
        ("GET", None) if seen.is_watch() => "watch",
        ("GET", None) => "list",
        ("GET", Some(_)) => "get",
        ("POST", _) => "create",
        ("PATCH", _) => "patch",
        other => panic!("{other:?}"),
    };
    let named = seen
        .query
        .split("fieldSelector=metadata.name%3D")
        .nth(1)
        .and_then(|rest| rest.split('&').next());
    let name = name
        .or(named)
        .filter(|_| matches!(resource.as_str(), "daemonsets" | "serviceaccounts/token"));
    (
        group.to_owned(),
        resource,
        verb.to_owned(),
        name.map(str::to_owned),
    )
}

/// Everything the broker ever asks for, once.
async fn asked() -> BTreeSet<Permission> {
    let api = Api::start().await;
    namespace(&api, "shop", "ambient");
    api.put(
        "/api/v1/nodes/node-1",
        json!({"metadata": {"name": "node-1", "labels": {"kubernetes.io/os": "linux"}}}),
    );
    let selector = json!({"kubernetes.io/os": "linux"});
    let set = json!({"metadata": {"name": "sluice-node", "namespace": "sluice-system", "uid": "d", "generation": 1},
        "spec": {"template": {"spec": {"nodeSelector": selector}}}});
    api.put(
        "/apis/apps/v1/namespaces/sluice-system/daemonsets/sluice-node",
        set,
    );
    api.put(&path("a"), pod("a", "1"));
    let kubernetes = kubernetes(&api, quick()).await;
    let mut heard = Heard::new(&kubernetes);
    heard.synced().await;
    shared(&kubernetes).lookup("shop", "a").await.unwrap();
    kubernetes.last_look().await;
    for _ in 0..2 {
        // Somebody writes the annotation by hand: a patch and an Event, the second time counted on the first.
        let mut object = api.object(&path("a")).unwrap();
        object["metadata"]["annotations"]["ambient.istio.io/redirection"] = json!("enabled");
        let patches = api.seen("PATCH", "/status").len();
        api.put(&path("a"), object);
        eventually("put right", || {
            (api.seen("PATCH", "/status").len() > patches).then_some(())
        })
        .await;
        eventually("told", || (!api.seen("POST", "/events").is_empty()).then_some(())).await;
        tokio::time::sleep(Duration::from_millis(600)).await;
    }
    eventually("counted", || {
        (!api.seen("PATCH", "/events/").is_empty()).then_some(())
    })
    .await;
    eventually("token", || kubernetes.credentials()).await;
    let reference = sluice_proto::id::PodRef {
        namespace: "shop".parse().unwrap(),
        name: "a".parse().unwrap(),
        uid: "1".parse().unwrap(),
    };
    kubernetes.write(&reference, true);
    eventually("watched", || {
        (api.watches("/daemonsets") > 0 && api.watches(PODS) > 0).then_some(())
    })
    .await;
    api.seen("", "").iter().map(permission).collect()
}

#[tokio::test]
async fn no_rule_is_missing_and_none_is_unused() {
    let (asked, allowed) = (asked().await, allowed());
    let missing: Vec<_> = asked.difference(&allowed).collect();
    let unused: Vec<_> = allowed.difference(&asked).collect();
    assert!(
        missing.is_empty() && unused.is_empty(),
        "missing {missing:#?} unused {unused:#?}"
    );
}

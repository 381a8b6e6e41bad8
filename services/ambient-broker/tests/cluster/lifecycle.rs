//! The agent's own DaemonSet, and the plugin's token.

use std::time::{Duration, Instant};

use super::api::{Api, Fault};
use super::*;
use sluice_ambient_broker::lifecycle::{Fate, NodeFacts};

const SET: &str = "/apis/apps/v1/namespaces/sluice-system/daemonsets/sluice-node";
const SETS: &str = "/apis/apps/v1/namespaces/sluice-system/daemonsets";
const SELF: &str = "/api/v1/nodes/node-1";

fn set(generation: u32, selector: &Value) -> Value {
    json!({"metadata": {"name": "sluice-node", "namespace": "sluice-system", "uid": "d", "generation": generation},
        "spec": {"template": {"spec": {"nodeSelector": selector}}}})
}

async fn until(kubernetes: &Kubernetes, fate: Fate) -> String {
    eventually(fate.as_str(), || {
        let lifecycle = kubernetes.lifecycle();
        (lifecycle.fate == fate).then_some(lifecycle.reason)
    })
    .await
}

#[tokio::test]
async fn the_agent_stays_while_its_daemon_set_wants_the_node() {
    let api = Api::start().await;
    api.put(
        SELF,
        json!({"metadata": {"name": "node-1", "labels": {"mesh": "yes"}}}),
    );
    api.put(SET, set(1, &json!({"mesh": "yes"})));
    let kubernetes = kubernetes(&api, quick()).await;
    assert!(until(&kubernetes, Fate::Keep).await.contains("wants this node"));
    // A new status says nothing of that, and costs no further look.
    let looks = api.seen("GET", "/daemonsets/sluice-node").len();
    eventually("watched", || (api.watches(SETS) > 0).then_some(())).await;
    let mut status = set(1, &json!({"mesh": "yes"}));
    status["status"] = json!({"numberReady": 1});
    api.put(SET, status);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(api.seen("GET", "/daemonsets/sluice-node").len(), looks);
    api.put(SET, set(2, &json!({"mesh": "no"})));
    let reason = until(&kubernetes, Fate::Remove).await;
    assert!(
        reason.contains("no longer wants node node-1: nodeSelector requires label mesh=no"),
        "{reason}"
    );
}

#[tokio::test]
async fn a_daemon_set_that_is_deleted_is_known_even_if_nobody_may_ask_any_more() {
    for foreground in [false, true] {
        let api = Api::start().await;
        api.put(SET, set(1, &json!(null)));
        let kubernetes = kubernetes(&api, quick()).await;
        until(&kubernetes, Fate::Keep).await;
        eventually("watched", || (api.watches(SETS) > 0).then_some(())).await;
        if foreground {
            let mut deleting = set(2, &json!(null));
            deleting["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            api.put(SET, deleting);
        } else {
            api.delete(SET);
        }
        until(&kubernetes, Fate::Remove).await;
        // As after `helm uninstall`: the roles are gone as well.
        api.fault("GET", "/daemonsets/sluice-node", Fault::Code(403), 1000);
        let last = kubernetes.last_look().await;
        assert_eq!(last.fate, Fate::Remove, "{last:?}");
    }
}

#[tokio::test]
async fn the_last_look_is_fresh_bounded_and_never_guesses() {
    let api = Api::start().await;
    api.put(SET, set(1, &json!(null)));
    let kubernetes = kubernetes(&api, quick()).await;
    until(&kubernetes, Fate::Keep).await;
    assert_eq!(kubernetes.last_look().await.fate, Fate::Keep);
    for fault in [Fault::Hang, Fault::Code(403), Fault::Code(401), Fault::Code(500)] {
        api.fault("GET", "/daemonsets/sluice-node", fault, 1);
        let began = Instant::now();
        let last = kubernetes.last_look().await;
        assert_eq!(last.fate, Fate::Unknown, "{last:?}");
        assert!(last.reason.starts_with("cannot get daemonset"), "{last:?}");
        assert!(began.elapsed() < Duration::from_secs(1));
    }
    api.down().await;
    assert_eq!(kubernetes.last_look().await.fate, Fate::Unknown);
    api.up().await;
    api.watch_fault(SETS, Fault::Hang, 100);
    api.delete(SET);
    let last = kubernetes.last_look().await;
    assert_eq!(
        (last.fate, last.reason.as_str()),
        (Fate::Remove, "DaemonSet sluice-system/sluice-node does not exist")
    );
}

#[tokio::test]
async fn before_anything_was_seen_nothing_is_known() {
    let api = Api::start().await;
    api.down().await;
    let kubernetes = kubernetes(&api, quick()).await;
    assert_eq!(kubernetes.lifecycle().fate, Fate::Unknown);
    assert_eq!(kubernetes.last_look().await.fate, Fate::Unknown);
    assert!(kubernetes.credentials().is_none());
}

#[tokio::test]
async fn the_plugins_token_is_asked_for_a_day_without_audience_or_pod() {
    let api = Api::start().await;
    api.fault("POST", "/token", Fault::Code(500), 2);
    let kubernetes = kubernetes(&api, quick()).await;
    let credentials = eventually("issued", || kubernetes.credentials()).await;
    assert_eq!(credentials.token, "plugin-token");
    assert!(
        credentials.server.starts_with("http://127.0.0.1:"),
        "{}",
        credentials.server
    );
    let now = jiff::Timestamp::now().as_second();
    assert!((credentials.expires_unix - now - 3600).abs() < 60);
    let asked = api.seen("POST", "/token");
    assert_eq!(asked.len(), 3);
    assert_eq!(
        asked[2].path,
        "/api/v1/namespaces/sluice-system/serviceaccounts/sluice-plugin/token"
    );
    assert_eq!(asked[2].body["spec"], json!({"expirationSeconds": 86400}));
    assert!(!format!("{kubernetes:?}").contains("plugin-token"));
}

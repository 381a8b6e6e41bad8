//! The status annotation and Events.

use std::time::Duration;

use super::api::{Api, Fault};
use super::*;
use sluice_ambient_broker::lifecycle::NodeFacts;
use sluice_ambient_broker::reconcile::report::{PodReport, Standing};
use sluice_ambient_broker::status::StatusWriter;
use sluice_proto::code::ErrorCode;
use sluice_proto::id::PodRef;
use sluice_proto::sandbox::Failure;

const KEY: &str = "ambient.istio.io/redirection";

fn reference(name: &str, uid: &str) -> PodRef {
    PodRef {
        namespace: "shop".parse().unwrap(),
        name: name.parse().unwrap(),
        uid: uid.parse().unwrap(),
    }
}

fn value(api: &Api, name: &str) -> Option<String> {
    api.object(&path(name))?["metadata"]["annotations"][KEY]
        .as_str()
        .map(str::to_owned)
}

async fn with_pod() -> (Api, Kubernetes, Heard) {
    let (api, kubernetes, mut heard) = ready().await;
    let mut object = pod("a", "1");
    object["metadata"]["annotations"] = json!({"other": "stays"});
    api.put(&path("a"), object);
    heard.until("+pod a").await;
    (api, kubernetes, heard)
}

#[tokio::test]
async fn one_patch_of_our_key_alone_tells_that_a_pod_is_enrolled() {
    let (api, kubernetes, mut heard) = with_pod().await;
    kubernetes.write(&reference("a", "1"), true);
    kubernetes.write(&reference("a", "1"), true);
    eventually("annotated", || value(&api, "a")).await;
    heard.until("+pod a").await;
    let patches = api.seen("PATCH", "/status");
    assert_eq!(patches.len(), 1);
    assert_eq!(patches[0].path, "/api/v1/namespaces/shop/pods/a/status");
    assert_eq!(patches[0].kind, "application/merge-patch+json");
    assert_eq!(
        patches[0].body,
        json!({"metadata": {"uid": "1", "annotations": {KEY: "enabled"}}})
    );
    kubernetes.write(&reference("a", "1"), false);
    eventually("withdrawn", || value(&api, "a").is_none().then_some(())).await;
    assert_eq!(
        api.object(&path("a")).unwrap()["metadata"]["annotations"]["other"],
        "stays"
    );
    assert_eq!(api.seen("PATCH", "/status").len(), 2);
}

#[tokio::test]
async fn a_patch_that_fails_is_made_again() {
    let (api, kubernetes, mut heard) = with_pod().await;
    api.fault("PATCH", "/status", Fault::Code(500), 2);
    api.fault("PATCH", "/status", Fault::Hang, 1);
    kubernetes.write(&reference("a", "1"), true);
    eventually("annotated", || value(&api, "a")).await;
    assert_eq!(api.seen("PATCH", "/status").len(), 4);
    heard.until("over Kubernetes API (pods/status)").await;
}

#[tokio::test]
async fn a_pause_that_is_asked_for_is_kept_before_the_next_patch() {
    let (api, kubernetes, _heard) = with_pod().await;
    api.fault("PATCH", "/status", Fault::Later(1), 1);
    kubernetes.write(&reference("a", "1"), true);
    eventually("annotated", || value(&api, "a")).await;
    let patches = api.seen("PATCH", "/status");
    assert_eq!(patches.len(), 2);
    assert!(patches[1].at - patches[0].at >= Duration::from_millis(990));
}

#[tokio::test]
async fn another_pod_of_the_same_name_is_not_touched() {
    let (api, kubernetes, _heard) = with_pod().await;
    api.watch_fault(PODS, Fault::Freeze, 1);
    let before = api.watches(PODS);
    eventually("frozen", || (api.watches(PODS) > before).then_some(())).await;
    api.put(&path("a"), pod("a", "2"));
    kubernetes.write(&reference("a", "1"), true);
    eventually("refused", || {
        (!api.seen("PATCH", "/status").is_empty()).then_some(())
    })
    .await;
    assert_eq!(value(&api, "a"), None);
    kubernetes.write(&reference("unknown", "7"), true);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(api.seen("PATCH", "/unknown").is_empty());
}

#[tokio::test]
async fn what_is_written_by_hand_is_put_right_with_a_hint() {
    let (api, _kubernetes, _heard) = with_pod().await;
    let mut object = api.object(&path("a")).unwrap();
    object["metadata"]["annotations"][KEY] = json!("enabled");
    api.put(&path("a"), object);
    eventually("removed", || value(&api, "a").is_none().then_some(())).await;
    let event = eventually("hint", || api.seen("POST", "/events").pop()).await;
    assert_eq!(event.path, "/apis/events.k8s.io/v1/namespaces/shop/events");
    assert_eq!(event.body["reason"], "StatusAnnotationCorrected");
    assert_eq!(event.body["regarding"]["uid"], "1");
    assert!(
        event.body["note"]
            .as_str()
            .unwrap()
            .contains("istio.io/dataplane-mode")
    );
}

fn report(name: &str, uid: &str, standing: Standing, failure: Option<Failure>) -> Arc<PodReport> {
    Arc::new(PodReport {
        pod: reference(name, uid),
        standing,
        verdict: "label".into(),
        ignored: String::new(),
        reason: if failure.is_some() { "no-proxy" } else { "" },
        last_error: failure,
        netns: None,
        addresses: Vec::new(),
        timings: Vec::new(),
        acked: None,
        retries: 0,
        rules_version: String::new(),
        unprotected: false,
    })
}

#[tokio::test]
async fn a_refused_add_is_told_on_its_pod_with_what_to_do() {
    let (api, kubernetes, mut heard) = ready().await;
    let mut object = pod("a", "1");
    object["status"]["phase"] = json!("Pending");
    api.put(&path("a"), object);
    heard.until("+pod a").await;
    let failure = Failure::new(
        ErrorCode::NoProxy,
        "ambient-broker",
        "wait for ztunnel",
        "no ready ztunnel connection within 8.5 s",
    );
    let broken = report("a", "1", Standing::Broken, Some(failure));
    for _ in 0..5 {
        kubernetes.report(&reference("a", "1"), Some(&broken));
    }
    let event = eventually("event", || api.seen("POST", "/events").pop()).await;
    let note = event.body["note"].as_str().unwrap().to_owned();
    for part in [
        "ambient-broker: wait for ztunnel: no ready ztunnel",
        "(ZT-NONE)",
        "check that ztunnel runs",
    ] {
        assert!(note.contains(part), "{note}");
    }
    assert_eq!(
        (&event.body["type"], &event.body["reason"]),
        (&json!("Warning"), &json!("NotInMesh"))
    );
    kubernetes.report(
        &reference("a", "1"),
        Some(&report("a", "1", Standing::Pending, None)),
    );
    kubernetes.report(&reference("a", "1"), Some(&broken));
    // The same again is counted on the same Event.
    let series = eventually("series", || api.seen("PATCH", "/events/").pop()).await;
    assert_eq!(series.body["series"]["count"], 2);
    assert_eq!(api.seen("POST", "/events").len(), 1);
}

#[tokio::test]
async fn an_annotation_that_is_not_taken_is_told_on_its_pod() {
    let (api, kubernetes, mut heard) = ready().await;
    api.put(&path("a"), pod("a", "1"));
    heard.until("+pod a").await;
    let report = PodReport {
        ignored: "annotation x: \"maybe\" is neither true nor false".into(),
        ..report("a", "1", Standing::Enrolled, None).as_ref().clone()
    };
    kubernetes.report(&reference("a", "1"), Some(&Arc::new(report)));
    let event = eventually("event", || api.seen("POST", "/events").pop()).await;
    assert_eq!(event.body["reason"], "AnnotationIgnored");
    assert_eq!(event.body["regarding"]["uid"], "1");
    let note = event.body["note"].as_str().unwrap();
    assert!(note.contains("\"maybe\" is neither true nor false"), "{note}");
}

/// As the settings of these tests name it.
const OWN: &str = "sluice-node-abcde";

#[tokio::test]
async fn an_installer_that_fails_is_told_on_the_agents_own_pod() {
    let (api, kubernetes, mut heard) = ready().await;
    namespace(&api, "sluice-system", "ambient");
    let mut own = pod(OWN, "1");
    own["metadata"]["namespace"] = "sluice-system".into();
    api.put(&format!("/api/v1/namespaces/sluice-system/pods/{OWN}"), own);
    heard.until(&format!("+pod {OWN}")).await;
    kubernetes.installer_failed("conflict: 05-other.conflist keeps being rewritten");
    let event = eventually("event", || api.seen("POST", "/events").pop()).await;
    assert_eq!(event.body["reason"], "NetworkConfiguration");
    assert_eq!(event.body["regarding"]["name"], OWN);
    assert!(event.body["note"].as_str().unwrap().contains("05-other.conflist"));
}

#[tokio::test]
async fn a_pod_that_takes_the_agents_name_is_told_of_once_it_is_enrolled() {
    let (api, kubernetes, mut heard) = ready().await;
    let set = json!({"metadata": {"name": "sluice-node", "namespace": "sluice-system", "uid": "the-set", "generation": 1}});
    api.put(
        "/apis/apps/v1/namespaces/sluice-system/daemonsets/sluice-node",
        set,
    );
    namespace(&api, "sluice-system", "ambient");
    for (name, uid, owner) in [
        ("sluice-node-aaaaa", "1", "the-set"),
        ("sluice-node-zzzzz", "2", "forged"),
    ] {
        let mut object = pod(name, uid);
        object["metadata"]["namespace"] = json!("sluice-system");
        object["metadata"]["ownerReferences"] =
            json!([{"kind": "DaemonSet", "name": "sluice-node", "uid": owner, "controller": true}]);
        api.put(&format!("/api/v1/namespaces/sluice-system/pods/{name}"), object);
        heard.until(&format!("+pod {name}")).await;
    }
    eventually("the DaemonSet is known", || {
        use sluice_ambient_broker::lifecycle::{Fate, NodeFacts};
        (kubernetes.lifecycle().fate == Fate::Keep).then_some(())
    })
    .await;
    for (name, uid) in [("sluice-node-aaaaa", "1"), ("sluice-node-zzzzz", "2")] {
        let mut pod = reference(name, uid);
        pod.namespace = "sluice-system".parse().unwrap();
        kubernetes.report(&pod, Some(&report(name, uid, Standing::Enrolled, None)));
    }
    let event = eventually("event", || api.seen("POST", "/events").pop()).await;
    assert_eq!(event.body["regarding"]["name"], "sluice-node-zzzzz");
    assert_eq!(event.body["reason"], "NameOfNodeAgent");
    assert_eq!(api.seen("POST", "/events").len(), 1);
}

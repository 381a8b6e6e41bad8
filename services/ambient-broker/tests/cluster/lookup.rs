//! Live look-ups for ADDs that wait.

use std::time::{Duration, Instant};

use super::api::Fault;
use super::*;

#[tokio::test]
async fn a_pod_and_its_namespace_are_found_as_they_are_this_moment() {
    let (api, kubernetes, _heard) = ready().await;
    api.put(&path("a"), pod("a", "1"));
    let found = shared(&kubernetes).lookup("shop", "a").await.unwrap();
    assert_eq!(found.pod.unwrap().id.uid.as_str(), "1");
    let mode = found.namespace.unwrap().labels["istio.io/dataplane-mode"].clone();
    assert_eq!((mode.as_str(), found.undetermined), ("ambient", false));
}

#[tokio::test]
async fn what_does_not_exist_is_an_answer_and_what_cannot_be_asked_is_none() {
    let (api, kubernetes, _heard) = ready().await;
    let source = shared(&kubernetes);
    let nothing = source.lookup("shop", "missing").await.unwrap();
    assert!(nothing.pod.is_none() && nothing.namespace.is_some());
    let nowhere = source.lookup("other", "missing").await.unwrap();
    assert!(nowhere.pod.is_none() && nowhere.namespace.is_none());
    for (fault, says) in [
        (Fault::Code(500), "answers 500"),
        (Fault::Code(403), "answers 403"),
        (Fault::Code(401), "answers 401"),
        (Fault::Hang, "no answer within 0.5 s"),
    ] {
        api.fault("GET", "/shop/pods/a", fault, 1);
        let began = Instant::now();
        let error = source.lookup("shop", "a").await.unwrap_err().to_string();
        assert!(
            error.starts_with("cannot get pod") && error.contains(says),
            "{error}"
        );
        assert!(began.elapsed() < Duration::from_secs(2));
    }
    api.down().await;
    let error = source.lookup("shop", "a").await.unwrap_err().to_string();
    assert!(error.contains("cannot get"), "{error}");
}

#[tokio::test]
async fn a_pod_of_another_node_is_not_ours_and_gets_no_status() {
    use sluice_ambient_broker::status::StatusWriter;
    let (api, kubernetes, _heard) = ready().await;
    let mut other = pod("a", "1");
    other["spec"]["nodeName"] = json!("node-2");
    api.put(&path("a"), other);
    let found = shared(&kubernetes).lookup("shop", "a").await.unwrap();
    assert!(found.pod.is_none());
    let reference = sluice_proto::id::PodRef {
        namespace: "shop".parse().unwrap(),
        name: "a".parse().unwrap(),
        uid: "1".parse().unwrap(),
    };
    kubernetes.write(&reference, true);
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(api.seen("PATCH", "").is_empty());
}

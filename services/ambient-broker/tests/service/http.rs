//! What is served over HTTP: health, metrics, and `/cmdadd` for Istio's plugin.

use std::pin::pin;
use std::time::{Duration, Instant};

use sluice_proto::pb::executor::Feature;
use sluice_proto::pb::workload::PodState;
use sluice_proto::pb::zds::workload_request::Payload;
use tokio::time::timeout;

use crate::harness::{Node, SOON, eventually, reference};

/// An answer that is not there after this is being waited for.
const MOMENT: Duration = Duration::from_millis(200);
/// What does not wait is through long before what waits.
const AT_ONCE: Duration = Duration::from_secs(5);

#[tokio::test]
async fn health_and_metrics_are_served_on_a_unix_socket() {
    let mut node = Node::new();
    node.manifest(1, "ambient");
    node.start_broker();
    eventually(|| node.run.http_socket().exists().then_some(())).await;
    let (status, body) = node.get("/readyz").await;
    assert_eq!(status, 503);
    assert!(body.contains("the executor is not connected"), "{body}");
    assert_eq!(node.get("/healthz").await.0, 200);
    node.executor.serve(&node.run);
    let until = Instant::now() + SOON;
    while node.get("/readyz").await.0 != 200 {
        assert!(
            Instant::now() < until,
            "never ready: {}",
            node.get("/readyz").await.1
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let _ztunnel = node.ztunnel().await;
    node.executor.add(&reference(1), "c1", 1);
    node.until(1, "enrolled", |pod| pod.state() == PodState::Enrolled)
        .await;
    let (status, metrics) = node.get("/metrics").await;
    assert_eq!(status, 200);
    for line in [
        "pods_expected 1",
        "pods_enrolled 1",
        "ztunnel_connected 1",
        "zds_connections{state=\"ready\"} 1",
        "nodeagent_reconcile_events_total{type=\"add\"} 1",
        "add_seconds_count{stage=\"total\"} 1",
    ] {
        assert!(metrics.contains(line), "{line} is missing in:\n{metrics}");
    }
    assert_eq!(node.get("/else").await.0, 404);
}

#[tokio::test]
async fn readiness_can_be_waited_for_at_the_start_but_not_afterwards() {
    let mut node = Node::new();
    node.require_ztunnel = true;
    node.executor.serve(&node.run);
    node.start_broker();
    eventually(|| node.run.http_socket().exists().then_some(())).await;
    let (status, body) = node.get("/readyz?wait=0").await;
    assert_eq!(status, 503, "{body}");

    let mut waiting = pin!(node.get("/readyz?wait=10"));
    assert!(timeout(MOMENT, &mut waiting).await.is_err(), "it does not wait");
    let ztunnel = node.ztunnel().await;
    let (status, body) = waiting.await;
    assert_eq!(status, 200, "{body}");

    drop(ztunnel);
    let lost = Instant::now();
    loop {
        let asked = Instant::now();
        let (status, _) = node.get("/readyz?wait=10").await;
        assert!(asked.elapsed() < AT_ONCE, "it waits although it had been ready");
        if status == 503 {
            break;
        }
        assert!(lost.elapsed() < SOON, "ready without a proxy");
    }
}

#[tokio::test]
async fn what_cannot_be_waited_for_is_told() {
    let mut node = Node::new();
    node.start_broker();
    eventually(|| node.run.http_socket().exists().then_some(())).await;
    for query in [
        "wait=11",
        "wait=-1",
        "wait=1s",
        "wait=",
        "when=1",
        "",
        "wait=1&wait=2",
    ] {
        let (status, body) = node.get(&format!("/readyz?{query}")).await;
        assert_eq!(status, 400, "{query}");
        assert_eq!(
            body,
            format!("/readyz?{query}: only wait=SECONDS is allowed, from 0 to 10\n")
        );
    }
}

#[tokio::test]
async fn whoever_waits_for_readiness_does_not_hold_up_the_end() {
    let mut node = Node::new();
    node.start_broker();
    eventually(|| node.run.http_socket().exists().then_some(())).await;
    let mut waiting = pin!(node.get("/readyz?wait=10"));
    assert!(timeout(MOMENT, &mut waiting).await.is_err(), "it does not wait");
    let asked = Instant::now();
    node.stop.cancel();
    let (status, body) = waiting.await;
    assert_eq!(status, 503, "{body}");
    assert!(asked.elapsed() < AT_ONCE, "{:?}", asked.elapsed());
}

#[tokio::test]
async fn where_a_proxy_is_asked_for_a_node_without_one_is_not_ready() {
    let mut node = Node::new();
    node.require_ztunnel = true;
    node.executor.serve(&node.run);
    node.start_broker();
    eventually(|| node.run.http_socket().exists().then_some(())).await;
    answers(&node, 503, "no ready ztunnel connection\n").await;
    let ztunnel = node.ztunnel().await;
    answers(&node, 200, "ok\n").await;
    drop(ztunnel);
}

/// Waits until `/readyz` gives this status and exactly this text.
async fn answers(node: &Node, status: u16, body: &str) {
    let until = Instant::now() + SOON;
    loop {
        let answer = node.get("/readyz").await;
        if answer.0 == status && answer.1 == body {
            return;
        }
        assert!(Instant::now() < until, "{answer:?}, expected {status} {body:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_kernel_feature_that_is_missing_keeps_the_node_from_being_ready_if_it_is_required() {
    for required in [true, false] {
        let mut node = Node::new();
        let missing = Feature {
            name: "ct zone".into(),
            family: "ip6".into(),
            required,
            available: false,
            error: "EOPNOTSUPP".into(),
        };
        node.executor.0.lock().unwrap().features = vec![missing];
        node.executor.serve(&node.run);
        node.start_broker();
        eventually(|| node.run.http_socket().exists().then_some(())).await;
        let expected = if required {
            (503, "kernel lacks ct zone (ip6): EOPNOTSUPP")
        } else {
            (200, "")
        };
        let until = Instant::now() + SOON;
        loop {
            let (status, body) = node.get("/readyz").await;
            if status == expected.0 && body.contains(expected.1) {
                break;
            }
            assert!(Instant::now() < until, "{status}: {body}, expected {expected:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

#[tokio::test]
async fn an_installed_istio_cni_plugin_is_served() {
    let mut node = Node::new();
    node.manifest(1, "ambient");
    node.manifest(2, "none");
    node.executor.serve(&node.run);
    node.start_broker();
    let mut ztunnel = node.ztunnel().await;
    assert!(matches!(ztunnel.recv().await.unwrap(), Payload::SnapshotSent(_)));
    let event = |n: u32| {
        format!(
            r#"{{"Netns":"/var/run/netns/x","PodName":"pod-{n}","PodNamespace":"default",
                "IPs":[{{"Interface":2,"Address":{{"IP":"10.0.0.9","Mask":"////AA=="}},"Gateway":""}}]}}"#
        )
    };
    node.until(1, "known", |_| true).await;
    let (status, body) = node.cmdadd(&event(1)).await;
    assert_eq!(status, 501, "{body}");
    node.executor.0.lock().unwrap().opener = true;
    let (status, body) = node.cmdadd(&event(1)).await;
    assert_eq!((status, body.as_str()), (200, ""));
    assert!(matches!(ztunnel.recv().await.unwrap(), Payload::Add(_)));
    assert!(
        node.executor
            .calls()
            .contains(&"adopt /var/run/netns/x".to_owned())
    );
    let (status, body) = node.cmdadd(&event(2)).await;
    assert_eq!(status, 500);
    assert!(body.contains("unexpectedly not eligible"), "{body}");
    let at = Instant::now();
    let (status, body) = node.cmdadd(&event(3)).await;
    assert_eq!(status, 500);
    assert!(
        body.contains("knows no pod") && at.elapsed() < Duration::from_secs(3),
        "{body}"
    );
    assert_eq!(node.cmdadd("notjson").await.0, 400);
    assert_eq!(node.cmdadd("").await.0, 400);
    let (_, metrics) = node.get("/metrics").await;
    for line in [
        "response_code=\"200\"} 1",
        "response_code=\"400\"} 2",
        "response_code=\"501\"} 1",
    ] {
        assert!(metrics.contains(line), "{line} is missing in:\n{metrics}");
    }
}

//! Pods that come, change and go.

use std::time::{Duration, Instant};

use prost::Message;
use sluice_proto::pb::types::Mode;
use sluice_proto::pb::workload::{DescribeRequest, NodeRequest, PodState};
use sluice_proto::pb::zds::workload_request::Payload;
use sluice_proto::pb::zds::{Ack, WorkloadResponse, ZdsHello, workload_response};
use sluice_proto::transport::seqpacket::SeqpacketConnection;

use crate::harness::{Node, admitted, eventually, reference};

#[tokio::test]
async fn a_pods_life_from_add_to_del() {
    let mut node = Node::new();
    node.manifest(1, "ambient");
    node.executor.serve(&node.run);
    node.start_broker();
    let mut ztunnel = node.ztunnel().await;
    assert!(matches!(ztunnel.recv().await.unwrap(), Payload::SnapshotSent(_)));

    node.executor.add(&reference(1), "c1", 1);
    match ztunnel.recv().await.unwrap() {
        Payload::Add(add) => {
            assert_eq!(add.uid, "uid-1");
            assert_eq!(add.workload_info.unwrap().service_account, "sa");
        }
        other => panic!("{other:?}"),
    }
    let verdicts =
        eventually(|| Some(node.executor.verdicts()).filter(|verdicts| !verdicts.is_empty())).await;
    assert_eq!(verdicts, [admitted(Mode::Ambient)]);
    let pod = node
        .until(1, "enrolled", |pod| pod.state() == PodState::Enrolled)
        .await;
    assert!(pod.zds_connection > 0 && pod.acked_unix_ms > 0);
    assert!(pod.timings.iter().any(|timing| timing.stage == "total"));

    let mut client = node.workloads().await;
    let request = DescribeRequest {
        namespace: "default".into(),
        name: "pod-1".into(),
    };
    let description = client.describe(request).await.unwrap().into_inner();
    assert_eq!(description.rules, ["a rule"]);
    assert!(description.selection.iter().any(|step| step.decides));
    let status = client.node(NodeRequest {}).await.unwrap().into_inner();
    assert!(status.ready, "{:?}", status.not_ready_because);
    assert_eq!((status.pods_expected, status.pods_enrolled), (1, 1));
    assert_eq!(status.zds.len(), 1);
    assert!(status.zds_socket.contains("mode 0660"), "{}", status.zds_socket);

    node.executor.del("c1");
    assert!(matches!(ztunnel.recv().await.unwrap(), Payload::Del(_)));
}

#[tokio::test]
async fn a_label_enrols_a_running_pod_and_its_removal_drains_it() {
    let mut node = Node::new();
    node.manifest(1, "none");
    node.executor.serve(&node.run);
    node.start_broker();
    node.until(1, "known", |_| true).await;
    node.executor.add(&reference(1), "c1", 1);
    let verdicts =
        eventually(|| Some(node.executor.verdicts()).filter(|verdicts| !verdicts.is_empty())).await;
    assert_eq!(verdicts, [admitted(Mode::None)]);

    node.manifest(1, "ambient");
    let pod = node
        .until(1, "pending", |pod| pod.state() == PodState::Pending)
        .await;
    assert_eq!(pod.reason, "no-proxy");
    let touched = |call: &String| call.starts_with("program");
    assert!(
        !node.executor.calls().iter().any(touched),
        "a running pod is not touched without a proxy"
    );

    let mut ztunnel = node.ztunnel().await;
    assert!(matches!(ztunnel.recv().await.unwrap(), Payload::Add(_)));
    assert!(matches!(ztunnel.recv().await.unwrap(), Payload::SnapshotSent(_)));
    node.until(1, "enrolled", |pod| pod.state() == PodState::Enrolled)
        .await;
    assert_eq!(node.executor.mode("c1"), Mode::Ambient);

    node.executor.0.lock().unwrap().redirected = [2, 0].into();
    node.manifest(1, "none");
    node.until(1, "draining", |pod| pod.state() == PodState::Draining)
        .await;
    assert!(matches!(ztunnel.recv().await.unwrap(), Payload::Del(_)));
    node.until(1, "out", |pod| pod.state() == PodState::Out).await;
    let programs: Vec<_> = node.executor.calls().into_iter().filter(touched).collect();
    let expected = [
        "program c1 MODE_AMBIENT",
        "program c1 MODE_DRAINING",
        "program c1 MODE_NONE",
    ];
    assert_eq!(programs, expected);
}

#[tokio::test]
async fn an_add_under_way_gets_its_verdict_before_the_broker_ends() {
    let mut node = Node::new();
    node.manifest(1, "ambient");
    node.executor.serve(&node.run);
    node.start_broker();
    node.until(1, "known", |_| true).await;
    node.executor.add(&reference(1), "c1", 1);
    node.until(1, "waiting for a proxy", |pod| pod.reason == "no-proxy")
        .await;
    // Connected before the end, it answers only after it.
    let socket = SeqpacketConnection::connect(&node.run.zds_socket()).unwrap();
    socket
        .send(&ZdsHello { version: 1 }.encode_to_vec(), &[])
        .await
        .unwrap();
    let _add = socket.receive(1).await.unwrap();
    let asked = Instant::now();
    node.stop.cancel();
    tokio::time::sleep(Duration::from_millis(100)).await;
    let ack = WorkloadResponse {
        payload: Some(workload_response::Payload::Ack(Ack::default())),
    };
    for _ in 0..2 {
        socket.send(&ack.encode_to_vec(), &[]).await.unwrap();
        let _ = socket.receive(1).await;
    }
    node.broker.take().unwrap().await.unwrap();
    assert_eq!(node.executor.verdicts(), [admitted(Mode::Ambient)]);
    assert!(
        asked.elapsed() < Duration::from_millis(2_300),
        "{:?}",
        asked.elapsed()
    );
}

#[tokio::test]
async fn twenty_adds_before_any_ztunnel_are_each_handed_over_once() {
    let mut node = Node::new();
    for n in 1..=20 {
        node.manifest(n, "ambient");
    }
    node.executor.serve(&node.run);
    node.start_broker();
    node.until(20, "known", |_| true).await;
    for n in 1..=20 {
        node.executor.add(&reference(n), &format!("c{n}"), u64::from(n));
    }
    node.until(20, "waiting for a proxy", |pod| pod.reason == "no-proxy")
        .await;
    let mut ztunnel = node.ztunnel().await;
    let verdicts =
        eventually(|| Some(node.executor.verdicts()).filter(|verdicts| verdicts.len() == 20)).await;
    assert!(verdicts.iter().all(|verdict| *verdict == admitted(Mode::Ambient)));
    let mut uids = Vec::new();
    while let Ok(payload) = ztunnel.try_recv() {
        if let Payload::Add(add) = payload {
            uids.push(add.uid);
        }
    }
    uids.sort();
    let sent = uids.len();
    uids.dedup();
    assert_eq!((uids.len(), sent), (20, 20));
}

//! Broker and executor that come back.

use sluice_proto::pb::types::Mode;
use sluice_proto::pb::workload::PodState;
use sluice_proto::pb::zds::workload_request::Payload;
use tokio_util::sync::CancellationToken;

use crate::harness::{Node, eventually, reference};

#[tokio::test]
async fn a_restarted_broker_hands_everything_over_again_and_programs_nothing() {
    let mut node = Node::new();
    node.manifest(1, "ambient");
    node.manifest(2, "ambient");
    node.executor.serve(&node.run);
    node.start_broker();
    let mut ztunnel = node.ztunnel().await;
    node.executor.add(&reference(1), "c1", 1);
    node.executor.add(&reference(2), "c2", 2);
    for n in 1..=2 {
        node.until(n, "enrolled", |pod| pod.state() == PodState::Enrolled)
            .await;
    }
    node.stop.cancel();
    node.broker.take().unwrap().await.unwrap();
    while ztunnel.recv().await.is_some() {}
    assert_eq!(
        node.executor.mode("c1"),
        Mode::Ambient,
        "rules stay when the broker ends"
    );
    node.executor.0.lock().unwrap().calls.clear();

    node.stop = CancellationToken::new();
    node.start_broker();
    let mut ztunnel = node.ztunnel().await;
    let mut adds = 0;
    loop {
        match ztunnel.recv().await.unwrap() {
            Payload::Add(_) => adds += 1,
            Payload::SnapshotSent(_) => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(adds, 2, "the snapshot is complete");
    for n in 1..=2 {
        node.until(n, "enrolled", |pod| pod.state() == PodState::Enrolled)
            .await;
    }
    let calls = node.executor.calls();
    assert!(!calls.iter().any(|call| call.starts_with("program")), "{calls:?}");
}

#[tokio::test]
async fn a_restarted_executor_gets_descriptors_back_and_ztunnel_notices_nothing() {
    let mut node = Node::new();
    node.manifest(1, "ambient");
    let stop = node.executor.serve(&node.run);
    node.start_broker();
    let mut ztunnel = node.ztunnel().await;
    node.executor.add(&reference(1), "c1", 1);
    node.until(1, "enrolled", |pod| pod.state() == PodState::Enrolled)
        .await;
    stop.cancel();
    {
        let mut shared = node.executor.0.lock().unwrap();
        let sandbox = shared.sandboxes.get_mut("c1").unwrap();
        sandbox.reachable = false;
        let old = std::mem::take(&mut *shared);
        shared.sandboxes = old.sandboxes;
    }
    node.executor.serve(&node.run);
    eventually(|| {
        node.executor
            .calls()
            .contains(&"offer c1".to_owned())
            .then_some(())
    })
    .await;
    node.until(1, "enrolled", |pod| pod.state() == PodState::Enrolled)
        .await;
    let calls = node.executor.calls();
    assert!(!calls.iter().any(|call| call.starts_with("program")), "{calls:?}");
    let mut seen = Vec::new();
    while let Ok(payload) = ztunnel.try_recv() {
        seen.push(payload);
    }
    assert_eq!(seen.len(), 2, "one end of a snapshot, one add: {seen:?}");
}

//! What a connection is sent before it is ready.

use super::*;

#[tokio::test]
async fn a_snapshot_is_sent_with_one_descriptor_each_and_ended_when_all_is_answered() {
    let mut server = Server::start(|_| {});
    for n in 0..50 {
        server.zds.offer(workload(n, u64::from(n)), None);
    }
    server.zds.open();
    let mut ztunnel = server.ztunnel().await;
    assert_eq!(ztunnel.snapshot().await, 50);
    let (_, acked) = server.ready().await;
    assert_eq!(acked.len(), 50);
    let own = std::fs::metadata("/proc/self/ns/net").unwrap().ino();
    assert!(ztunnel.held.values().all(|inode| *inode == own));
}

#[tokio::test]
async fn at_most_a_window_of_snapshot_messages_is_unanswered() {
    for window in [1, 4] {
        let server = Server::start(|options| options.window = window);
        for n in 0..10 {
            server.zds.offer(workload(n, 1), None);
        }
        server.zds.open();
        let mut ztunnel = server.ztunnel().await;
        for _ in 0..window {
            ztunnel.take().await.unwrap();
        }
        assert!(
            ztunnel.silent(Duration::from_millis(100)).await,
            "window {window}"
        );
        ztunnel.answer("").await;
        ztunnel.take().await.unwrap();
        assert!(ztunnel.silent(Duration::from_millis(50)).await);
    }
}

#[tokio::test]
async fn a_snapshot_is_not_ended_before_it_is_complete() {
    let mut server = Server::start(|_| {});
    server.zds.offer(workload(1, 1), None);
    let mut ztunnel = server.ztunnel().await;
    ztunnel.ack().await;
    assert!(ztunnel.silent(Duration::from_millis(100)).await);
    // What comes meanwhile is part of it, once.
    server.zds.offer(workload(2, 2), None);
    assert_eq!(added(&ztunnel.ack().await), "uid-2");
    server.zds.open();
    assert!(matches!(ztunnel.ack().await, Payload::SnapshotSent(_)));
    assert_eq!(server.ready().await.1.len(), 2);
}

#[tokio::test]
async fn a_deletion_in_a_snapshot_overlaps_nothing() {
    let server = Server::start(|_| {});
    for n in 0..3 {
        server.zds.offer(workload(n, 1), None);
    }
    let mut ztunnel = server.ztunnel().await;
    for _ in 0..3 {
        ztunnel.take().await.unwrap();
    }
    server.zds.withdraw(&uid(0), Epoch(1));
    server.zds.offer(workload(9, 2), None);
    assert!(ztunnel.silent(Duration::from_millis(50)).await);
    for _ in 0..3 {
        ztunnel.answer("").await;
    }
    assert!(matches!(ztunnel.take().await.unwrap(), Payload::Del(_)));
    assert!(ztunnel.silent(Duration::from_millis(50)).await);
    ztunnel.answer("").await;
    assert_eq!(added(&ztunnel.take().await.unwrap()), "uid-9");
}

#[tokio::test]
async fn a_pod_that_leaves_before_its_turn_is_never_named() {
    let mut server = Server::start(|options| options.window = 1);
    for n in 0..3 {
        server.zds.offer(workload(n, 1), None);
    }
    let mut ztunnel = server.ztunnel().await;
    let first = added(&ztunnel.take().await.unwrap()).to_owned();
    let gone = (0..3).map(uid).find(|uid| uid.as_str() != first).unwrap();
    server.zds.withdraw(&gone, Epoch(1));
    server
        .expect(|event| matches!(event, Event::ZdsWithdrawn { .. }).then_some(()))
        .await;
    server.zds.open();
    ztunnel.answer("").await;
    assert_eq!(ztunnel.snapshot().await, 1);
    assert!(!ztunnel.held.contains_key(gone.as_str()));
}

#[tokio::test]
async fn a_refusal_is_reported_and_the_connection_stays() {
    let mut server = Server::start(|_| {});
    server.zds.offer(workload(1, 1), None);
    server.zds.open();
    let mut ztunnel = server.ztunnel().await;
    ztunnel.take().await.unwrap();
    ztunnel.answer("port in use").await;
    assert!(
        matches!(ztunnel.ack().await, Payload::SnapshotSent(_)),
        "the snapshot goes on"
    );
    let text = server
        .expect(|event| match event {
            Event::ZdsNacked { error, .. } => Some(error.clone()),
            _ => None,
        })
        .await;
    assert_eq!(text, "port in use");
    let (connection, acked) = server.ready().await;
    assert!(acked.is_empty());
    server.zds.offer(workload(2, 2), Some(connection));
    assert_eq!(added(&ztunnel.ack().await), "uid-2");
}

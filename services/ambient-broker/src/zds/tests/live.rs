//! What a ready connection is sent.

use super::*;

#[tokio::test]
async fn adds_go_to_the_connection_named_and_deletions_to_all() {
    let mut server = Server::start(|_| {});
    server.zds.open();
    let mut first = server.ztunnel().await;
    first.snapshot().await;
    let _ = server.ready().await;
    let mut second = server.ztunnel().await;
    second.snapshot().await;
    let (newest, _) = server.ready().await;
    server.zds.offer(workload(1, 7), Some(newest));
    assert_eq!(added(&second.ack().await), "uid-1");
    let acked = server
        .expect(|event| match event {
            Event::ZdsAcked {
                connection, epoch, ..
            } => Some((*connection, *epoch)),
            _ => None,
        })
        .await;
    assert_eq!(acked, (newest, Epoch(7)));
    assert!(first.silent(Duration::from_millis(50)).await);
    server.zds.withdraw(&uid(1), Epoch(7));
    assert!(matches!(first.ack().await, Payload::Del(_)));
    assert!(matches!(second.take().await.unwrap(), Payload::Del(_)));
    assert!(
        server.events.try_recv().is_err(),
        "withdrawn before everybody has answered"
    );
    // What a deletion is answered makes no difference.
    second.answer("unknown").await;
    server
        .expect(|event| matches!(event, Event::ZdsWithdrawn { epoch: Epoch(7), .. }).then_some(()))
        .await;
}

#[tokio::test]
async fn a_withdrawal_without_any_connection_is_done_at_once() {
    let mut server = Server::start(|_| {});
    server.zds.withdraw(&uid(1), Epoch(1));
    assert!(matches!(server.event().await, Event::ZdsWithdrawn { .. }));
}

#[tokio::test]
async fn after_the_snapshot_one_message_is_outstanding() {
    let mut server = Server::start(|_| {});
    server.zds.open();
    let mut ztunnel = server.ztunnel().await;
    ztunnel.snapshot().await;
    let (connection, _) = server.ready().await;
    for n in 0..3 {
        server.zds.offer(workload(n, 1), Some(connection));
    }
    for n in 0..3 {
        assert_eq!(added(&ztunnel.take().await.unwrap()), format!("uid-{n}"));
        assert!(ztunnel.silent(Duration::from_millis(30)).await);
        ztunnel.answer("").await;
    }
}

#[tokio::test]
async fn an_answer_that_does_not_come_names_its_pod_and_closes_the_connection() {
    let mut server = Server::start(|options| options.deadline = Duration::from_millis(200));
    server.zds.open();
    let mut ztunnel = server.ztunnel().await;
    ztunnel.snapshot().await;
    let (connection, _) = server.ready().await;
    server.zds.offer(workload(1, 1), Some(connection));
    server.zds.offer(workload(2, 2), Some(connection));
    ztunnel.take().await.unwrap();
    let expired = server
        .expect(|event| match event {
            Event::ZdsExpired { pod, waited, .. } => Some((pod.clone(), *waited)),
            Event::ZdsAcked { .. } => panic!("acknowledged"),
            _ => None,
        })
        .await;
    assert_eq!(expired.0, uid(1));
    assert!(expired.1 >= Duration::from_millis(200));
    assert_eq!(server.closed().await, connection);
    // The late answer meets a closed socket and is credited to nobody; the other pod goes with the next snapshot.
    assert!(ztunnel.ended().await);
    server.zds.withdraw(&uid(1), Epoch(1));
    let mut again = server.ztunnel().await;
    assert_eq!(again.snapshot().await, 1);
    assert_eq!(server.ready().await.1, [(uid(2), Epoch(2))]);
}

#[tokio::test]
async fn an_idle_connection_lives_and_a_closed_one_is_noticed_at_once() {
    let mut server = Server::start(|options| options.deadline = Duration::from_millis(100));
    server.zds.open();
    let mut ztunnel = server.ztunnel().await;
    ztunnel.snapshot().await;
    let (connection, _) = server.ready().await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert_eq!(server.zds.status().connections.len(), 1);
    drop(ztunnel);
    let at = Instant::now();
    assert_eq!(server.closed().await, connection);
    assert!(at.elapsed() < Duration::from_millis(200));
}

#[tokio::test]
async fn a_socket_that_another_agent_removes_at_its_end_is_made_again() {
    let mut server = Server::start(|_| {});
    server.zds.open();
    let mut first = server.ztunnel().await;
    first.snapshot().await;
    let (connection, _) = server.ready().await;

    // As Istio's agent does when it stops, whoever's socket is at its path by then.
    let path = server.directory.path().join("ztunnel.sock");
    std::fs::remove_file(&path).unwrap();
    let until = Instant::now() + SOON;
    while !path.exists() {
        assert!(Instant::now() < until, "no ztunnel would find us any more");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }

    let mut second = server.ztunnel().await;
    second.snapshot().await;
    let _ = server.ready().await;
    // The one that was there is still served.
    server.zds.offer(workload(1, 7), Some(connection));
    assert_eq!(added(&first.ack().await), "uid-1");
}

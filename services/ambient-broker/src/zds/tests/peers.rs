//! Peers that do not keep to the protocol, and those that come and go.

use super::*;

#[tokio::test]
async fn a_peer_that_never_says_hello_delays_no_withdrawal() {
    let mut server = Server::start(|_| {});
    let _silent = server.connect();
    while server.zds.status().connections.is_empty() {
        tokio::task::yield_now().await;
    }
    server.zds.withdraw(&uid(1), Epoch(1));
    let at = Instant::now();
    assert!(matches!(server.event().await, Event::ZdsWithdrawn { .. }));
    assert!(at.elapsed() < Duration::from_secs(1));
}

#[tokio::test]
async fn surplus_and_undecodable_answers_close_the_connection() {
    for garbage in [b"\x0a\x00".as_slice(), b"\xff\xff\xff", b"\x12\x00"] {
        let mut server = Server::start(|_| {});
        server.zds.open();
        let mut ztunnel = server.ztunnel().await;
        ztunnel.snapshot().await;
        let _ = server.ready().await;
        ztunnel.socket.send(garbage, &[]).await.unwrap();
        server.closed().await;
        assert!(ztunnel.ended().await);
        assert_eq!(server.zds.status().protocol_errors, 1);
    }
}

#[tokio::test]
async fn other_versions_are_not_spoken_to() {
    let mut server = Server::start(|_| {});
    server.zds.open();
    for version in [0, 99] {
        let socket = server.connect();
        let mut hello = ZdsHello { version }.encode_to_vec();
        if hello.is_empty() {
            hello = vec![0x08, 0x00];
        }
        socket.send(&hello, &[]).await.unwrap();
        server.closed().await;
        assert_eq!(server.zds.status().unknown_version, Some(version));
    }
}

#[tokio::test]
async fn a_peer_with_another_uid_is_refused_and_counted() {
    let server = Server::start(|options| options.peers.uids = vec![12_345]);
    let socket = server.connect();
    assert!(matches!(
        socket.receive(1).await,
        Err(TransportError::Closed | TransportError::Call { .. })
    ));
    assert_eq!(server.zds.status().refused_peers, 1);
    assert_eq!(server.zds.status().ever_connected, 0);
}

#[tokio::test]
async fn bookkeeping_is_by_connection_whatever_the_order() {
    let mut server = Server::start(|_| {});
    server.zds.open();
    for close_newest_first in [false, true] {
        let mut first = server.ztunnel().await;
        first.snapshot().await;
        let (one, _) = server.ready().await;
        let mut second = server.ztunnel().await;
        second.snapshot().await;
        let (two, _) = server.ready().await;
        assert_eq!(server.zds.status().connections.len(), 2);
        let (mut stays, goes, left) = if close_newest_first {
            (first, second, one)
        } else {
            (second, first, two)
        };
        drop(goes);
        server.closed().await;
        let ids: Vec<_> = server.zds.status().connections.iter().map(|c| c.id).collect();
        assert_eq!(ids, [left]);
        server.zds.offer(workload(1, 1), Some(left));
        assert_eq!(added(&stays.ack().await), "uid-1");
        drop(stays);
        server.closed().await;
        server.zds.withdraw(&uid(1), Epoch(1));
    }
    for _ in 0..100 {
        drop(server.ztunnel().await);
    }
    let until = Instant::now() + SOON;
    while !server.zds.status().connections.is_empty() {
        assert!(Instant::now() < until, "connections are left");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_thousand_deletions_survive_a_peer_that_comes_and_goes() {
    let mut server = Server::start(|_| {});
    server.zds.open();
    for n in 0..1000 {
        server.zds.offer(workload(n, u64::from(n)), None);
    }
    let path = server.directory.path().join("ztunnel.sock");
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    let churn = tokio::spawn(async move {
        while !stopped.is_cancelled() {
            let socket = SeqpacketConnection::connect(&path).unwrap();
            socket
                .send(&ZdsHello { version: 1 }.encode_to_vec(), &[])
                .await
                .unwrap();
            let mut ztunnel = Ztunnel {
                socket,
                held: HashMap::new(),
            };
            let _ = tokio::time::timeout(Duration::from_millis(20), async {
                loop {
                    ztunnel.ack().await;
                }
            })
            .await;
        }
    });
    let mut asked = Vec::new();
    let mut withdrawn = 0;
    let mut longest = Duration::ZERO;
    for n in 0..1000 {
        asked.push(Instant::now());
        server.zds.withdraw(&uid(n), Epoch(n.into()));
        tokio::task::yield_now().await;
        while let Ok(event) = server.events.try_recv() {
            if let Event::ZdsWithdrawn { epoch, .. } = event {
                longest = longest.max(asked[usize::try_from(epoch.0).unwrap()].elapsed());
                withdrawn += 1;
            }
        }
    }
    while withdrawn < 1000 {
        if let Event::ZdsWithdrawn { epoch, .. } = server.event().await {
            longest = longest.max(asked[usize::try_from(epoch.0).unwrap()].elapsed());
            withdrawn += 1;
        }
    }
    assert!(longest < Duration::from_secs(6), "one waited {longest:?}");
    stop.cancel();
    churn.await.unwrap();
    let mut last = server.ztunnel().await;
    assert_eq!(last.snapshot().await, 0);
}

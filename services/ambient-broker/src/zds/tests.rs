//! The server against scripted ztunnels on real sockets.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use prost::Message;
use sluice_proto::id::PodUid;
use sluice_proto::pb::zds::workload_request::Payload;
use sluice_proto::pb::zds::{Ack, WorkloadRequest, WorkloadResponse, ZdsHello, workload_response};
use sluice_proto::transport::descriptors::TransportError;
use sluice_proto::transport::seqpacket::SeqpacketConnection;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{Options, Workload, Zds};
use crate::reconcile::Event;
use crate::reconcile::event::{ConnectionId, Epoch, WorkloadInfo};

const SOON: Duration = Duration::from_secs(5);

struct Server {
    zds: Zds,
    events: mpsc::UnboundedReceiver<Event>,
    stop: CancellationToken,
    directory: tempfile::TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn uid(n: u32) -> PodUid {
    PodUid::parse(format!("uid-{n}")).unwrap()
}

fn workload(n: u32, epoch: u64) -> Workload {
    // Any nsfs descriptor does: the server only passes it on.
    let netns = OwnedFd::from(std::fs::File::open("/proc/self/ns/net").unwrap());
    Workload {
        uid: uid(n),
        epoch: Epoch(epoch),
        info: WorkloadInfo {
            name: format!("pod-{n}"),
            namespace: "default".into(),
            service_account: "sa".into(),
        },
        netns: Arc::new(netns),
    }
}

impl Server {
    fn start(change: impl FnOnce(&mut Options)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let own = nix::unistd::geteuid().as_raw();
        let mut options = Options::new(directory.path().join("ztunnel.sock"), vec![own]);
        change(&mut options);
        let (sender, events) = mpsc::unbounded_channel();
        let zds = Zds::new(options, sender);
        let listener = zds.bind().unwrap();
        let stop = CancellationToken::new();
        tokio::spawn(zds.clone().serve(listener, stop.clone(), stop.clone()));
        Self {
            zds,
            events,
            stop,
            directory,
        }
    }

    fn connect(&self) -> SeqpacketConnection {
        SeqpacketConnection::connect(&self.directory.path().join("ztunnel.sock")).unwrap()
    }

    async fn ztunnel(&self) -> Ztunnel {
        let socket = self.connect();
        let hello = ZdsHello { version: 1 }.encode_to_vec();
        socket.send(&hello, &[]).await.unwrap();
        Ztunnel {
            socket,
            held: HashMap::new(),
        }
    }

    async fn event(&mut self) -> Event {
        tokio::time::timeout(SOON, self.events.recv())
            .await
            .expect("no event")
            .unwrap()
    }

    /// The next event that `pick` accepts.
    async fn expect<T>(&mut self, pick: impl Fn(&Event) -> Option<T>) -> T {
        loop {
            if let Some(found) = pick(&self.event().await) {
                return found;
            }
        }
    }

    async fn ready(&mut self) -> (ConnectionId, Vec<(PodUid, Epoch)>) {
        self.expect(|event| match event {
            Event::ZdsReady {
                connection, acked, ..
            } => Some((*connection, acked.clone())),
            _ => None,
        })
        .await
    }

    async fn closed(&mut self) -> ConnectionId {
        self.expect(|event| match event {
            Event::ZdsClosed(connection) => Some(*connection),
            _ => None,
        })
        .await
    }
}

struct Ztunnel {
    socket: SeqpacketConnection,
    /// What a real one would have: the netns inode of each workload.
    held: HashMap<String, u64>,
}

impl Ztunnel {
    async fn take(&mut self) -> Result<Payload, TransportError> {
        let received = tokio::time::timeout(SOON, self.socket.receive(1))
            .await
            .expect("nothing came")?;
        let payload = WorkloadRequest::decode(received.bytes.as_slice())
            .unwrap()
            .payload
            .unwrap();
        match &payload {
            Payload::Add(add) => {
                let [netns] = received
                    .descriptors
                    .try_into()
                    .expect("not exactly one descriptor");
                let inode = std::fs::File::from(netns).metadata().unwrap().ino();
                self.held.insert(add.uid.clone(), inode);
            }
            Payload::Del(del) => {
                assert!(received.descriptors.is_empty());
                self.held.remove(&del.uid);
            }
            _ => assert!(received.descriptors.is_empty()),
        }
        Ok(payload)
    }

    async fn answer(&self, error: &str) {
        let ack = WorkloadResponse {
            payload: Some(workload_response::Payload::Ack(Ack { error: error.into() })),
        };
        self.socket.send(&ack.encode_to_vec(), &[]).await.unwrap();
    }

    /// Takes one message and acknowledges it.
    async fn ack(&mut self) -> Payload {
        let payload = self.take().await.unwrap();
        self.answer("").await;
        payload
    }

    /// Acknowledges everything up to the end of the snapshot.
    async fn snapshot(&mut self) -> usize {
        let mut adds = 0;
        loop {
            match self.ack().await {
                Payload::SnapshotSent(_) => return adds,
                Payload::Add(_) => adds += 1,
                other => panic!("{other:?} in a snapshot"),
            }
        }
    }

    async fn silent(&self, time: Duration) -> bool {
        tokio::time::timeout(time, self.socket.receive(1)).await.is_err()
    }

    async fn ended(&mut self) -> bool {
        matches!(
            self.take().await,
            Err(TransportError::Closed | TransportError::Call { .. })
        )
    }
}

fn added(payload: &Payload) -> &str {
    match payload {
        Payload::Add(add) => &add.uid,
        other => panic!("not an add: {other:?}"),
    }
}

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

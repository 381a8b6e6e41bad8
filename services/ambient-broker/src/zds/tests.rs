//! The server against scripted ztunnels on real sockets.

mod live;
mod peers;
mod snapshot;

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
use crate::reconcile::effect::WorkloadInfo;
use crate::reconcile::event::{ConnectionId, Epoch};

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
    let info = WorkloadInfo {
        name: format!("pod-{n}"),
        namespace: "default".into(),
        service_account: "sa".into(),
    };
    Workload::new(uid(n), Epoch(epoch), &info, Arc::new(netns))
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

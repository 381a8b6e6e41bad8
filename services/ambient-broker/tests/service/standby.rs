//! A broker that waits for the end of another one of its node.

use std::net::SocketAddr;
use std::sync::Mutex;

use futures_util::future::BoxFuture;
use futures_util::stream::{BoxStream, StreamExt};
use sluice_ambient_broker::source::{Lookup, PodSource, SourceError, SourceEvent};
use sluice_ambient_broker::standby::{self, StandbyError};
use sluice_proto::paths::RunDir;
use sluice_runtime::lease::{Candidate, Lease};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio_util::sync::CancellationToken;

use crate::harness::eventually;

/// Tells what the test says.
#[derive(Debug)]
struct Scripted(Mutex<Option<UnboundedReceiver<SourceEvent>>>);

impl Scripted {
    fn new() -> (UnboundedSender<SourceEvent>, Self) {
        let (told, events) = unbounded_channel();
        (told, Self(Mutex::new(Some(events))))
    }
}

impl PodSource for Scripted {
    fn events(&self) -> BoxStream<'static, SourceEvent> {
        let events = self.0.lock().unwrap().take().expect("asked once");
        futures_util::stream::unfold(events, async |mut events| Some((events.recv().await?, events))).boxed()
    }

    fn lookup<'a>(&'a self, _: &'a str, _: &'a str) -> BoxFuture<'a, Result<Lookup, SourceError>> {
        Box::pin(async { Err(SourceError::Stopped) })
    }
}

/// A run directory whose broker is another process, and a port of ours.
async fn occupied() -> (tempfile::TempDir, RunDir, Lease, SocketAddr) {
    let directory = tempfile::tempdir().unwrap();
    let run = RunDir::new(directory.path());
    std::fs::create_dir(run.broker_lease()).unwrap();
    let other = Candidate::at(&run.broker_lease()).unwrap().take_now().unwrap();
    let port = TcpListener::bind("127.0.0.1:0").await.unwrap();
    (directory, run, other, port.local_addr().unwrap())
}

async fn get(address: SocketAddr, path: &str) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    let status = answer.split(' ').nth(1)?.parse().ok()?;
    Some((status, answer.split("\r\n\r\n").nth(1)?.to_owned()))
}

async fn status(address: SocketAddr, path: &str) -> u16 {
    get(address, path).await.expect("an answer").0
}

#[tokio::test]
async fn it_is_ready_once_the_source_has_told_everything_and_then_leaves_the_port() {
    let (_directory, run, other, address) = occupied().await;
    let (told, source) = Scripted::new();
    let standing_by = tokio::spawn(async move {
        let lease = standby::take(&run, Some(address), &source, &CancellationToken::new()).await;
        // Whoever has it listens there next, without a pause.
        (lease, TcpListener::bind(address).await)
    });
    eventually(|| std::net::TcpStream::connect(address).ok()).await;
    assert_eq!(status(address, "/readyz").await, 503);
    assert_eq!(status(address, "/healthz").await, 200);
    assert_eq!(status(address, "/readyz?wait=soon").await, 400);
    let (refused, body) = get(address, "/metrics").await.unwrap();
    assert_eq!(
        (refused, body.as_str()),
        (503, "standing by: another broker serves this node\n")
    );

    let waits = tokio::spawn(async move { status(address, "/readyz?wait=10").await });
    told.send(SourceEvent::Synced).unwrap();
    assert_eq!(waits.await.unwrap(), 200);
    assert_eq!(status(address, "/readyz").await, 200);

    assert!(!standing_by.is_finished());
    drop(other);
    let (lease, bound) = standing_by.await.unwrap();
    assert!(lease.unwrap().is_some());
    bound.unwrap();
}

/// Where both agents leave the node, nobody else would have the executor of this one clean up.
#[tokio::test]
async fn asked_to_stop_it_takes_over_from_one_that_ends_now() {
    let (_directory, run, other, _) = occupied().await;
    let stop = CancellationToken::new();
    stop.cancel();
    let (_told, source) = Scripted::new();
    let taken = standby::take(&run, None, &source, &stop);
    let ends = async {
        tokio::task::yield_now().await;
        drop(other);
    };
    let (lease, ()) = tokio::join!(taken, ends);
    assert!(lease.unwrap().is_some());
}

#[tokio::test]
async fn it_ends_soon_when_asked_and_without_being_told_to_wait_at_once() {
    let (_directory, run, _other, _) = occupied().await;
    let error = standby::take_now(&run).unwrap_err();
    assert!(matches!(error, StandbyError::Lease(_)), "{error}");
    let stop = CancellationToken::new();
    stop.cancel();
    let (_told, source) = Scripted::new();
    let lease = standby::take(&run, None, &source, &stop).await.unwrap();
    assert!(lease.is_none());
}

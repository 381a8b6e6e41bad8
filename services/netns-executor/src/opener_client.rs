//! The executor's side of the opener's socket: the opener connects, the executor asks, one request at a time.
//!
//! Without an opener everything works but what needs one: host rules, restarts without a broker, adoption.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use sluice_proto::code::ErrorCode;
use sluice_proto::opener::{OpenerReply, OpenerRequest};
use sluice_proto::sandbox::Failure;
use sluice_proto::transport::descriptors::TransportError;
use sluice_proto::transport::seqpacket::SeqpacketConnection;
use tokio::sync::{Mutex, watch};

/// The opener answers within this, or is given up.
pub const DEADLINE: Duration = Duration::from_secs(2);
/// netns, netfilter, route and two legacy sockets.
const MAX_DESCRIPTORS: usize = 5;
const COMPONENT: &str = "netns-opener";

/// Why the opener did not give what was asked for.
#[derive(Debug, thiserror::Error)]
pub enum OpenerError {
    /// None is connected.
    #[error("no opener is connected")]
    NotConnected,
    /// It answered with an error number.
    #[error("the opener says {0}")]
    Refused(Errno),
    /// It did not answer in time; its connection was closed.
    #[error("the opener did not answer within {DEADLINE:?}")]
    Deadline,
    /// The connection broke or carried nonsense; it was closed.
    #[error("the opener's connection failed")]
    Transport(#[source] TransportError),
}

impl OpenerError {
    /// As a failure of `stage`.
    pub fn failure(&self, stage: &str) -> Failure {
        let code = match self {
            Self::NotConnected => ErrorCode::OpenerUnavailable,
            _ => ErrorCode::OpenerNetns,
        };
        Failure::new(code, COMPONENT, stage, sluice_runtime::telemetry::chain(self))
    }

    /// The opener looked, and there is no such namespace.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused(Errno::ENOENT))
    }
}

/// The connection to the opener; clones share it.
#[derive(Debug, Clone)]
pub struct OpenerClient {
    connection: Arc<Mutex<Option<SeqpacketConnection>>>,
    connected: watch::Sender<u64>,
    scans: Arc<Scans>,
}

/// Looks at all processes of the host, which those who ask at one time share.
#[derive(Debug)]
struct Scans {
    /// How many have asked so far.
    asked: AtomicU64,
    last: Mutex<LastScan>,
}

#[derive(Debug)]
struct LastScan {
    /// How many had asked when it began.
    for_first: u64,
    outcome: Result<(), Failure>,
}

impl Default for OpenerClient {
    fn default() -> Self {
        Self {
            connection: Arc::default(),
            connected: watch::Sender::new(0),
            scans: Arc::new(Scans {
                asked: AtomicU64::new(0),
                last: Mutex::new(LastScan {
                    for_first: 0,
                    outcome: Ok(()),
                }),
            }),
        }
    }
}

impl OpenerClient {
    /// An opener has connected; it replaces the one before.
    pub async fn attach(&self, connection: SeqpacketConnection) {
        *self.connection.lock().await = Some(connection);
        self.connected.send_modify(|count| *count += 1);
    }

    /// Changes whenever an opener connects.
    pub fn connections(&self) -> watch::Receiver<u64> {
        self.connected.subscribe()
    }

    /// Whether one is connected. While a request runs, it is.
    pub fn is_connected(&self) -> bool {
        self.connection
            .try_lock()
            .map_or(true, |connection| connection.is_some())
    }

    /// Asks; returns the answer and the descriptors that came with it.
    pub async fn ask(
        &self,
        request: &OpenerRequest,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(OpenerReply, Vec<OwnedFd>), OpenerError> {
        let mut held = self.connection.lock().await;
        // Taken out: a request that fails or is dropped half-way must not leave its reply to the next one.
        let connection = held.take().ok_or(OpenerError::NotConnected)?;
        let answer = ask_on(&connection, request, descriptor).await;
        match &answer {
            Ok(_) | Err(OpenerError::Refused(_)) => *held = Some(connection),
            Err(error) => {
                let error = sluice_runtime::telemetry::chain(error);
                tracing::warn!(error, ?request, "opener's connection closed");
            }
        }
        answer
    }

    /// Asks for a namespace's descriptors.
    pub async fn open(
        &self,
        request: &OpenerRequest,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<Vec<OwnedFd>, OpenerError> {
        self.ask(request, descriptor)
            .await
            .map(|(_, descriptors)| descriptors)
    }

    /// Makes the opener look at every process of the host. A look costs what hundreds of other requests do, and after an
    /// installation hundreds of pods are looked for at one time: whoever asks while one is made waits for the next, and
    /// all who wait share it. So it has begun after the question, and never is more than one made at a time.
    pub async fn scan(&self, stage: &str) -> Result<(), Failure> {
        let number = self.scans.asked.fetch_add(1, Ordering::Relaxed) + 1;
        let mut last = self.scans.last.lock().await;
        if last.for_first < number {
            let for_first = self.scans.asked.load(Ordering::Relaxed);
            let answer = self.ask(&OpenerRequest::Scan, None).await;
            *last = LastScan {
                for_first,
                outcome: answer.map(drop).map_err(|error| error.failure(stage)),
            };
        }
        last.outcome.clone()
    }

    /// Forgets a connection that has ended, which nothing else would notice between requests. True: it did.
    pub async fn forget_if_hung_up(&self) -> bool {
        let mut held = self.connection.lock().await;
        let hung_up = held
            .as_ref()
            .is_some_and(|connection| hung_up(connection.as_fd()));
        if hung_up {
            *held = None;
        }
        hung_up
    }
}

/// Asks on a connection that nobody else uses yet.
pub async fn ask_on(
    connection: &SeqpacketConnection,
    request: &OpenerRequest,
    descriptor: Option<BorrowedFd<'_>>,
) -> Result<(OpenerReply, Vec<OwnedFd>), OpenerError> {
    let exchange = exchange(connection, request, descriptor);
    let answered = tokio::time::timeout(DEADLINE, exchange).await;
    let (reply, descriptors) = answered
        .map_err(|_| OpenerError::Deadline)?
        .map_err(OpenerError::Transport)?;
    match reply.errno {
        0 => Ok((reply, descriptors)),
        errno => Err(OpenerError::Refused(Errno::from_raw(errno))),
    }
}

fn hung_up(socket: BorrowedFd<'_>) -> bool {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    let mut poll_fds = [PollFd::new(socket, PollFlags::POLLIN)];
    poll(&mut poll_fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

async fn exchange(
    connection: &SeqpacketConnection,
    request: &OpenerRequest,
    descriptor: Option<BorrowedFd<'_>>,
) -> Result<(OpenerReply, Vec<OwnedFd>), TransportError> {
    connection.send(&request.encode()?, descriptor.as_slice()).await?;
    let received = connection.receive(MAX_DESCRIPTORS).await?;
    Ok((OpenerReply::decode(&received.bytes)?, received.descriptors))
}

#[cfg(test)]
mod tests {
    use sluice_proto::opener::LegacyTables;
    use sluice_proto::transport::seqpacket::SeqpacketListener;
    use tokio::task::JoinSet;

    use super::*;

    const ANSWER: OpenerReply = OpenerReply {
        errno: 0,
        legacy: LegacyTables {
            ipv4: false,
            ipv6: false,
        },
        scanned: 5000,
    };

    #[tokio::test]
    async fn those_who_ask_at_one_time_share_a_scan_and_never_two_are_made() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("opener.sock");
        let listener = SeqpacketListener::bind(&path, 0o600, None).unwrap();
        let opener = SeqpacketConnection::connect(&path).unwrap();
        let client = OpenerClient::default();
        client.attach(listener.accept().await.unwrap()).await;
        let scans = Arc::new(AtomicU64::new(0));
        let made = Arc::clone(&scans);
        let serving = tokio::spawn(async move {
            while let Ok(request) = opener.receive(0).await {
                assert_eq!(
                    OpenerRequest::decode(&request.bytes).unwrap(),
                    OpenerRequest::Scan
                );
                // While this one is made nobody asks for another.
                let another = tokio::time::timeout(Duration::from_millis(50), opener.receive(0)).await;
                assert!(another.is_err(), "two scans at a time");
                made.fetch_add(1, Ordering::Relaxed);
                opener.send(&ANSWER.encode(), &[]).await.unwrap();
            }
        });
        let mut asking = JoinSet::new();
        for _ in 0..250 {
            let client = client.clone();
            asking.spawn(async move { client.scan("test").await });
        }
        for outcome in asking.join_all().await {
            outcome.unwrap();
        }
        // One for the first, and one that began after all others had asked.
        assert_eq!(scans.load(Ordering::Relaxed), 2);
        client.scan("test").await.unwrap();
        assert_eq!(scans.load(Ordering::Relaxed), 3, "an old one does not count");
        serving.abort();
        assert!(serving.await.unwrap_err().is_cancelled());
        assert_eq!(
            client.scan("test").await.unwrap_err().code,
            ErrorCode::OpenerNetns
        );
    }
}

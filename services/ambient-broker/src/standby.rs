//! The time before this broker serves, while another one on this node still does: it asks the cluster what it would need, tells
//! the kubelet whether it could serve, and touches nothing and nobody on the node. A rollout ends the old agent only when the new one says that it is ready.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use sluice_proto::paths::RunDir;
use sluice_proto::transport::uds::{BindError, check_free};
use sluice_runtime::lease::{Candidate, Lease, LeaseError, Turn};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::health::{NOT_SYNCED, wait_until};
use crate::http::{Handler, Reply, TEXT, patience, reply, serve_connection, verdict};
use crate::service::{StartError, listen};
use crate::source::{PodSource, SourceEvent};

/// Between two looks whether the other broker has ended.
const LOOK: Duration = Duration::from_millis(20);

/// Asked to stop, a broker goes on standing by for so long: where both agents are to leave the node, the executor of this one may
/// have taken over from the other's, and nobody else would have it clean up.
const LAST_CHANCE: Duration = Duration::from_secs(3);

/// Why this broker cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum StandbyError {
    /// Another broker serves, or that cannot be known.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// Another process has one of our sockets.
    #[error(transparent)]
    Occupied(#[from] BindError),
    /// The port of probes cannot be had.
    #[error(transparent)]
    Listen(#[from] StartError),
}

/// Takes the right to serve at `run`, or fails if another broker has it.
pub fn take_now(run: &RunDir) -> Result<Lease, StandbyError> {
    // Who has the place is told by the socket.
    for socket in [run.workload_socket(), run.http_socket(), run.node_socket()] {
        check_free(&socket)?;
    }
    Ok(Candidate::at(&run.broker_lease())?.take_now()?)
}

/// Takes the right to serve at `run` once no other broker has it; `None`: `stop` came 3 s before. Meanwhile probes are answered at
/// `address`: ready is who has been told everything by `source`.
pub async fn take(
    run: &RunDir,
    address: Option<SocketAddr>,
    source: &dyn PodSource,
    stop: &CancellationToken,
) -> Result<Option<Lease>, StandbyError> {
    let mut candidate = match Candidate::at(&run.broker_lease())?.try_take()? {
        Turn::Ours(lease) => return Ok(Some(lease)),
        Turn::Theirs(candidate) => candidate,
    };
    candidate.tell_waiting();
    // Dropped on return: the port is free then.
    let listener = match address {
        None => None,
        Some(address) => Some(listen(address).await?),
    };
    let probes = Probes::default();
    let _over = probes.over.clone().drop_guard();
    let connections = TaskTracker::new();
    let mut events = source.events();
    let mut look = tokio::time::interval(LOOK);
    let mut over = pin!(async {
        stop.cancelled().await;
        tokio::time::sleep(LAST_CHANCE).await;
    });
    loop {
        tokio::select! {
            () = &mut over => return Ok(None),
            Some(event) = events.next() => {
                if matches!(event, SourceEvent::Synced) {
                    probes.synced.store(true, Ordering::Relaxed);
                }
            }
            stream = accept(listener.as_ref()) => {
                serve_connection(stream, probes.clone(), &connections, &probes.over);
            }
            _ = look.tick() => {
                candidate = match candidate.try_take()? {
                    Turn::Ours(lease) => return Ok(Some(lease)),
                    Turn::Theirs(candidate) => candidate,
                };
            }
        }
    }
}

/// The next connection; never without a listener.
async fn accept(listener: Option<&TcpListener>) -> TcpStream {
    let Some(listener) = listener else {
        return std::future::pending().await;
    };
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// What the kubelet asks meanwhile.
#[derive(Debug, Clone, Default)]
struct Probes {
    synced: Arc<AtomicBool>,
    over: CancellationToken,
}

impl Probes {
    fn is_ready(&self) -> bool {
        self.synced.load(Ordering::Relaxed)
    }
}

impl Handler for Probes {
    async fn handle(&self, request: Request<Incoming>) -> Reply {
        match request.uri().path() {
            "/healthz" => verdict(&[]),
            "/readyz" => match patience(request.uri().query()) {
                Ok(patience) => {
                    tokio::select! {
                        () = wait_until(|| self.is_ready()) => {}
                        () = tokio::time::sleep(patience) => {}
                        () = self.over.cancelled() => {}
                    }
                    let missing = (!self.is_ready()).then(|| NOT_SYNCED.to_owned());
                    verdict(missing.as_slice())
                }
                Err(why) => reply(StatusCode::BAD_REQUEST, TEXT, why + "\n"),
            },
            _ => reply(
                StatusCode::SERVICE_UNAVAILABLE,
                TEXT,
                "standing by: another broker serves this node\n",
            ),
        }
    }
}

//! The executor's four sockets. Everyone dials it; it dials nobody.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use sluice_proto::paths::RunDir;
use sluice_proto::pb::cni::cni_service_server::CniServiceServer;
use sluice_proto::pb::executor::netns_executor_server::NetnsExecutorServer;
use sluice_proto::transport::seqpacket::SeqpacketListener;
use sluice_proto::transport::uds::{BindError, PeerPolicy, bind_stream};
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;

use crate::drift;
use crate::node::Node;
use crate::sandbox::{recovery, unused};
use crate::self_test;

mod cni;
mod convert;
mod descriptor;
mod executor;
mod hand_over;
mod listen;
mod opener;

/// A list of a node's attachments (GC) is the longest request of the plugin.
const MAX_CNI_MESSAGE: usize = 512 * 1024;
/// Addresses of all pods of a node are the longest request of the broker.
const MAX_EXECUTOR_MESSAGE: usize = 1024 * 1024;
/// Enough for a broker that works on every pod of a node at once.
const MAX_STREAMS: u32 = 512;

/// Who may connect.
#[derive(Debug, Clone)]
pub struct Peers {
    /// To the plugin's socket.
    pub plugin: PeerPolicy,
    /// To the broker's two sockets.
    pub broker: PeerPolicy,
    /// To the opener's socket.
    pub opener: PeerPolicy,
    /// Group of the broker's sockets.
    pub broker_gid: u32,
}

/// The bound sockets.
#[derive(Debug)]
pub struct Sockets {
    cni: UnixListener,
    executor: UnixListener,
    descriptor: SeqpacketListener,
    opener: SeqpacketListener,
    peers: Peers,
}

impl Sockets {
    /// Binds all of them. Call it inside a tokio runtime.
    pub fn bind(run: &RunDir, peers: Peers) -> Result<Self, BindError> {
        let broker = Some(peers.broker_gid);
        Ok(Self {
            cni: bind_stream(&run.cni_socket(), 0o600, None)?,
            executor: bind_stream(&run.executor_socket(), 0o660, broker)?,
            descriptor: SeqpacketListener::bind(&run.descriptor_socket(), 0o660, broker)?,
            opener: SeqpacketListener::bind(&run.opener_socket(), 0o600, None)?,
            peers,
        })
    }
}

/// Serves until `stop` is cancelled.
pub async fn serve(node: Arc<Node>, sockets: Sockets, stop: CancellationToken) {
    let Sockets {
        cni,
        executor,
        descriptor,
        opener,
        peers,
    } = sockets;
    let background: [std::pin::Pin<Box<dyn Future<Output = ()> + Send>>; 9] = [
        Box::pin(Arc::clone(&node.hub).beat()),
        Box::pin(drift::watch_pods(Arc::clone(&node))),
        Box::pin(drift::watch_host(Arc::clone(&node))),
        Box::pin(drift::watch_interfaces(Arc::clone(&node))),
        Box::pin(recovery::run(Arc::clone(&node))),
        Box::pin(unused::watch(Arc::clone(&node))),
        Box::pin(self_test::run(Arc::clone(&node))),
        Box::pin(descriptor::serve(
            Arc::clone(&node),
            descriptor,
            peers.broker.clone(),
        )),
        Box::pin(opener::serve(Arc::clone(&node), opener, peers.opener.clone())),
    ];
    let background: Vec<_> = background.into_iter().map(tokio::spawn).collect();
    let plugins = listen::incoming(Arc::clone(&node), cni, peers.plugin.clone(), "cni");
    let brokers = listen::incoming(Arc::clone(&node), executor, peers.broker.clone(), "executor");
    let cni_service =
        CniServiceServer::new(cni::Cni::new(Arc::clone(&node))).max_decoding_message_size(MAX_CNI_MESSAGE);
    let executor_service = NetnsExecutorServer::new(executor::Executor::new(Arc::clone(&node)))
        .max_decoding_message_size(MAX_EXECUTOR_MESSAGE);
    let stopped = || stop.clone().cancelled_owned();
    let outcome = tokio::join!(
        // One service a socket: no router is needed.
        grpc().serve_with_incoming_shutdown(cni_service, plugins, stopped()),
        // The broker's watch never ends by itself, so nobody waits for it.
        async {
            tokio::select! {
                served = grpc().serve_with_incoming(executor_service, brokers) => served,
                () = stopped() => Ok(()),
            }
        }
    );
    for served in [outcome.0, outcome.1] {
        if let Err(error) = served {
            tracing::error!(error = %sluice_runtime::telemetry::chain(&error), "server ended");
        }
    }
    for task in background {
        task.abort();
    }
}

fn grpc() -> tonic::transport::Server {
    tonic::transport::Server::builder()
        .max_concurrent_streams(MAX_STREAMS)
        // A peer that vanished without closing, or stopped reading, is noticed.
        .http2_keepalive_interval(Some(Duration::from_secs(30)))
        .http2_keepalive_timeout(Some(Duration::from_secs(10)))
}

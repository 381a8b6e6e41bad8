//! Accepting: the peer is checked first, then its first byte is awaited in a task of its own.

use std::sync::Arc;
use std::time::Duration;

use sluice_proto::transport::preamble::PreambleStream;
use sluice_proto::transport::uds::{Peer, PeerPolicy};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;

use crate::node::Node;

/// Connections that wait for tonic to take them.
const QUEUE: usize = 64;

/// What a handler knows about its connection.
#[derive(Debug, Clone)]
pub(super) struct Connection {
    pub(super) preamble: sluice_proto::transport::preamble::Connection,
    pub(super) accepted: Instant,
}

/// A connection that was let in.
#[derive(Debug)]
pub(super) struct Stream {
    stream: PreambleStream,
    accepted: Instant,
}

impl Connected for Stream {
    type ConnectInfo = Connection;

    fn connect_info(&self) -> Connection {
        Connection {
            preamble: self.stream.connect_info(),
            accepted: self.accepted,
        }
    }
}

/// Checks a peer; a refused one is logged and counted.
pub(super) fn admit(node: &Node, policy: &PeerPolicy, peer: Peer, socket: &'static str) -> bool {
    let Err(refused) = policy.check(peer) else {
        return true;
    };
    tracing::warn!(target: "audit", socket, error = %refused, "peer refused");
    node.metrics.refused_peer(socket);
    false
}

/// The connections of a listener that may be served.
pub(super) fn incoming(
    node: Arc<Node>,
    listener: UnixListener,
    policy: PeerPolicy,
    socket: &'static str,
) -> ReceiverStream<std::io::Result<Stream>> {
    let (queue, streams) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let (node, policy, queue) = (Arc::clone(&node), policy.clone(), queue.clone());
                    tokio::spawn(async move {
                        if let Some(stream) = prepare(&node, &policy, stream, socket).await {
                            // The server has ended if nobody takes it.
                            let _ = queue.send(Ok(stream)).await;
                        }
                    });
                }
                Err(error) => {
                    // Out of descriptors: nothing better comes of trying at once.
                    tracing::error!(socket, %error, "cannot accept");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    });
    ReceiverStream::new(streams)
}

async fn prepare(
    node: &Node,
    policy: &PeerPolicy,
    stream: UnixStream,
    socket: &'static str,
) -> Option<Stream> {
    let accepted = Instant::now();
    let peer = Peer::of(&stream).ok()?;
    if !admit(node, policy, peer, socket) {
        return None;
    }
    match PreambleStream::accept(stream).await {
        Ok(stream) => Some(Stream { stream, accepted }),
        Err(error) => {
            use sluice_proto::transport::descriptors::TransportError;
            match &error {
                TransportError::TooManyDescriptors { .. } => node.metrics.refused_descriptor("too-many"),
                TransportError::DescriptorsLost => node.metrics.refused_descriptor("lost"),
                TransportError::Closed => return None,
                _ => {}
            }
            tracing::warn!(target: "audit", socket, peer_uid = peer.uid, peer_pid = peer.pid,
                error = %sluice_runtime::telemetry::chain(&error), "connection refused");
            None
        }
    }
}

impl tokio::io::AsyncRead for Stream {
    fn poll_read(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
        buf: &mut tokio::io::ReadBuf<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::pin::Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl tokio::io::AsyncWrite for Stream {
    fn poll_write(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
        buf: &[u8],
    ) -> std::task::Poll<std::io::Result<usize>> {
        std::pin::Pin::new(&mut self.stream).poll_write(cx, buf)
    }
    fn poll_flush(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::pin::Pin::new(&mut self.stream).poll_flush(cx)
    }
    fn poll_shutdown(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::pin::Pin::new(&mut self.stream).poll_shutdown(cx)
    }
    fn poll_write_vectored(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
        bufs: &[std::io::IoSlice<'_>],
    ) -> std::task::Poll<std::io::Result<usize>> {
        std::pin::Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }
    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

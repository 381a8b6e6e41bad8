//! The accept loops: each connection passes its door, then has a task of its own. All end when `stop` is cancelled.

use std::time::Duration;

use sluice_proto::pb::workload::pod_netns_server::PodNetnsServer;
use sluice_proto::transport::kept::KeptListener;
use tokio::net::{TcpListener, UnixStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::server::Server;

use crate::door::Door;
use crate::http::{Handler, serve_connection};
use crate::lifecycle::Node;
use crate::workload::Workloads;

pub(crate) fn serve_unix<H: Handler>(
    mut listener: KeptListener,
    door: Door,
    handler: H,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) {
    let (connections, stop) = (tasks.clone(), stop.clone());
    tasks.spawn(async move {
        while let Some(stream) = accept(&mut listener, &door, &stop).await {
            serve_connection(stream, handler.clone(), &connections, &stop);
        }
    });
}

pub(crate) fn serve_tcp<H: Handler>(
    listener: TcpListener,
    handler: H,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) {
    let (connections, stop) = (tasks.clone(), stop.clone());
    tasks.spawn(async move {
        loop {
            let accepted = tokio::select! {
                () = stop.cancelled() => return,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, _)) => serve_connection(stream, handler.clone(), &connections, &stop),
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    });
}

/// The next connection that may be served; `None`: asked to stop.
async fn accept(listener: &mut KeptListener, door: &Door, stop: &CancellationToken) -> Option<UnixStream> {
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return None,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok(stream) if door.admits(&stream) => return Some(stream),
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

pub(crate) fn serve_workloads(
    listener: KeptListener,
    door: Door,
    workloads: Workloads,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) {
    let stop = stop.clone();
    tasks.spawn(async move {
        let served = Server::builder()
            .add_service(PodNetnsServer::new(workloads))
            .serve_with_incoming(incoming(listener, door, stop.clone()));
        tokio::select! {
            served = served => {
                if let Err(error) = served {
                    tracing::error!(%error, "workload server ended");
                }
            }
            // Subscriptions never end by themselves.
            () = stop.cancelled() => {}
        }
    });
}

/// Serves the installer, until it has been told the last word, which is found out after `stop`. One that comes as late as that is
/// told, too: before `end`.
pub(crate) fn serve_node(
    listener: KeptListener,
    door: Door,
    node: Node,
    tasks: &TaskTracker,
    stop: &CancellationToken,
    end: &CancellationToken,
) {
    tasks.spawn(node.clone().conclude(stop.clone()));
    tasks.spawn(node.clone().complain(stop.clone()));
    let end = end.clone();
    tasks.spawn(async move {
        let server = Server::builder().add_service(node.server());
        // When no more connections come, those that are there are served to the end of their streams.
        let incoming = incoming(listener, door, end);
        let served = server.serve_with_incoming_shutdown(incoming, std::future::pending());
        if let Err(error) = served.await {
            tracing::error!(%error, "node server ended");
        }
    });
}

fn incoming(
    listener: KeptListener,
    door: Door,
    stop: CancellationToken,
) -> impl futures_util::Stream<Item = std::io::Result<UnixStream>> {
    futures_util::stream::unfold((listener, door, stop), |mut state| async move {
        let stream = accept(&mut state.0, &state.1, &state.2).await?;
        Some((Ok(stream), state))
    })
}

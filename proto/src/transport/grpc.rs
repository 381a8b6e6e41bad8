//! A tonic client over one connected Unix stream, without name resolution, balancing and reconnection: whoever
//! uses it knows when its connection ends, and the plugin's start-up pays only for what it uses.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::UnixStream;
use tonic::body::Body;

/// The URI every request names; nobody looks at it, but HTTP/2 wants a scheme and an authority.
pub fn origin() -> http::Uri {
    http::Uri::from_static("http://sluice.invalid")
}

/// One HTTP/2 connection; clones share it. Use it as `Client::with_origin(channel, origin())`.
#[derive(Debug, Clone)]
pub struct UdsChannel {
    requests: http2::SendRequest<Body>,
}

impl UdsChannel {
    /// Starts HTTP/2 on `stream`; a background task drives it until the last clone is gone.
    pub async fn handshake(stream: UnixStream) -> Result<Self, hyper::Error> {
        let (requests, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await?;
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "gRPC connection ended");
            }
        });
        Ok(Self { requests })
    }

    /// Whether the connection has ended.
    pub fn is_closed(&self) -> bool {
        self.requests.is_closed()
    }
}

impl tower_service::Service<http::Request<Body>> for UdsChannel {
    type Response = http::Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.requests.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(self.requests.send_request(request))
    }
}

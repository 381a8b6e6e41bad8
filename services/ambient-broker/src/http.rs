//! HTTP over Unix sockets (and TCP where asked for): `/metrics`, `/healthz`, `/readyz`; and the serving loop that
//! the compatibility endpoint shares.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode, header};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::health::Health;
use crate::metrics::Metrics;
use crate::registry::Registry;
use crate::zds::Zds;

/// A peer that does not send its request's head within this time is cut off.
const HEAD: Duration = Duration::from_secs(5);
/// The executor's figures are left out if it does not tell them within this time.
const EXECUTOR: Duration = Duration::from_secs(1);
/// The longest that `/readyz` is asked to wait.
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// Longest head of a request in bytes.
const MAX_HEAD: usize = 8 * 1024;

/// A response.
pub(crate) type Reply = Response<Full<Bytes>>;

/// Answers requests.
pub(crate) trait Handler: Clone + Send + Sync + 'static {
    fn handle(&self, request: Request<Incoming>) -> impl Future<Output = Reply> + Send;
}

/// Serves one connection in a task of its own; `stop` lets requests under way finish.
pub(crate) fn serve_connection<S, H>(stream: S, handler: H, tasks: &TaskTracker, stop: &CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    H: Handler,
{
    let stop = stop.clone();
    tasks.spawn(async move {
        let service = service_fn(move |request| {
            let handler = handler.clone();
            async move { Ok::<_, Infallible>(handler.handle(request).await) }
        });
        let mut http = hyper::server::conn::http1::Builder::new();
        http.timer(TokioTimer::new())
            .header_read_timeout(HEAD)
            .max_buf_size(MAX_HEAD);
        let connection = http.serve_connection(TokioIo::new(stream), service);
        tokio::pin!(connection);
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            () = stop.cancelled() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "HTTP connection ended");
        }
    });
}

/// A response with a text body.
pub(crate) fn reply(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Reply {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    response
}

pub(crate) const TEXT: &str = "text/plain; charset=utf-8";
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Metrics and health.
#[derive(Debug, Clone)]
pub(crate) struct Monitoring {
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) health: Health,
    pub(crate) zds: Zds,
    pub(crate) registry: Registry,
    pub(crate) executor: crate::executor::Executor,
    /// The process is to end: nobody is kept waiting.
    pub(crate) stop: CancellationToken,
}

impl Handler for Monitoring {
    async fn handle(&self, request: Request<Incoming>) -> Reply {
        match request.uri().path() {
            "/metrics" => {
                self.metrics.standing(&self.registry.reports());
                self.metrics.zds(&self.zds.status());
                self.metrics.process(self.executor.repaired());
                if let Some(report) = self.health.installer() {
                    self.metrics.installer(&report);
                }
                let executor = tokio::time::timeout(EXECUTOR, self.executor.node_status()).await;
                match self.metrics.render(executor.ok().and_then(Result::ok).as_ref()) {
                    Ok(text) => reply(StatusCode::OK, OPENMETRICS, text),
                    Err(_) => reply(
                        StatusCode::INTERNAL_SERVER_ERROR,
                        TEXT,
                        "metrics cannot be rendered\n",
                    ),
                }
            }
            "/healthz" => verdict(self.health.stuck().as_slice()),
            "/readyz" => match patience(request.uri().query()) {
                Ok(patience) => verdict(&self.not_ready_within(patience).await),
                Err(why) => reply(StatusCode::BAD_REQUEST, TEXT, why + "\n"),
            },
            _ => reply(StatusCode::NOT_FOUND, TEXT, "/metrics, /healthz, /readyz\n"),
        }
    }
}

impl Monitoring {
    /// What is missing for readiness. Whoever waits for it does not hold up the end of the process.
    async fn not_ready_within(&self, patience: Duration) -> Vec<String> {
        tokio::select! {
            reasons = self.health.not_ready_within(patience) => reasons,
            () = self.stop.cancelled() => self.health.not_ready_because(),
        }
    }
}

/// How long `/readyz` may wait, from its query.
pub(crate) fn patience(query: Option<&str>) -> Result<Duration, String> {
    let Some(query) = query else {
        return Ok(Duration::ZERO);
    };
    query
        .strip_prefix("wait=")
        .and_then(|seconds| seconds.parse().ok())
        .map(Duration::from_secs)
        .filter(|patience| *patience <= LONGEST_WAIT)
        .ok_or_else(|| {
            format!(
                "/readyz?{query}: only wait=SECONDS is allowed, from 0 to {}",
                LONGEST_WAIT.as_secs()
            )
        })
}

pub(crate) fn verdict(reasons: &[String]) -> Reply {
    if reasons.is_empty() {
        reply(StatusCode::OK, TEXT, "ok\n")
    } else {
        reply(StatusCode::SERVICE_UNAVAILABLE, TEXT, reasons.join("\n") + "\n")
    }
}

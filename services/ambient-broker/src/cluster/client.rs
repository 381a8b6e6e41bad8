//! The connection to the API server.
//!
//! HTTP/1.1, one connection a watch and a few kept for everything else. A peer that vanished is noticed by TCP
//! (keepalive, and `TCP_USER_TIMEOUT` for what was sent), one that is there but silent by deadlines.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::Client;
use kube::client::{Body, ConfigExt};
use serde::de::DeserializeOwned;
use tower::{BoxError, Layer, ServiceExt};

use super::access::{Access, ConnectError, encode, in_cluster, kubeconfig, server};
use super::failure::ApiError;
use super::guard::{Gate, Guard};
use super::troubles::Troubles;

/// How long things may take.
#[derive(Debug, Clone)]
pub struct Timing {
    /// Until an answer begins.
    pub head: Duration,
    /// A whole list, all pages.
    pub list: Duration,
    /// A live look at one pod and its namespace, for an ADD that waits.
    pub lookup: Duration,
    /// Everything else that is asked once.
    pub call: Duration,
    /// The server ends a watch after this time; it is begun again where it ended.
    pub watch: Duration,
    /// A watch that did not end by itself this long after is given up.
    pub watch_grace: Duration,
    /// First and longest pause between attempts.
    pub retry: (Duration, Duration),
    /// An Event that says the same again is counted after this time at the earliest.
    pub event_repeat: Duration,
    /// The last look at the DaemonSet, when the process is asked to stop.
    pub last_look: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            head: Duration::from_secs(10),
            list: Duration::from_secs(30),
            lookup: Duration::from_secs(2),
            call: Duration::from_secs(5),
            watch: Duration::from_mins(2),
            watch_grace: Duration::from_secs(5),
            retry: (Duration::from_millis(200), Duration::from_secs(30)),
            event_repeat: Duration::from_mins(10),
            last_look: Duration::from_millis(1500),
        }
    }
}

/// Where the certificates of the server's authority come from, for those who need them too.
#[derive(Debug, Clone)]
enum Authority {
    File(PathBuf),
    Pem(String),
}

/// Asks the API server. Clones share connections, pauses and troubles.
#[derive(Clone)]
pub(super) struct Api {
    client: Client,
    gate: Arc<Gate>,
    authority: Authority,
    /// `https://host:port`.
    pub(super) server: String,
    pub(super) timing: Timing,
    pub(super) troubles: Troubles,
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api")
            .field("server", &self.server)
            .finish_non_exhaustive()
    }
}

/// A request as kube builds it.
pub(super) type Built = Result<http::Request<Vec<u8>>, kube::core::request::Error>;

impl Api {
    /// Sets the client up; connects nowhere yet. Call it inside a tokio runtime.
    pub(super) async fn new(access: &Access, timing: Timing) -> Result<Self, ConnectError> {
        let mut config = match access {
            Access::InCluster { host, port, secrets } => in_cluster(host, *port, secrets)?,
            Access::Kubeconfig(path) => kubeconfig(path).await?,
        };
        let server = server(&config)?;
        let authority = match &config.root_cert_file {
            Some(path) => Authority::File(path.clone()),
            None => Authority::Pem(encode(config.root_cert.as_deref().unwrap_or_default())),
        };
        let gate = Gate::new(config.auth_info.token_file.take().map(PathBuf::from), timing.head);
        let setup = |source| ConnectError::Setup {
            server: server.clone(),
            source,
        };
        let https = config
            .rustls_https_connector_with_connector(connector())
            .map_err(setup)?;
        let http = hyper_util::client::legacy::Client::builder(TokioExecutor::new())
            .pool_idle_timeout(Duration::from_secs(30))
            .pool_max_idle_per_host(4)
            .build::<_, Body>(https)
            .map_err(BoxError::from);
        let service = config.base_uri_layer().layer(http);
        let service = tower::util::option_layer(config.auth_layer().map_err(setup)?).layer(service);
        Ok(Self {
            client: Client::new(Guard::new(service, Arc::clone(&gate)), "default"),
            gate,
            authority,
            server,
            timing,
            troubles: Troubles::default(),
        })
    }

    /// The answer's text. `what` names the request in errors, e.g. `get pod`.
    pub(super) async fn text(
        &self,
        what: &str,
        request: Built,
        within: Duration,
    ) -> Result<String, ApiError> {
        let request = request.map_err(|error| ApiError::unexpected(what, &error))?;
        match tokio::time::timeout(within, self.client.request_text(request)).await {
            Ok(answer) => answer
                .map_err(|error| ApiError::new(what, &error))
                .map_err(|e| self.paused(e)),
            Err(_) => Err(ApiError::silent(what, within)),
        }
    }

    /// The answer, read as `T`.
    pub(super) async fn read<T: DeserializeOwned>(
        &self,
        what: &str,
        request: Built,
        within: Duration,
    ) -> Result<T, ApiError> {
        let text = self.text(what, request, within).await?;
        serde_json::from_str(&text).map_err(|error| ApiError::unexpected(what, &error))
    }

    /// As [`Api::read`]; `None`: there is no such object.
    pub(super) async fn find<T: DeserializeOwned>(
        &self,
        what: &str,
        request: Built,
        within: Duration,
    ) -> Result<Option<T>, ApiError> {
        match self.read(what, request, within).await {
            Ok(found) => Ok(Some(found)),
            Err(error) if error.kind == super::Kind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Begins a watch.
    pub(super) async fn watch<T: DeserializeOwned + Clone>(
        &self,
        what: &str,
        request: Built,
    ) -> Result<
        impl futures_util::Stream<Item = Result<kube::core::WatchEvent<T>, kube::Error>> + use<T>,
        ApiError,
    > {
        let request = request.map_err(|error| ApiError::unexpected(what, &error))?;
        let events = self.client.request_events(request).await;
        events.map_err(|error| self.paused(ApiError::new(what, &error)))
    }

    /// PEM certificates of the server's authority, as they are now.
    pub(super) fn authority(&self) -> Result<String, ConnectError> {
        match &self.authority {
            Authority::Pem(pem) => Ok(pem.clone()),
            Authority::File(path) => std::fs::read_to_string(path).map_err(|source| ConnectError::Read {
                path: path.clone(),
                source,
            }),
        }
    }

    /// The answer's body does not say how long to wait, its head did.
    fn paused(&self, mut error: ApiError) -> ApiError {
        error.wait = error.wait.max(self.gate.pause());
        error
    }
}

fn connector() -> HttpConnector {
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_nodelay(true);
    http.set_connect_timeout(Some(Duration::from_secs(3)));
    // A vanished peer is noticed within 10 + 3 * 5 s on an idle connection, 20 s on one that waits for an ack (tcp(7)).
    http.set_keepalive(Some(Duration::from_secs(10)));
    http.set_keepalive_interval(Some(Duration::from_secs(5)));
    http.set_keepalive_retries(Some(3));
    http.set_tcp_user_timeout(Some(Duration::from_secs(20)));
    http
}

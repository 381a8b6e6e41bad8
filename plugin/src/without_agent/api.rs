//! Two GETs to the API server: pod and namespace, each on a connection of its own, all within one deadline.
//!
//! hyper and tokio are linked already for the call to the executor, so HTTP/1.1 over rustls costs the plugin the least
//! and is kept up by others; no Kubernetes client is needed for two objects of which little is read.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Empty, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use sluice_proto::code::ErrorCode;
use sluice_proto::id::PodRef;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::client::Resumption;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::{self, ClientConfig};

use super::kubeconfig::Credentials;
use crate::deadline::Deadline;

/// Longest answer, in bytes. An object in etcd has at most 1.5 MiB (`--max-request-bytes`), its JSON form little more.
const MAX_ANSWER: usize = 3 << 20;

/// Longest text of a `Status` object that is passed on, in characters.
const MAX_REASON: usize = 120;

/// The metadata is all that is read, and for objects with many containers the least of it; a server that does not know
/// the form sends everything (Kubernetes API concepts, "Metadata-only fetches").
const METADATA_ONLY: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json";

/// The API server gave no object.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ApiError {
    #[error("cannot start")]
    Start(#[source] io::Error),
    #[error("no TLS")]
    Tls(#[source] rustls::Error),
    #[error("cannot connect to {server}")]
    Connect {
        server: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("no TLS connection to {server}")]
    Handshake {
        server: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("{server} did not answer GET {what}")]
    Exchange {
        server: SocketAddr,
        what: &'static str,
        #[source]
        source: hyper::Error,
    },
    #[error("{server} gave no answer within {waited:.1?}")]
    Deadline {
        server: SocketAddr,
        waited: std::time::Duration,
    },
    #[error("the answer of {server} to GET {what} is longer than {MAX_ANSWER} bytes")]
    TooLong { server: SocketAddr, what: &'static str },
    #[error("{server} answers GET {what} by {status}{}", brackets(reason))]
    Status {
        server: SocketAddr,
        what: &'static str,
        status: StatusCode,
        reason: String,
    },
}

fn brackets(reason: &str) -> String {
    if reason.is_empty() {
        String::new()
    } else {
        format!(" ({reason})")
    }
}

impl ApiError {
    pub(crate) fn error_code(&self) -> ErrorCode {
        match self {
            Self::Status { status, .. } => match *status {
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => ErrorCode::ApiCredentials,
                StatusCode::NOT_FOUND => ErrorCode::PodUnconfirmed,
                _ => ErrorCode::Undecided,
            },
            _ => ErrorCode::Undecided,
        }
    }
}

/// One API server.
pub(crate) struct Api {
    credentials: Credentials,
    tls: TlsConnector,
}

impl Api {
    pub(crate) fn new(mut credentials: Credentials) -> Result<Self, ApiError> {
        let roots = std::mem::replace(&mut credentials.roots, rustls::RootCertStore::empty());
        let mut tls = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(ApiError::Tls)?
            .with_root_certificates(roots)
            .with_no_client_auth();
        tls.alpn_protocols = vec![b"http/1.1".to_vec()];
        tls.resumption = Resumption::disabled();
        Ok(Self {
            credentials,
            tls: TlsConnector::from(Arc::new(tls)),
        })
    }

    /// Both objects as JSON. Blocking; the calling thread's network namespace is used.
    pub(crate) fn pod_and_namespace(
        &self,
        pod: &PodRef,
        deadline: Deadline,
    ) -> Result<(Bytes, Bytes), ApiError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(ApiError::Start)?;
        let waited = deadline.left();
        let namespace = format!("/api/v1/namespaces/{}", pod.namespace);
        let both = async {
            let object = self.get("pod", &format!("{namespace}/pods/{}", pod.name)).await?;
            Ok((object, self.get("namespace", &namespace).await?))
        };
        let timed_out = || ApiError::Deadline {
            server: self.credentials.server,
            waited,
        };
        let answer = runtime.block_on(async { tokio::time::timeout(waited, both).await });
        // The process ends soon: nothing is waited for, not even a connection's end.
        std::mem::forget(runtime);
        answer.map_err(|_| timed_out())?
    }

    async fn get(&self, what: &'static str, path: &str) -> Result<Bytes, ApiError> {
        let server = self.credentials.server;
        let failed = |source| ApiError::Exchange { server, what, source };
        let stream = TokioIo::new(self.connect().await?);
        let (mut requests, connection) = hyper::client::conn::http1::handshake(stream)
            .await
            .map_err(failed)?;
        tokio::spawn(connection);
        let request = Request::get(path)
            .header(header::HOST, server.to_string())
            .header(header::AUTHORIZATION, &self.credentials.bearer)
            .header(header::ACCEPT, METADATA_ONLY)
            .header(
                header::USER_AGENT,
                concat!("sluice-cni/", env!("CARGO_PKG_VERSION")),
            )
            .header(header::CONNECTION, "close")
            .body(Empty::<Bytes>::new())
            .map_err(|error| ApiError::Start(io::Error::other(error)))?;
        let response = requests.send_request(request).await.map_err(failed)?;
        let status = response.status();
        let body = self.body(what, response.into_body()).await?;
        // Redirects, too, are not what was asked for: nobody else gets the token.
        if status != StatusCode::OK {
            let reason = reason(&body);
            return Err(ApiError::Status {
                server,
                what,
                status,
                reason,
            });
        }
        Ok(body)
    }

    async fn connect(&self) -> Result<TlsStream<TcpStream>, ApiError> {
        let server = self.credentials.server;
        let stream = TcpStream::connect(server)
            .await
            .map_err(|source| ApiError::Connect { server, source })?;
        self.tls
            .connect(self.credentials.name.clone(), stream)
            .await
            .map_err(|source| ApiError::Handshake { server, source })
    }

    async fn body(&self, what: &'static str, body: Incoming) -> Result<Bytes, ApiError> {
        let server = self.credentials.server;
        match Limited::new(body, MAX_ANSWER).collect().await {
            Ok(body) => Ok(body.to_bytes()),
            Err(error) if error.is::<LengthLimitError>() => Err(ApiError::TooLong { server, what }),
            Err(error) => Err(match error.downcast::<hyper::Error>() {
                Ok(source) => ApiError::Exchange {
                    server,
                    what,
                    source: *source,
                },
                Err(error) => ApiError::Start(io::Error::other(error)),
            }),
        }
    }
}

/// `message` of the API server's `Status` object, which says who may not do what.
fn reason(body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Status {
        message: String,
    }
    serde_json::from_slice::<Status>(body).map_or_else(
        |_| String::new(),
        |status| {
            status
                .message
                .chars()
                .filter(|c| !c.is_control())
                .take(MAX_REASON)
                .collect()
        },
    )
}

//! The connection to the API server: from the pod's own ServiceAccount, or from a kubeconfig file.
//!
//! HTTP/1.1, one connection a watch and a few kept for everything else. A peer that vanished is noticed by TCP
//! (keepalive, and `TCP_USER_TIMEOUT` for what was sent), one that is there but silent by deadlines.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::Client;
use kube::client::{Body, ConfigExt};
use kube::config::{AuthInfo, Config, KubeConfigOptions, Kubeconfig};
use serde::de::DeserializeOwned;
use tower::{BoxError, Layer, ServiceExt};

use super::failure::ApiError;
use super::guard::{Gate, Guard};
use super::troubles::Troubles;

/// Where the kubelet puts a pod's ServiceAccount.
pub const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// How the API server is found and asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// As a pod: `KUBERNETES_SERVICE_HOST` and `KUBERNETES_SERVICE_PORT`, with `token` and `ca.crt` in a directory.
    InCluster {
        /// The address, an IP address as a rule.
        host: String,
        /// The port.
        port: u16,
        /// The directory.
        secrets: PathBuf,
    },
    /// The current context of a kubeconfig file.
    Kubeconfig(PathBuf),
}

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
            last_look: Duration::from_millis(1500),
        }
    }
}

/// The API server cannot be asked at all: something that was configured is wrong.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The kubeconfig file.
    #[error("cannot use kubeconfig {}", path.display())]
    Kubeconfig {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: kube::config::KubeconfigError,
    },
    /// A way to log in that needs a program.
    #[error("kubeconfig {} logs in through a program (exec, auth-provider); use a token, tokenFile or certificate", path.display())]
    Program {
        /// Which file.
        path: PathBuf,
    },
    /// The API server's address.
    #[error("{text:?} is no address of an API server")]
    Address {
        /// As given.
        text: String,
    },
    /// Certificates or credentials.
    #[error("cannot set up the connection to {server}")]
    Setup {
        /// The API server.
        server: String,
        /// Why.
        #[source]
        source: kube::Error,
    },
    /// A file of the ServiceAccount.
    #[error("cannot read {}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
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

fn in_cluster(host: &str, port: u16, secrets: &Path) -> Result<Config, ConnectError> {
    let ip6 = host.parse::<std::net::Ipv6Addr>().is_ok();
    let text = if ip6 {
        format!("https://[{host}]:{port}")
    } else {
        format!("https://{host}:{port}")
    };
    let Ok(address) = text.parse() else {
        return Err(ConnectError::Address { text });
    };
    let mut config = Config::new(address);
    config.root_cert_file = Some(secrets.join("ca.crt"));
    config.auth_info = AuthInfo {
        token_file: Some(secrets.join("token").to_string_lossy().into_owned()),
        ..AuthInfo::default()
    };
    Ok(config)
}

async fn kubeconfig(path: &Path) -> Result<Config, ConnectError> {
    let failed = |source| ConnectError::Kubeconfig {
        path: path.to_owned(),
        source,
    };
    let file = Kubeconfig::read_from(path).map_err(failed)?;
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
        .await
        .map_err(failed)?;
    if config.auth_info.exec.is_some() || config.auth_info.auth_provider.is_some() {
        return Err(ConnectError::Program {
            path: path.to_owned(),
        });
    }
    Ok(config)
}

/// The server's address with its port, as others dial it.
fn server(config: &Config) -> Result<String, ConnectError> {
    let url = &config.cluster_url;
    let text = || ConnectError::Address {
        text: url.to_string(),
    };
    let host = url.host().ok_or_else(text)?;
    let scheme = url.scheme_str().unwrap_or("https");
    let port = url.port_u16().unwrap_or(if scheme == "http" { 80 } else { 443 });
    Ok(format!("{scheme}://{host}:{port}"))
}

fn encode(certificates: &[Vec<u8>]) -> String {
    let blocks: Vec<_> = certificates
        .iter()
        .map(|der| pem::Pem::new("CERTIFICATE", der.clone()))
        .collect();
    pem::encode_many_config(
        &blocks,
        pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn addresses_carry_their_port_and_ipv6_its_brackets() {
        let secrets = PathBuf::from("/nonexistent");
        for (host, expected) in [
            ("10.96.0.1", "https://10.96.0.1:443"),
            ("fd00::1", "https://[fd00::1]:443"),
        ] {
            let config = in_cluster(host, 443, &secrets).unwrap();
            assert_eq!(server(&config).unwrap(), expected);
        }
        assert!(matches!(
            in_cluster("a b", 443, &secrets),
            Err(ConnectError::Address { .. })
        ));
        let access = Access::InCluster {
            host: "10.96.0.1".into(),
            port: 443,
            secrets,
        };
        let error = Api::new(&access, Timing::default()).await.unwrap_err();
        assert!(
            sluice_runtime::telemetry::chain(&error).contains("ca.crt")
                || matches!(error, ConnectError::Setup { .. })
        );
    }

    #[tokio::test]
    async fn a_kubeconfig_that_starts_programs_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(
            file.path(),
            "{apiVersion: v1, kind: Config, current-context: c, clusters: [{name: c, cluster: {server: 'https://h:6443'}}], \
             contexts: [{name: c, context: {cluster: c, user: u}}], users: [{name: u, user: {exec: {apiVersion: \
             client.authentication.k8s.io/v1, command: rm}}}]}",
        )
        .unwrap();
        let refused = Api::new(&Access::Kubeconfig(file.path().into()), Timing::default()).await;
        assert!(
            matches!(refused, Err(ConnectError::Program { .. })),
            "{refused:?}"
        );
        let missing = Api::new(&Access::Kubeconfig("/nonexistent".into()), Timing::default()).await;
        assert!(
            matches!(missing, Err(ConnectError::Kubeconfig { .. })),
            "{missing:?}"
        );
    }
}

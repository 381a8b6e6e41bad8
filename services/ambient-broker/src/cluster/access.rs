//! How the API server is found, and with which credentials.

use std::path::{Path, PathBuf};

use kube::config::{AuthInfo, Config, KubeConfigOptions, Kubeconfig};

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

pub(super) fn in_cluster(host: &str, port: u16, secrets: &Path) -> Result<Config, ConnectError> {
    let ip6 = host.parse::<std::net::Ipv6Addr>().is_ok();
    let text = if ip6 {
        format!("https://[{host}]:{port}")
    } else {
        format!("https://{host}:{port}")
    };
    let Ok(address) = text.parse() else {
        return Err(ConnectError::Address { text });
    };
    let authority = secrets.join("ca.crt");
    let mut config = Config::new(address);
    // Without these bytes kube asks for the system's certificates, and an image without any has none to give. The file is what
    // counts: it is read again when it changes.
    config.root_cert = Some(certificates(&authority)?);
    config.root_cert_file = Some(authority);
    config.auth_info = AuthInfo {
        token_file: Some(secrets.join("token").to_string_lossy().into_owned()),
        ..AuthInfo::default()
    };
    Ok(config)
}

/// The certificates of a file, DER.
fn certificates(path: &Path) -> Result<Vec<Vec<u8>>, ConnectError> {
    let read = |source| ConnectError::Read {
        path: path.to_owned(),
        source,
    };
    let text = std::fs::read(path).map_err(read)?;
    let blocks = pem::parse_many(text)
        .map_err(|error| read(std::io::Error::new(std::io::ErrorKind::InvalidData, error)))?;
    Ok(blocks.into_iter().map(pem::Pem::into_contents).collect())
}

pub(super) async fn kubeconfig(path: &Path) -> Result<Config, ConnectError> {
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
pub(super) fn server(config: &Config) -> Result<String, ConnectError> {
    let url = &config.cluster_url;
    let text = || ConnectError::Address {
        text: url.to_string(),
    };
    let host = url.host().ok_or_else(text)?;
    let scheme = url.scheme_str().unwrap_or("https");
    let port = url.port_u16().unwrap_or(if scheme == "http" { 80 } else { 443 });
    Ok(format!("{scheme}://{host}:{port}"))
}

pub(super) fn encode(certificates: &[Vec<u8>]) -> String {
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
    use super::super::client::{Api, Timing};
    use super::*;

    #[tokio::test]
    async fn addresses_carry_their_port_and_ipv6_its_brackets() {
        let directory = tempfile::tempdir().unwrap();
        let secrets = directory.path().to_owned();
        let block = pem::encode(&pem::Pem::new("CERTIFICATE", b"der"));
        std::fs::write(secrets.join("ca.crt"), block.repeat(2)).unwrap();
        for (host, expected) in [
            ("10.96.0.1", "https://10.96.0.1:443"),
            ("fd00::1", "https://[fd00::1]:443"),
        ] {
            let config = in_cluster(host, 443, &secrets).unwrap();
            assert_eq!(server(&config).unwrap(), expected);
            // The image has no certificates of its own to fall back on.
            assert_eq!(config.root_cert.unwrap(), [b"der", b"der"]);
        }
        assert!(matches!(
            in_cluster("a b", 443, &secrets),
            Err(ConnectError::Address { .. })
        ));
        let access = Access::InCluster {
            host: "10.96.0.1".into(),
            port: 443,
            secrets: "/nonexistent".into(),
        };
        let error = Api::new(&access, Timing::default()).await.unwrap_err();
        assert!(sluice_runtime::telemetry::chain(&error).contains("/nonexistent/ca.crt"));
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

//! The kubeconfig that the installer keeps: which API server, whose certificates, which token.
//!
//! It is written as JSON, which every reader of YAML takes, so that a static plugin needs no YAML parser. Nothing of
//! its content ever reaches a message: a value in the wrong place could be the token.

use std::fs::File;
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::HeaderValue;
use serde::Deserialize;
use tokio_rustls::rustls::RootCertStore;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};

/// Longest kubeconfig, in bytes.
const MAX_BYTES: u64 = 64 * 1024;

/// The kubeconfig cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KubeconfigError {
    #[error("there is none")]
    Missing,
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is not a regular file of at most {MAX_BYTES} bytes", path.display())]
    File { path: PathBuf },
    #[error(
        "{} is not a kubeconfig in JSON (line {line}, column {column}); the installer writes it as JSON",
        path.display()
    )]
    Json {
        path: PathBuf,
        line: usize,
        column: usize,
    },
    #[error("{}: {problem}", path.display())]
    Content { path: PathBuf, problem: &'static str },
}

/// What a request needs.
pub(crate) struct Credentials {
    pub(crate) server: SocketAddr,
    /// Whom the server's certificate must name.
    pub(crate) name: ServerName<'static>,
    pub(crate) roots: RootCertStore,
    /// `Authorization`.
    pub(crate) bearer: HeaderValue,
}

// The fields that are read; a kubeconfig may hold more (k8s.io/client-go, tools/clientcmd/api/v1).
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Kubeconfig {
    current_context: String,
    contexts: Vec<NamedContext>,
    clusters: Vec<NamedCluster>,
    users: Vec<NamedUser>,
}

#[derive(Deserialize)]
struct NamedContext {
    name: String,
    context: Context,
}

#[derive(Deserialize)]
struct Context {
    cluster: String,
    user: String,
}

#[derive(Deserialize)]
struct NamedCluster {
    name: String,
    cluster: Cluster,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Cluster {
    server: String,
    certificate_authority_data: Option<String>,
    tls_server_name: Option<String>,
    #[serde(default)]
    insecure_skip_tls_verify: bool,
}

#[derive(Deserialize)]
struct NamedUser {
    name: String,
    user: User,
}

#[derive(Deserialize)]
struct User {
    token: Option<String>,
}

impl Credentials {
    /// Reads and checks the file at `path`.
    pub(crate) fn read(path: &Path) -> Result<Self, KubeconfigError> {
        let text = read_file(path)?;
        let kubeconfig: Kubeconfig =
            serde_json::from_slice(&text).map_err(|error| KubeconfigError::Json {
                path: path.to_owned(),
                line: error.line(),
                column: error.column(),
            })?;
        Self::resolve(kubeconfig).map_err(|problem| KubeconfigError::Content {
            path: path.to_owned(),
            problem,
        })
    }

    fn resolve(kubeconfig: Kubeconfig) -> Result<Self, &'static str> {
        let current = kubeconfig.current_context;
        let context = kubeconfig
            .contexts
            .into_iter()
            .find(|named| named.name == current);
        let context = context.ok_or("current-context names no context")?.context;
        let named = |named: &NamedCluster| named.name == context.cluster;
        let cluster = kubeconfig.clusters.into_iter().find(named);
        let cluster = cluster.ok_or("the current context names no cluster")?.cluster;
        let named = |named: &NamedUser| named.name == context.user;
        let user = kubeconfig.users.into_iter().find(named);
        let user = user.ok_or("the current context names no user")?.user;
        if cluster.insecure_skip_tls_verify {
            return Err(
                "insecure-skip-tls-verify is not supported: whoever answers could place pods outside the mesh",
            );
        }
        let server = parse_server(&cluster.server)
            .ok_or("server must be https:// with an IP address (IPv6 in brackets) and perhaps a port")?;
        let name = match cluster.tls_server_name {
            Some(name) => {
                ServerName::try_from(name).map_err(|_| "tls-server-name is not a DNS name or address")?
            }
            None => ServerName::from(server.ip()),
        };
        let data = cluster.certificate_authority_data;
        let roots = parse_roots(&data.ok_or("certificate-authority-data is missing")?)?;
        Ok(Self {
            server,
            name,
            roots,
            bearer: parse_token(&user.token.ok_or("the user's token is missing")?)?,
        })
    }
}

fn read_file(path: &Path) -> Result<Vec<u8>, KubeconfigError> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => KubeconfigError::Missing,
        _ => KubeconfigError::Read {
            path: path.to_owned(),
            source,
        },
    };
    let unfit = || KubeconfigError::File {
        path: path.to_owned(),
    };
    // A pipe in its place must not keep the plugin from answering.
    let nonblocking = nix::fcntl::OFlag::O_NONBLOCK.bits();
    let file = File::options()
        .read(true)
        .custom_flags(nonblocking)
        .open(path)
        .map_err(failed)?;
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(unfit());
    }
    let mut text = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut text).map_err(failed)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(unfit());
    }
    Ok(text)
}

fn parse_server(server: &str) -> Option<SocketAddr> {
    const HTTPS: u16 = 443;
    let authority = server.strip_prefix("https://")?;
    let authority = authority.strip_suffix('/').unwrap_or(authority);
    let bare = || {
        let address = match authority.strip_prefix('[') {
            Some(rest) => IpAddr::V6(rest.strip_suffix(']')?.parse().ok()?),
            None => IpAddr::V4(authority.parse().ok()?),
        };
        Some(SocketAddr::new(address, HTTPS))
    };
    authority.parse().ok().or_else(bare)
}

fn parse_roots(data: &str) -> Result<RootCertStore, &'static str> {
    const PROBLEM: &str = "certificate-authority-data is not base64 of PEM certificates";
    let pem = STANDARD.decode(data).map_err(|_| PROBLEM)?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    let mut roots = RootCertStore::empty();
    // A bundle may hold one of a kind that nobody uses any more; the others count.
    roots.add_parsable_certificates(certificates.map_err(|_| PROBLEM)?);
    if roots.is_empty() {
        return Err("certificate-authority-data holds no certificate");
    }
    Ok(roots)
}

fn parse_token(token: &str) -> Result<HeaderValue, &'static str> {
    const PROBLEM: &str = "the user's token must be visible ASCII characters without a line break";
    if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(PROBLEM);
    }
    let mut bearer = HeaderValue::try_from(format!("Bearer {token}")).map_err(|_| PROBLEM)?;
    bearer.set_sensitive(true);
    Ok(bearer)
}

#[cfg(test)]
mod tests;

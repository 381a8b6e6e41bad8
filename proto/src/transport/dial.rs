//! Connecting to a service by the path of its socket, for those that run in a tokio runtime anyway. The plugin connects by
//! [`super::preamble`], and its size shows what is merely there.

use std::io;
use std::path::{Path, PathBuf};

use tokio::net::UnixStream;

use super::grpc::UdsChannel;

/// No connection to a service.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// Nobody listens, or we may not connect.
    #[error("cannot reach the {service} at {}", path.display())]
    Connect {
        /// Who was dialled.
        service: &'static str,
        /// Its socket.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// Whoever listens does not speak HTTP/2.
    #[error("{} does not speak the {service}'s protocol", path.display())]
    Handshake {
        /// Who was dialled.
        service: &'static str,
        /// Its socket.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: hyper::Error,
    },
}

impl UdsChannel {
    /// Connects to the socket of `service` at `path` and starts HTTP/2 on it. Sets no deadline.
    pub async fn dial(service: &'static str, path: &Path) -> Result<Self, DialError> {
        let stream = UnixStream::connect(path)
            .await
            .map_err(|source| DialError::Connect {
                service,
                path: path.to_owned(),
                source,
            })?;
        Self::handshake(stream)
            .await
            .map_err(|source| DialError::Handshake {
                service,
                path: path.to_owned(),
                source,
            })
    }
}

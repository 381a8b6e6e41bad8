//! How it stands, for probes and people on the node: one JSON line for whoever connects to a socket that only root reaches.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sluice_proto::paths::RunDir;
use sluice_proto::transport::uds::{BindError, Peer, bind_stream};
use tokio::io::AsyncWriteExt;
use tokio::sync::watch;

/// A probe gives up after this.
const ANSWER: Duration = Duration::from_secs(2);

/// What the socket says.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Health {
    pub(crate) ready: bool,
    pub(crate) problem: String,
    pub(crate) mode: String,
    pub(crate) effective_file: String,
    pub(crate) primary_file: String,
    pub(crate) repairs: u64,
    pub(crate) notes: Vec<String>,
    /// Whether changes are told at once, or found by looking every two seconds.
    pub(crate) watching: bool,
    pub(crate) credentials_expire_unix: Option<i64>,
    pub(crate) plugin_log_dropped: u64,
}

/// Where the socket is.
pub(crate) fn socket(run: &RunDir) -> PathBuf {
    run.kubeconfig().with_file_name("installer.sock")
}

/// Serves the socket until dropped.
pub(crate) fn serve(
    run: &RunDir,
    health: watch::Receiver<Health>,
) -> Result<impl Future<Output = ()> + use<>, BindError> {
    let socket = socket(run);
    let listener = bind_stream(&socket, 0o600, None)?;
    Ok(async move {
        loop {
            let Ok((mut stream, _)) = listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let line = serde_json::to_string(&*health.borrow()).unwrap_or_default();
            // One after the other: an answer fits into the socket's buffer, so nobody can hold this up.
            let _ = tokio::time::timeout(ANSWER, async {
                let _ = stream.write_all(line.as_bytes()).await;
                let _ = stream.shutdown().await;
            })
            .await;
        }
    })
}

/// The installer does not answer.
#[derive(Debug, thiserror::Error)]
#[error("the installer does not answer at {}", path.display())]
pub(crate) struct NoAnswer {
    path: PathBuf,
    #[source]
    source: std::io::Error,
}

/// Whoever serves this node.
pub(crate) enum Answer {
    /// The installer of this container, or on a host any.
    Ours(Health),
    /// The installer of another container, for whose end ours waits.
    Theirs,
}

/// Asks the running installer.
pub(crate) fn ask(run: &RunDir) -> Result<Answer, NoAnswer> {
    let path = socket(run);
    read(&path).map_err(|source| NoAnswer { path, source })
}

fn read(path: &Path) -> std::io::Result<Answer> {
    let mut stream = UnixStream::connect(path)?;
    if Peer::of(&stream)?.is_elsewhere() {
        return Ok(Answer::Theirs);
    }
    stream.set_read_timeout(Some(ANSWER))?;
    let mut text = String::new();
    (&mut stream).take(64 * 1024).read_to_string(&mut text)?;
    serde_json::from_str(&text)
        .map(Answer::Ours)
        .map_err(std::io::Error::other)
}

/// Tells a probe: exit status 0 if all is in place, else the reason. An installer that stands by is well: what is wrong with the
/// one that serves may be what it is to mend.
pub(crate) fn check(run: &RunDir, only_alive: bool, out: &mut impl Write) -> std::io::Result<bool> {
    match ask(run) {
        Ok(Answer::Theirs) => {
            writeln!(out, "standing by")?;
            Ok(true)
        }
        Ok(Answer::Ours(health)) if health.ready || only_alive => {
            writeln!(out, "{}", if health.ready { "ready" } else { "alive" })?;
            Ok(true)
        }
        Ok(Answer::Ours(health)) => {
            writeln!(out, "not ready: {}", health.problem)?;
            Ok(false)
        }
        Err(error) => {
            writeln!(out, "{}", sluice_runtime::telemetry::chain(&error))?;
            Ok(false)
        }
    }
}

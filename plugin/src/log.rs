//! JSON lines on stderr and to the installer's log socket, warnings and worse unless the configuration asks for more.
//! A subscriber of `tracing` would cost more start-up time than everything else the plugin does, and nothing may ever
//! reach stdout. A runtime shows the stderr of a plugin at best when it fails, hence the socket.

use std::io::Write;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::config::Settings;

/// How much is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub(crate) enum Level {
    Off,
    Error,
    Warn,
    Info,
    Debug,
}

static LEVEL: AtomicU8 = AtomicU8::new(Level::Warn as u8);

/// The installer's socket; not known before the configuration is.
static SOCKET: OnceLock<PathBuf> = OnceLock::new();

/// Longest line for the socket, in bytes; a longer one is on stderr alone.
const MAX_DATAGRAM: usize = 8 * 1024;

/// Logs as the configuration says from now on.
pub(crate) fn configure(settings: &Settings) {
    LEVEL.store(settings.log_level as u8, Ordering::Relaxed);
    let _ = SOCKET.set(settings.run_dir.plugin_log_socket());
}

/// Milliseconds since the Unix epoch.
pub(crate) fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Writes one line: a constant `message`, the variables in `fields`. That nobody reads it is no error.
pub(crate) fn line(level: Level, message: &str, fields: &[(&str, &str)]) {
    if level as u8 > LEVEL.load(Ordering::Relaxed) {
        return;
    }
    let mut object = serde_json::Map::new();
    object.insert("unix_ms".into(), unix_ms().into());
    object.insert("level".into(), serde_json::to_value(level).unwrap_or_default());
    object.insert("service".into(), "sluice-cni".into());
    object.insert("message".into(), message.into());
    for (key, value) in fields {
        object.insert((*key).into(), (*value).into());
    }
    let mut text = serde_json::Value::Object(object).to_string();
    text.push('\n');
    let _ = std::io::stderr().write_all(text.as_bytes());
    if let Some(socket) = SOCKET.get() {
        let _ = send(socket, text.trim_end().as_bytes());
    }
}

/// Never waits: the socket of an installer that hangs may be full.
fn send(socket: &Path, line: &[u8]) -> std::io::Result<()> {
    if line.len() <= MAX_DATAGRAM {
        let datagram = UnixDatagram::unbound()?;
        datagram.set_nonblocking(true)?;
        datagram.send_to(line, socket)?;
    }
    Ok(())
}

//! Log lines of the plugin, which has nobody else to tell them to: one JSON object a datagram, written on our stderr
//! with ours. The plugin never waits: what finds no room is dropped on its side, what is no log line on ours.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Map, Value};
use sluice_proto::transport::uds::{BindError, bind_at};
use tokio::net::UnixDatagram;

/// Longest line, in bytes; a longer one is dropped.
const LONGEST: usize = 16 * 1024;
/// Dropped datagrams are told this often.
const TELL: Duration = Duration::from_mins(1);

/// Counts what was dropped because it was no log line.
pub(crate) type Dropped = Arc<AtomicU64>;

/// Serves the socket at `path` until dropped.
pub(crate) fn serve(path: &Path, dropped: Dropped) -> Result<impl Future<Output = ()> + use<>, BindError> {
    let socket = bind_at(path, 0o600, None, |temporary| {
        let socket = std::os::unix::net::UnixDatagram::bind(temporary)?;
        socket.set_nonblocking(true)?;
        UnixDatagram::from_std(socket)
    })?;
    Ok(async move {
        let mut buffer = vec![0; LONGEST + 1];
        let mut told: Option<Instant> = None;
        loop {
            let Ok(length) = socket.recv(&mut buffer).await else {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            if let Some(line) = relog(&buffer[..length]) {
                // Whoever collects our log may be slow or gone; there is nobody to tell.
                let _ = std::io::stderr().write_all(line.as_bytes());
                continue;
            }
            let count = dropped.fetch_add(1, Ordering::Relaxed) + 1;
            if told.is_none_or(|told| told.elapsed() >= TELL) {
                told = Some(Instant::now());
                tracing::warn!(count, "dropped what is no log line of the plugin");
            }
        }
    })
}

/// The line as it is written, or `None` for what is none. Serialised anew, so that nothing in it can end it early.
fn relog(datagram: &[u8]) -> Option<String> {
    if datagram.len() > LONGEST {
        return None;
    }
    let mut line: Map<String, Value> = serde_json::from_slice(datagram).ok()?;
    for key in ["level", "message"] {
        line.get(key)?.as_str()?;
    }
    line.insert("target".to_owned(), "plugin".into());
    let mut text = Value::Object(line).to_string();
    text.push('\n');
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_passed_on_whole_and_marked() {
        let line = relog(br#"{"level":"warn","message":"no executor","pod":"a/b","n":1.50}"#).unwrap();
        let value: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(value["target"], "plugin");
        assert_eq!(value["pod"], "a/b");
        assert!(line.ends_with("}\n"));
    }

    #[test]
    fn nothing_in_a_line_can_begin_another() {
        let line = relog(b"{\"level\":\"info\",\"message\":\"a\\nb\",\"x\":\"\\u2028\"}\n").unwrap();
        assert_eq!(line.matches('\n').count(), 1);
    }

    #[test]
    fn what_is_no_log_line_is_dropped() {
        let long = format!(r#"{{"level":"info","message":"{}"}}"#, "x".repeat(LONGEST));
        for bad in [
            "",
            "garbage",
            "[]",
            "{}",
            r#"{"level":5,"message":"x"}"#,
            r#"{"level":"info"}"#,
            &long,
        ] {
            assert_eq!(relog(bad.as_bytes()), None, "{bad:.40}");
        }
    }
}

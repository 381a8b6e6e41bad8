//! The log endpoint of Istio's node agent, for plugins of it that are still called while its place is taken: `POST /log`
//! with a JSON array of strings, each of them one JSON log line. Whatever comes is answered 200, as its own agent does;
//! the plugin would have nothing to do about anything else.

use std::convert::Infallible;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::{Map, Value};
use sluice_proto::transport::kept::KeptListener;
use sluice_proto::transport::uds::BindError;
use tokio::sync::Semaphore;

/// Name of the socket in the run directory of Istio's agent.
pub(crate) const SOCKET: &str = "log.sock";
/// Longest body that is read, in bytes.
const LONGEST: usize = 1024 * 1024;
/// A connection that takes longer is cut off.
const PATIENCE: Duration = Duration::from_secs(5);
/// Connections at a time; more wait.
const MOST: usize = 16;

/// Serves `log.sock` in `directory` until dropped. It takes the place of a socket that is there.
pub(crate) fn serve(directory: &Path) -> Result<impl Future<Output = ()> + use<>, BindError> {
    let mut listener = KeptListener::bind(&directory.join(SOCKET), 0o600)?;
    Ok(async move {
        let room = std::sync::Arc::new(Semaphore::new(MOST));
        loop {
            let Ok(place) = room.clone().acquire_owned().await else {
                return;
            };
            let Ok(stream) = listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            tokio::spawn(async move {
                let _place = place;
                let mut http = hyper::server::conn::http1::Builder::new();
                http.timer(TokioTimer::new()).header_read_timeout(PATIENCE);
                let service = service_fn(|request| async move { Ok::<_, Infallible>(answer(request).await) });
                let connection = http.serve_connection(TokioIo::new(stream), service);
                let _ = tokio::time::timeout(PATIENCE, connection).await;
            });
        }
    })
}

async fn answer(request: Request<Incoming>) -> Response<Empty<Bytes>> {
    if request.method() == Method::POST
        && request.uri().path() == "/log"
        && let Ok(body) = Limited::new(request.into_body(), LONGEST).collect().await
    {
        let text = lines(&body.to_bytes());
        // In one piece, so that the lines of two plugins do not mix.
        let _ = std::io::stderr().write_all(text.as_bytes());
    }
    Response::new(Empty::new())
}

/// The lines of one request as they are written; what is none is left out.
fn lines(body: &[u8]) -> String {
    let lines: Vec<String> = serde_json::from_slice(body).unwrap_or_default();
    lines.iter().filter_map(|line| relog(line)).collect()
}

fn relog(line: &str) -> Option<String> {
    let mut line: Map<String, Value> = serde_json::from_str(line).ok()?;
    let message = line.remove("msg")?.as_str()?.trim().to_owned();
    line.get("time")?.as_str()?;
    if !["debug", "info", "warn", "error"].contains(&line.get("level")?.as_str()?) {
        return None;
    }
    line.insert("message".to_owned(), message.into());
    line.insert("target".to_owned(), "istio-cni".into());
    Some(format!("{}\n", Value::Object(line)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_keep_their_time_and_labels() {
        let body = br#"["{\"level\":\"info\",\"time\":\"2026-01-02T03:04:05.000006Z\",\"msg\":\" added \",\"pod\":\"a/b\"}\n",
            "{\"level\":\"warn\",\"time\":\"t\",\"msg\":\"x\"}"]"#;
        let text = lines(body);
        let lines: Vec<Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0]["message"], "added");
        assert_eq!(lines[0]["time"], "2026-01-02T03:04:05.000006Z");
        assert_eq!(
            (&lines[0]["pod"], &lines[0]["target"]),
            (&"a/b".into(), &"istio-cni".into())
        );
    }

    #[test]
    fn what_is_no_line_is_left_out() {
        for bad in [
            "garbage",
            "{}",
            "[5]",
            r#"["x"]"#,
            r#"["{\"level\":\"fatal\",\"time\":\"t\",\"msg\":\"x\"}"]"#,
            r#"["{\"level\":\"info\",\"msg\":\"x\"}"]"#,
            r#"["{\"level\":\"info\",\"time\":\"t\",\"msg\":5}"]"#,
        ] {
            assert_eq!(lines(bad.as_bytes()), "", "{bad}");
        }
    }
}

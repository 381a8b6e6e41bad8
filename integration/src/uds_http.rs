//! HTTP over a Unix socket, one request a connection, as a kubelet probe, Prometheus or Istio's plugin would ask.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;

/// A response.
#[derive(Debug, Clone)]
pub struct Response {
    /// Status code.
    pub status: u16,
    /// Body as text.
    pub body: String,
}

/// GET.
pub fn get(socket: &Path, path: &str) -> anyhow::Result<Response> {
    exchange(
        socket,
        &format!("GET {path} HTTP/1.1\r\nhost: node\r\nconnection: close\r\n\r\n"),
    )
}

/// POST of a JSON document.
pub fn post(socket: &Path, path: &str, body: &str) -> anyhow::Result<Response> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: node\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    exchange(socket, &(head + body))
}

fn exchange(socket: &Path, request: &str) -> anyhow::Result<Response> {
    let mut stream =
        UnixStream::connect(socket).with_context(|| format!("connecting to {}", socket.display()))?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    stream.write_all(request.as_bytes())?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").context("no end of the head")?;
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|word| word.parse().ok())
        .context("no status")?;
    Ok(Response {
        status,
        body: body.to_owned(),
    })
}

/// The value of a metric line that starts with `series` (name and labels), if it is there.
pub fn metric(text: &str, series: &str) -> Option<f64> {
    text.lines()
        .find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.trim().parse().ok())
}

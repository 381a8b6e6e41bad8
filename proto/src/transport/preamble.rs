//! Descriptors ahead of HTTP/2 on the same stream: the client sends one byte with the descriptors, then speaks
//! gRPC. They live and die with the connection, so there is nothing to correlate and nothing to clean up.
//!
//! A connection without descriptors simply starts with HTTP/2, whose first byte is `P` (RFC 9113 section 3.4).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;

use super::descriptors::{self, MAX_DESCRIPTORS, TransportError};
use super::uds::Peer;

/// First byte of a connection that carries descriptors.
const MAGIC: u8 = 0x01;

/// A silent peer is cut off after this.
pub const PREAMBLE_DEADLINE: Duration = Duration::from_secs(1);

/// Connects to `path` within `deadline`, trying again while nobody listens, and sends `descriptors` ahead.
///
/// Blocking. A full backlog is waited out, too (`SO_SNDTIMEO`, socket(7)).
pub fn connect(
    path: &Path,
    descriptors: &[BorrowedFd<'_>],
    deadline: Duration,
) -> Result<std::os::unix::net::UnixStream, TransportError> {
    let until = Instant::now() + deadline;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        match connect_once(path, left.max(Duration::from_millis(1))) {
            Ok(stream) => {
                if !descriptors.is_empty() {
                    descriptors::send(&stream, &[MAGIC], descriptors)?;
                }
                return Ok(stream);
            }
            // Nobody listens (yet): the executor may be restarting.
            Err(TransportError::Call { source, .. })
                if matches!(
                    source.kind(),
                    io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
                ) && left > RETRY_PAUSE =>
            {
                std::thread::sleep(RETRY_PAUSE);
            }
            Err(error) => return Err(error),
        }
    }
}

const RETRY_PAUSE: Duration = Duration::from_millis(20);

fn connect_once(path: &Path, deadline: Duration) -> Result<std::os::unix::net::UnixStream, TransportError> {
    let address = SocketAddrUnix::new(path).map_err(|e| TransportError::call("connect", e))?;
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(|e| TransportError::call("socket", e))?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(deadline))
        .map_err(|e| TransportError::call("setsockopt", e))?;
    rustix::net::connect(&socket, &address).map_err(|e| TransportError::call("connect", e))?;
    Ok(socket.into())
}

/// What is known about a connection before its first request.
#[derive(Debug, Clone)]
pub struct Connection {
    /// Who connected.
    pub peer: Peer,
    descriptors: Arc<Mutex<Vec<OwnedFd>>>,
}

impl Connection {
    /// Takes the descriptors; a second call gets none.
    pub fn take_descriptors(&self) -> Vec<OwnedFd> {
        self.descriptors
            .lock()
            .map(|mut held| std::mem::take(&mut *held))
            .unwrap_or_default()
    }
}

/// A stream whose descriptors, if any, were taken off.
#[derive(Debug)]
pub struct PreambleStream {
    stream: UnixStream,
    connection: Connection,
}

impl PreambleStream {
    /// Waits for the first byte of `stream` (at most [`PREAMBLE_DEADLINE`]) and takes off the descriptors.
    ///
    /// Run it in a task of its own, so that a silent peer delays nobody.
    pub async fn accept(stream: UnixStream) -> Result<Self, TransportError> {
        let peer = Peer::of(&stream).map_err(|source| TransportError::Call {
            call: "getsockopt",
            source,
        })?;
        let taken = tokio::time::timeout(PREAMBLE_DEADLINE, take_preamble(&stream))
            .await
            .map_err(|_| TransportError::Deadline(PREAMBLE_DEADLINE))??;
        Ok(Self {
            stream,
            connection: Connection {
                peer,
                descriptors: Arc::new(Mutex::new(taken)),
            },
        })
    }

    /// What is known about the connection.
    pub fn connection(&self) -> &Connection {
        &self.connection
    }
}

async fn take_preamble(stream: &UnixStream) -> Result<Vec<OwnedFd>, TransportError> {
    let first = when_readable(stream, || {
        let mut byte = [0_u8];
        let (read, _) = rustix::net::recv(stream.as_fd(), &mut byte[..], RecvFlags::PEEK)
            .map_err(|e| TransportError::call("recv", e))?;
        if read == 0 {
            Err(TransportError::Closed)
        } else {
            Ok(byte[0])
        }
    })
    .await?;
    match first {
        // Exactly one byte: a longer read would swallow the start of HTTP/2.
        MAGIC => when_readable(stream, || descriptors::receive(stream, 1, MAX_DESCRIPTORS))
            .await
            .map(|r| r.descriptors),
        b'P' => Ok(Vec::new()),
        other => Err(TransportError::Malformed(format!(
            "first byte {other:#04x} starts neither HTTP/2 nor a hand-over"
        ))),
    }
}

async fn when_readable<T>(
    stream: &UnixStream,
    mut read: impl FnMut() -> Result<T, TransportError>,
) -> Result<T, TransportError> {
    loop {
        stream
            .readable()
            .await
            .map_err(|source| TransportError::Call { call: "poll", source })?;
        let mut outcome = None;
        let attempt = stream.try_io(Interest::READABLE, || match read() {
            Err(error) if error.would_block() => Err(io::ErrorKind::WouldBlock.into()),
            done => {
                outcome = Some(done);
                Ok(())
            }
        });
        if let (Ok(()), Some(done)) = (attempt, outcome) {
            return done;
        }
    }
}

impl AsyncRead for PreambleStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for PreambleStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }
    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(feature = "server")]
impl tonic::transport::server::Connected for PreambleStream {
    type ConnectInfo = Connection;
    fn connect_info(&self) -> Connection {
        self.connection.clone()
    }
}

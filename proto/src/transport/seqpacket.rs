//! `SOCK_SEQPACKET` on tokio: one message a packet, descriptors beside it. ZDS, the descriptor socket of the
//! executor and the opener's socket speak it.
//!
//! An empty packet and the end of the connection look alike, so no protocol on it may have an empty message.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::descriptors::{self, Received, TransportError};
use super::reactor::watch;
use super::uds::{BindError, Peer, bind_at};

/// Longest message in bytes; ztunnel's receive buffer is this long.
pub const MAX_MESSAGE: usize = 1024;

/// One connection.
#[derive(Debug)]
pub struct SeqpacketConnection {
    socket: AsyncFd<OwnedFd>,
    peer: Peer,
}

impl SeqpacketConnection {
    fn new(socket: OwnedFd) -> io::Result<Self> {
        let peer = Peer::of(&socket)?;
        Ok(Self {
            socket: watch(socket, Interest::READABLE | Interest::WRITABLE)?,
            peer,
        })
    }

    /// Connects to the listener at `path`. Call it inside a tokio runtime.
    pub fn connect(path: &Path) -> Result<Self, TransportError> {
        let socket = socket()?;
        let address = SocketAddrUnix::new(path).map_err(|e| TransportError::call("connect", e))?;
        rustix::net::connect(&socket, &address).map_err(|e| TransportError::call("connect", e))?;
        Self::new(socket).map_err(|source| TransportError::Call {
            call: "getsockopt",
            source,
        })
    }

    /// The process at the other end.
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// Sends one message.
    pub async fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), TransportError> {
        if bytes.is_empty() || bytes.len() > MAX_MESSAGE {
            return Err(TransportError::TooLong { limit: MAX_MESSAGE });
        }
        loop {
            match descriptors::send(&self.socket, bytes, descriptors) {
                Err(error) if error.would_block() => {}
                done => return done,
            }
            let mut guard = self.socket.writable().await.map_err(poll_failed)?;
            // Readiness is only dropped if the socket is still full, else the edge that came meanwhile is lost.
            match descriptors::send(&self.socket, bytes, descriptors) {
                Err(error) if error.would_block() => guard.clear_ready(),
                done => return done,
            }
        }
    }

    /// Receives one message with at most `max_descriptors` descriptors. Cancel-safe.
    pub async fn receive(&self, max_descriptors: usize) -> Result<Received, TransportError> {
        loop {
            let mut guard = self.socket.readable().await.map_err(poll_failed)?;
            match descriptors::receive(&self.socket, MAX_MESSAGE, max_descriptors) {
                Err(error) if error.would_block() => guard.clear_ready(),
                Ok(received) if received.bytes.is_empty() => return Err(TransportError::Closed),
                done => return done,
            }
        }
    }
}

impl AsFd for SeqpacketConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.get_ref().as_fd()
    }
}

fn poll_failed(source: io::Error) -> TransportError {
    TransportError::Call { call: "poll", source }
}

fn socket() -> Result<OwnedFd, TransportError> {
    rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
    .map_err(|e| TransportError::call("socket", e))
}

/// A listener.
#[derive(Debug)]
pub struct SeqpacketListener {
    socket: AsyncFd<OwnedFd>,
}

impl SeqpacketListener {
    /// Binds at `path` with `mode` and `group`. Call it inside a tokio runtime.
    pub fn bind(path: &Path, mode: u32, group: Option<u32>) -> Result<Self, BindError> {
        bind_at(path, mode, group, |temporary| {
            let socket = socket().map_err(io::Error::other)?;
            rustix::net::bind(&socket, &SocketAddrUnix::new(temporary)?)?;
            rustix::net::listen(&socket, 128)?;
            Ok(Self {
                socket: watch(socket, Interest::READABLE)?,
            })
        })
    }

    /// Waits for the next connection. Cancel-safe.
    pub async fn accept(&self) -> io::Result<SeqpacketConnection> {
        loop {
            let mut guard = self.socket.readable().await?;
            match rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Err(rustix::io::Errno::WOULDBLOCK) => guard.clear_ready(),
                accepted => return SeqpacketConnection::new(accepted?),
            }
        }
    }
}

//! One message with descriptors, blocking or not as the socket is.
//!
//! Received descriptors are owned (and close-on-exec) before anything can fail, so no error leaks one.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// No message of ours carries more descriptors than this.
pub const MAX_DESCRIPTORS: usize = 16;

/// The kernel's own limit (`SCM_MAX_FD`, net/scm.h): with room for that many, a cut-off control message can
/// only come from a limit or an LSM, never from our buffer.
const SCM_MAX_FD: usize = 253;

/// Why a message could not be sent or received.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The system call failed.
    #[error("{call} failed")]
    Call {
        /// Which system call.
        call: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The peer closed the connection.
    #[error("connection closed by the peer")]
    Closed,
    /// `MSG_TRUNC`: the packet was longer than the limit.
    #[error("message longer than the limit of {limit} bytes")]
    TooLong {
        /// The limit in bytes.
        limit: usize,
    },
    /// More descriptors than allowed.
    #[error("{got} descriptors in one message; at most {limit} are allowed")]
    TooManyDescriptors {
        /// How many came.
        got: usize,
        /// How many are allowed.
        limit: usize,
    },
    /// `MSG_CTRUNC` on receipt, or ETOOMANYREFS on sending.
    #[error(
        "descriptors were lost: limit or LSM (open-files limit of the receiver, descriptors in flight of the sender's uid, or a security module)"
    )]
    DescriptorsLost,
    /// Nothing came in time.
    #[error("nothing received within {0:?}")]
    Deadline(std::time::Duration),
    /// The bytes are not a message of this protocol.
    #[error("malformed message: {0}")]
    Malformed(String),
}

impl TransportError {
    pub(crate) fn call(call: &'static str, errno: Errno) -> Self {
        if errno == Errno::TOOMANYREFS {
            return Self::DescriptorsLost;
        }
        Self::Call {
            call,
            source: errno.into(),
        }
    }

    /// Whether the socket was only not ready (EAGAIN).
    pub(crate) fn would_block(&self) -> bool {
        matches!(self, Self::Call { source, .. } if source.kind() == std::io::ErrorKind::WouldBlock)
    }
}

/// A received message.
#[derive(Debug)]
pub struct Received {
    /// The bytes; empty only if the peer closed.
    pub bytes: Vec<u8>,
    /// The descriptors, close-on-exec.
    pub descriptors: Vec<OwnedFd>,
}

/// Sends `bytes` with `descriptors` as one message. On a stream socket the message must fit the socket's buffer.
pub fn send(socket: impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), TransportError> {
    if descriptors.len() > MAX_DESCRIPTORS {
        return Err(TransportError::TooManyDescriptors {
            got: descriptors.len(),
            limit: MAX_DESCRIPTORS,
        });
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
        .map_err(|errno| TransportError::call("sendmsg", errno))?;
    if sent == bytes.len() {
        Ok(())
    } else {
        Err(TransportError::Malformed(format!(
            "only {sent} of {} bytes were taken",
            bytes.len()
        )))
    }
}

/// Receives one message of at most `limit` bytes with at most `max_descriptors` descriptors.
///
/// Surplus descriptors are closed and the message is refused.
pub fn receive(socket: impl AsFd, limit: usize, max_descriptors: usize) -> Result<Received, TransportError> {
    let mut bytes = vec![0; limit];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SCM_MAX_FD))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )
    .map_err(|errno| TransportError::call("recvmsg", errno))?;
    let descriptors: Vec<OwnedFd> = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        })
        .flatten()
        .collect();
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(TransportError::DescriptorsLost);
    }
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(TransportError::TooLong { limit });
    }
    if descriptors.len() > max_descriptors {
        return Err(TransportError::TooManyDescriptors {
            got: descriptors.len(),
            limit: max_descriptors,
        });
    }
    bytes.truncate(received.bytes);
    Ok(Received { bytes, descriptors })
}

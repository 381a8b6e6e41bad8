//! How messages and descriptors travel between our processes, all of it over Unix sockets.
//!
//! - [`uds`]: binding without a window in which the socket is missing or open to all; who the peer is.
//! - [`kept`]: a listener that survives the removal of its socket's file.
//! - [`descriptors`]: one message with descriptors, blocking; the only place that handles ancillary data.
//! - [`preamble`]: descriptors ahead of HTTP/2 on the same stream.
//! - [`seqpacket`]: messages with descriptors, one packet each, on tokio.
//! - [`reactor`]: any owned descriptor on tokio.
//! - [`grpc`]: a tonic client over one connected stream.
//! - `dial`: that stream by the path of a socket (feature `client`).

pub mod descriptors;
#[cfg(feature = "client")]
pub mod dial;
pub mod grpc;
pub mod kept;
pub mod preamble;
pub mod reactor;
pub mod seqpacket;
pub mod uds;

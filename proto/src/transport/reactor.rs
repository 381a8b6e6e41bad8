//! Any owned descriptor on tokio's reactor.
#![expect(
    unsafe_code,
    reason = "tokio's AsyncFd cannot check that its inner value owns the descriptor"
)]

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Watches `descriptor` (non-blocking, pollable) for `interest`. Call it inside a tokio runtime.
pub fn watch(descriptor: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open until it is dropped, always names the same descriptor, and moves into the
    // `AsyncFd`, which drops it after its registration.
    unsafe { AsyncFd::register_with_interest(descriptor, interest) }.map_err(io::Error::from)
}

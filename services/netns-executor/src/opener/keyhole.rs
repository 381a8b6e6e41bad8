//! The opener's helper process: given a pid, it opens that process's `ns/net` and does nothing else.
//!
//! Opening it is a ptrace access check, which Landlock refuses to every process inside a Landlock domain. So the
//! opener proper (Landlock, CAP_SYS_ADMIN) cannot do it, and the one process that can (CAP_SYS_PTRACE) holds no
//! other capability, reads no file, and takes only numbers from its parent.
#![expect(unsafe_code, reason = "fork has no safe form")]

use std::fmt::Write as _;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::sys::stat::Mode;
use nix::unistd::{ForkResult, fork};
use sluice_proto::transport::descriptors::{MAX_DESCRIPTORS, TransportError, receive, send};

use super::cage;

/// Requests are pids, replies error numbers, both four bytes each.
const MESSAGE_LEN: usize = 4 * MAX_DESCRIPTORS;

/// The parent's end.
#[derive(Debug)]
pub struct Keyhole(OwnedFd);

/// The helper is gone: nothing that needs a pid works any more.
#[derive(Debug, thiserror::Error)]
pub enum KeyholeError {
    /// It could not be started.
    #[error("cannot start the helper process: {call} failed")]
    Start {
        /// Which call.
        call: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It did not answer.
    #[error("the helper process is gone")]
    Gone(#[source] TransportError),
}

impl AsFd for Keyhole {
    /// Readable, outside of calls, only when the helper is gone.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Keyhole {
    /// Starts the helper for the processes below `proc`. It ends with the parent. Call it before any thread exists.
    pub fn start(proc: &Path) -> Result<Self, KeyholeError> {
        let fail = |call| move |source: std::io::Error| KeyholeError::Start { call, source };
        let directory = File::open(proc).map_err(fail("open of the proc directory"))?;
        let (ours, its) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )
        .map_err(|errno| fail("socketpair")(errno.into()))?;
        // SAFETY: no other thread exists yet (documented precondition), so the child may go on as usual.
        match unsafe { fork() }.map_err(|errno| fail("fork")(errno.into()))? {
            ForkResult::Parent { .. } => Ok(Self(ours)),
            ForkResult::Child => {
                drop(ours);
                let code = match cage::confine_keyhole() {
                    Ok(()) => i32::from(serve(&directory, &its).is_err()),
                    Err(error) => {
                        tracing::error!(
                            error = sluice_runtime::telemetry::chain(&error),
                            "cannot confine the helper"
                        );
                        1
                    }
                };
                std::process::exit(code)
            }
        }
    }

    /// The network namespace of a process. Inner error: why it cannot be opened.
    pub fn netns_of(&self, pid: u32) -> Result<Result<OwnedFd, Errno>, KeyholeError> {
        let mut opened = self.netns_of_each(&[pid])?;
        Ok(opened.pop().unwrap_or(Err(Errno::EIO)))
    }

    /// The same for up to [`MAX_DESCRIPTORS`] processes at once: each round costs two process switches.
    pub fn netns_of_each(&self, pids: &[u32]) -> Result<Vec<Result<OwnedFd, Errno>>, KeyholeError> {
        let request: Vec<u8> = pids.iter().flat_map(|pid| pid.to_le_bytes()).collect();
        send(&self.0, &request, &[]).map_err(KeyholeError::Gone)?;
        let reply = receive(&self.0, MESSAGE_LEN, MAX_DESCRIPTORS).map_err(KeyholeError::Gone)?;
        if reply.bytes.len() != request.len() {
            return Err(KeyholeError::Gone(TransportError::Closed));
        }
        let mut descriptors = reply.descriptors.into_iter();
        Ok(words(&reply.bytes)
            .map(|errno| match errno {
                0 => descriptors.next().ok_or(Errno::EIO),
                errno => Err(Errno::from_raw(errno.cast_signed())),
            })
            .collect())
    }
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word))
}

fn serve(proc: &File, parent: &OwnedFd) -> Result<(), TransportError> {
    let mut path = String::with_capacity(32);
    loop {
        crate::sys::give_back_code();
        let request = receive(parent, MESSAGE_LEN, 0)?;
        if request.bytes.is_empty() {
            return Ok(());
        }
        let (mut errnos, mut opened) = (Vec::with_capacity(MESSAGE_LEN), Vec::new());
        for pid in words(&request.bytes) {
            path.clear();
            let _ = write!(path, "{pid}/ns/net");
            let netns = openat(
                proc,
                path.as_str(),
                OFlag::O_RDONLY | OFlag::O_CLOEXEC,
                Mode::empty(),
            );
            errnos.extend(
                netns
                    .as_ref()
                    .err()
                    .map_or(0, |errno| *errno as i32)
                    .to_le_bytes(),
            );
            opened.extend(netns);
        }
        let descriptors: Vec<_> = opened.iter().map(AsFd::as_fd).collect();
        send(parent, &errnos, &descriptors)?;
    }
}

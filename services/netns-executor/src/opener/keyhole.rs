//! The opener's helper process: given a pid, it opens that process's `ns/net` and does nothing else.
//!
//! Opening it is a ptrace access check, which Landlock refuses to every process inside a Landlock domain. So the
//! opener proper (Landlock, CAP_SYS_ADMIN) cannot do it, and the one process that can (CAP_SYS_PTRACE) holds no
//! other capability, reads no file, and takes four bytes of input from its parent.
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
use sluice_proto::transport::descriptors::{TransportError, receive, send};

use super::cage;

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
        let (ours, its) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
            .map_err(|errno| fail("socketpair")(errno.into()))?;
        // SAFETY: no other thread exists yet (documented precondition), so the child may go on as usual.
        match unsafe { fork() }.map_err(|errno| fail("fork")(errno.into()))? {
            ForkResult::Parent { .. } => Ok(Self(ours)),
            ForkResult::Child => {
                drop(ours);
                let code = match cage::confine_keyhole() {
                    Ok(()) => i32::from(serve(&directory, &its).is_err()),
                    Err(error) => {
                        tracing::error!(error = sluice_runtime::telemetry::chain(&error), "cannot confine the helper");
                        1
                    }
                };
                std::process::exit(code)
            }
        }
    }

    /// The network namespace of a process. Inner error: why it cannot be opened.
    pub fn netns_of(&self, pid: u32) -> Result<Result<OwnedFd, Errno>, KeyholeError> {
        send(&self.0, &pid.to_le_bytes(), &[]).map_err(KeyholeError::Gone)?;
        let mut reply = receive(&self.0, 4, 1).map_err(KeyholeError::Gone)?;
        let code: [u8; 4] = reply
            .bytes
            .as_slice()
            .try_into()
            .map_err(|_| KeyholeError::Gone(TransportError::Closed))?;
        Ok(match (i32::from_le_bytes(code), reply.descriptors.pop()) {
            (0, Some(netns)) => Ok(netns),
            (0, None) => Err(Errno::EIO),
            (errno, _) => Err(Errno::from_raw(errno)),
        })
    }
}

fn serve(proc: &File, parent: &OwnedFd) -> Result<(), TransportError> {
    let mut path = String::with_capacity(32);
    loop {
        let request = receive(parent, 4, 0)?;
        let Ok(pid) = <[u8; 4]>::try_from(request.bytes.as_slice()) else {
            return Ok(());
        };
        path.clear();
        let _ = write!(path, "{}/ns/net", u32::from_le_bytes(pid));
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
        match openat(proc, path.as_str(), flags, Mode::empty()) {
            Ok(netns) => send(parent, &0_i32.to_le_bytes(), &[netns.as_fd()])?,
            Err(errno) => send(parent, &(errno as i32).to_le_bytes(), &[])?,
        }
    }
}

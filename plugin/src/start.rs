//! What must be true of the process before anything else runs.

use std::os::fd::{AsFd, BorrowedFd, IntoRawFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl, open};
use nix::sys::signal::{SigHandler, Signal, signal};
use nix::sys::stat::Mode;

/// Opens `/dev/null` in place of each standard descriptor that the caller left closed: what is opened next would get its
/// number, and what is written to stderr would go there.
pub(crate) fn replace_closed_descriptors() {
    let (stdin, stdout, stderr) = (std::io::stdin(), std::io::stdout(), std::io::stderr());
    let standard: [BorrowedFd<'_>; 3] = [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()];
    for descriptor in standard {
        if fcntl(descriptor, FcntlArg::F_GETFD) == Err(Errno::EBADF) {
            // The lowest number is free, so it is this one's. Without /dev/null nothing can be done.
            let _ = open("/dev/null", OFlag::O_RDWR, Mode::empty()).map(IntoRawFd::into_raw_fd);
        }
    }
}

/// A caller that has gone is an error of write(2), not the end of the process.
pub(crate) fn ignore_broken_pipes() {
    // SAFETY: no handler is installed, the signal is ignored. It cannot fail for a signal that exists.
    let _ = unsafe { signal(Signal::SIGPIPE, SigHandler::SigIgn) };
}

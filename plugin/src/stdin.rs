//! The network configuration on stdin, bounded in size and time.

use std::io::{self, Read};
use std::os::fd::AsFd;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::deadline::Deadline;

/// Longest input in bytes; a GC of thousands of attachments is a fraction of it.
const MAX_BYTES: u64 = 16 * 1024 * 1024;

/// The configuration could not be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StdinError {
    #[error("stdin cannot be read")]
    Read(#[source] io::Error),
    #[error("stdin was not closed in time: the runtime must close it after the configuration")]
    Deadline,
    #[error("more than {MAX_BYTES} bytes on stdin")]
    TooLong,
}

/// Reads stdin to its end.
pub(crate) fn read(deadline: Deadline) -> Result<Vec<u8>, StdinError> {
    let stdin = io::stdin();
    let mut input = Vec::with_capacity(4096);
    let mut reader = Unbuffered(&stdin, deadline).take(MAX_BYTES + 1);
    match reader.read_to_end(&mut input) {
        Ok(_) if input.len() as u64 > MAX_BYTES => Err(StdinError::TooLong),
        Ok(_) => Ok(input),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Err(StdinError::Deadline),
        Err(error) => Err(StdinError::Read(error)),
    }
}

/// Reads past std's buffer and its lock, and never longer than the deadline.
struct Unbuffered<'a>(&'a io::Stdin, Deadline);

impl Read for Unbuffered<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let left = PollTimeout::try_from(self.1.left()).unwrap_or(PollTimeout::MAX);
            match poll(&mut [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)], left) {
                Err(nix::errno::Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
                Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
                Ok(_) => return Ok(nix::unistd::read(self.0.as_fd(), buffer)?),
            }
        }
    }
}

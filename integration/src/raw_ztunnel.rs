//! A peer of the ZDS socket that speaks bytes, for what no ztunnel (and no stand-in) would do.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use nix::cmsg_space;
use nix::sys::socket::{
    AddressFamily, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, connect, recvmsg, send,
    setsockopt, socket, sockopt,
};
use nix::sys::time::TimeVal;

/// Kinds of `WorkloadRequest`, by the tag of its one field (istio's workload/zds.proto).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Field 1.
    Add,
    /// Field 2.
    Del,
    /// Field 3.
    SnapshotSent,
    /// Field 5.
    Keep,
}

/// One connection; closed when dropped.
#[derive(Debug)]
pub struct RawZtunnel(OwnedFd);

impl RawZtunnel {
    /// Connects and says nothing yet.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let fd = socket(
            AddressFamily::Unix,
            SockType::SeqPacket,
            SockFlag::SOCK_CLOEXEC,
            None,
        )?;
        connect(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
        Ok(Self(fd))
    }

    /// `ZdsHello` with a version below 128.
    pub fn hello(&self, version: u8) -> io::Result<()> {
        self.send(&[0x08, version])
    }

    /// `WorkloadResponse` with an empty `Ack`: success.
    pub fn ack(&self) -> io::Result<()> {
        self.send(&[0x0a, 0x00])
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        send(self.0.as_raw_fd(), bytes, MsgFlags::MSG_NOSIGNAL)?;
        Ok(())
    }

    /// The next message and its bytes; `None` once the broker has closed the connection. What came with it is closed.
    pub fn receive(&self, within: Duration) -> io::Result<Option<(Kind, Vec<u8>)>> {
        let timeout = TimeVal::new(
            i64::try_from(within.as_secs()).unwrap_or(0),
            i64::from(within.subsec_micros()),
        );
        setsockopt(&self.0, sockopt::ReceiveTimeout, &timeout)?;
        let mut buffer = [0; 2048];
        let mut control = cmsg_space!([std::os::fd::RawFd; 16]);
        let mut slices = [io::IoSliceMut::new(&mut buffer)];
        let received = recvmsg::<()>(
            self.0.as_raw_fd(),
            &mut slices,
            Some(&mut control),
            MsgFlags::MSG_CMSG_CLOEXEC,
        );
        let len = match received {
            Ok(message) => {
                for control in message.cmsgs()? {
                    if let ControlMessageOwned::ScmRights(descriptors) = control {
                        for fd in descriptors {
                            let _ = nix::unistd::close(fd);
                        }
                    }
                }
                message.bytes
            }
            Err(nix::errno::Errno::ECONNRESET) => 0,
            Err(errno) => return Err(errno.into()),
        };
        let kind = match buffer[..len].first() {
            None => return Ok(None),
            Some(0x0a) => Kind::Add,
            Some(0x12) => Kind::Del,
            Some(0x1a) => Kind::SnapshotSent,
            Some(0x2a) => Kind::Keep,
            Some(other) => return Err(io::Error::other(format!("unknown message {other:#x}"))),
        };
        Ok(Some((kind, buffer[..len].to_vec())))
    }
}

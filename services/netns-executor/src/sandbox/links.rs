//! Link notifications of one sandbox: its interface vanishing is how a missed DEL is noticed.

use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};
use sluice_proto::id::InterfaceName;
use sluice_proto::transport::reactor;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::netlink::bytes::Messages;
use crate::netlink::link;
use crate::sys;

/// A link message is about 1.5 KiB.
const BUFFER: usize = 8 * 1024;

/// What [`LinkWatch::changed`] tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LinkChange {
    /// The interface may have vanished.
    Gone,
    /// The socket failed.
    Unheard,
}

/// The subscription.
pub(super) struct LinkWatch(AsyncFd<OwnedFd>);

impl LinkWatch {
    /// Subscribes; None if the socket cannot, then the interface must be polled.
    pub(super) fn start(socket: OwnedFd) -> Option<Self> {
        if let Err(errno) = sys::subscribe_to_links(&socket) {
            tracing::warn!(%errno, "no link notifications; the interface is polled instead");
            return None;
        }
        match reactor::watch(socket, Interest::READABLE) {
            Ok(socket) => Some(Self(socket)),
            Err(error) => {
                tracing::warn!(%error, "no link notifications; the interface is polled instead");
                None
            }
        }
    }

    /// Waits until an interface of this name may have vanished, or nothing more will be heard of it. Cancel-safe.
    pub(super) async fn changed(watch: Option<&Self>, ifname: &InterfaceName) -> LinkChange {
        let Some(Self(socket)) = watch else {
            return std::future::pending().await;
        };
        loop {
            let Ok(mut guard) = socket.readable().await else {
                return LinkChange::Unheard;
            };
            match read(socket.get_ref(), ifname) {
                // ENOBUFS: notifications were lost, so look.
                Ok(true) | Err(Errno::ENOBUFS) => return LinkChange::Gone,
                Ok(false) | Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => guard.clear_ready(),
                Err(errno) => {
                    tracing::warn!(%errno, %ifname, "no more link notifications; the interface is polled instead");
                    return LinkChange::Unheard;
                }
            }
        }
    }

    pub(super) fn into_fd(self) -> OwnedFd {
        self.0.into_inner()
    }
}

fn read(socket: &OwnedFd, ifname: &InterfaceName) -> Result<bool, Errno> {
    let mut buffer = [0; BUFFER];
    let length = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT)?;
    Ok(deletes(&buffer[..length], ifname))
}

/// Whether the messages tell that the interface is gone.
fn deletes(datagram: &[u8], ifname: &InterfaceName) -> bool {
    Messages(datagram).any(|message| link::deleted(&message) == Some(ifname.as_str()))
}

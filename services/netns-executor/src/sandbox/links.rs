//! Link notifications of one sandbox: its interface vanishing is how a missed DEL is noticed.

use std::os::fd::OwnedFd;

use netlink_packet_core::{NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkMessage};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};
use sluice_proto::id::InterfaceName;
use sluice_proto::transport::reactor;
use std::os::fd::AsRawFd;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

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
fn deletes(mut bytes: &[u8], ifname: &InterfaceName) -> bool {
    while let Ok(message) = NetlinkMessage::<RouteNetlinkMessage>::deserialize(bytes) {
        let length = usize::try_from(message.header.length).unwrap_or(usize::MAX);
        if let NetlinkPayload::InnerMessage(RouteNetlinkMessage::DelLink(link)) = message.payload
            && is_named(&link, ifname)
        {
            return true;
        }
        match bytes.get(length.next_multiple_of(4)..) {
            Some(rest) if length > 0 && !rest.is_empty() => bytes = rest,
            _ => break,
        }
    }
    false
}

fn is_named(link: &LinkMessage, ifname: &InterfaceName) -> bool {
    let named = |attribute: &LinkAttribute| matches!(attribute, LinkAttribute::IfName(name) if name == ifname.as_str());
    link.attributes.iter().any(named)
}

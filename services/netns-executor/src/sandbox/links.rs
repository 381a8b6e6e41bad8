//! Notifications of one sandbox. Of links: its interface vanishing is how a missed DEL is noticed. Of routes and routing
//! rules: they tell the next drift pass that it must look. No sooner, since in some pods routes change all the time.

use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};
use sluice_proto::id::InterfaceName;
use sluice_proto::transport::reactor;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::Slot;
use super::task::Task;
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
pub(super) struct LinkWatch {
    socket: AsyncFd<OwnedFd>,
    asked_for_routing: bool,
}

impl LinkWatch {
    /// Subscribes; None if the socket cannot, then the interface must be polled.
    pub(super) fn start(socket: OwnedFd) -> Option<Self> {
        if let Err(errno) = sys::subscribe_to_links(&socket) {
            tracing::warn!(%errno, "no link notifications; the interface is polled instead");
            return None;
        }
        match reactor::watch(socket, Interest::READABLE) {
            Ok(socket) => Some(Self {
                socket,
                asked_for_routing: false,
            }),
            Err(error) => {
                tracing::warn!(%error, "no link notifications; the interface is polled instead");
                None
            }
        }
    }

    /// Waits until an interface of this name may have vanished, or nothing more will be heard of it; marks the slot when
    /// anything else changed, for routes that go with a link are not told of one by one. Cancel-safe.
    pub(super) async fn changed(watch: Option<&Self>, ifname: &InterfaceName, slot: &Slot) -> LinkChange {
        let Some(Self { socket, .. }) = watch else {
            return std::future::pending().await;
        };
        loop {
            let Ok(mut guard) = socket.readable().await else {
                return LinkChange::Unheard;
            };
            match read(socket.get_ref(), ifname) {
                Ok(true) => return LinkChange::Gone,
                Ok(false) => slot.routing_moved(),
                // Notifications were lost, so look.
                Err(Errno::ENOBUFS) => {
                    slot.routing_moved();
                    return LinkChange::Gone;
                }
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => guard.clear_ready(),
                Err(errno) => {
                    tracing::warn!(%errno, %ifname, "no more link notifications; the interface is polled instead");
                    return LinkChange::Unheard;
                }
            }
        }
    }

    pub(super) fn into_fd(self) -> OwnedFd {
        self.socket.into_inner()
    }
}

impl Task {
    /// Hears of the routing, too, once there are rules of ours and no ADD is under way: what is changed here ourselves need
    /// not be heard.
    pub(super) fn listen_for_routing(&mut self) {
        let settled = self.add.is_none() && self.has_rules();
        let Some(links) = self
            .links
            .as_mut()
            .filter(|links| settled && !links.asked_for_routing)
        else {
            return;
        };
        links.asked_for_routing = true;
        match sys::subscribe_to_routing(links.socket.get_ref()) {
            Ok(()) => {
                self.slot.set_hears_routing(true);
                // What changed before was not told.
                self.slot.routing_moved();
            }
            Err(errno) => tracing::warn!(%errno, "no notifications of routes; they are looked at in turns"),
        }
    }

    /// No more notifications come: interface and routing are polled from now on.
    pub(super) fn poll_links(&mut self) {
        if let Some(links) = self.links.take() {
            self.node.reaper.close(links.into_fd());
        }
        self.slot.set_poll_links(true);
        self.slot.set_hears_routing(false);
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

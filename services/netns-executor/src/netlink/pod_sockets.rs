//! What is handed over of one namespace.

use super::error::NetlinkError;
use super::socket::{NetfilterSocket, RouteSocket};

/// The two sockets of one namespace.
#[derive(Debug)]
pub struct PodSockets {
    /// For rules.
    pub netfilter: NetfilterSocket,
    /// For policy routing.
    pub route: RouteSocket,
}

impl PodSockets {
    /// Opens both in the calling thread's network namespace.
    pub fn open() -> Result<Self, NetlinkError> {
        Ok(Self {
            netfilter: NetfilterSocket::open()?,
            route: RouteSocket::open()?,
        })
    }
}

//! Speaks to the kernel over netlink sockets that somebody opened inside a pod's network namespace.
//!
//! A netlink socket belongs for ever to the namespace it was made in, and CAP_NET_ADMIN alone is enough to use one
//! that was handed over. So nothing here enters a namespace, reads `/proc`, or executes a program. [`apply()`] makes a
//! namespace hold exactly what a [`Desired`](sluice_proto::ambient::Desired) asks for, [`read_back`] tells what differs.
//! The encoder is our own: a few hundred lines that the one privileged process can be audited by.

pub mod apply;
pub mod bytes;
mod compare;
pub mod conntrack;
pub mod diagnostics;
mod diversion;
pub mod error;
mod expression;
pub mod link;
pub mod nft;
mod pod_sockets;
pub mod route;
pub mod socket;
pub mod table;
pub mod track;
pub mod verdict;

pub use apply::{ApplyError, Outcome, apply, generation, read_back, read_back_routing, routing_works};
pub use error::NetlinkError;
pub use nft::Batch;
pub use pod_sockets::PodSockets;
pub use socket::{DiagnosticSocket, NetfilterSocket, RouteSocket};
pub use table::{TableState, converge, difference, read_table};
pub use track::Tracked;

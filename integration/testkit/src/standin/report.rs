//! What the stand-in tells about itself.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// Everything, at one moment.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Report {
    /// Connected, and the snapshot of this connection was acknowledged.
    pub ready: bool,
    /// How often a ZDS connection was made.
    pub connections: u32,
    /// Every ZDS message received, in order; bounded by [`MESSAGES_KEPT`], oldest dropped.
    pub messages: Vec<ZdsMessage>,
    /// The pods held, by UID.
    pub workloads: BTreeMap<String, WorkloadReport>,
    /// Pods whose ADD was refused and whose netns is still held, by UID.
    pub pending: BTreeMap<String, u64>,
}

/// How many messages a report holds at most.
pub const MESSAGES_KEPT: usize = 50_000;

/// One ZDS message and the answer given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ZdsMessage {
    /// Which connection, from 1.
    pub connection: u32,
    /// Microseconds since the stand-in started.
    pub at_us: u64,
    /// `add`, `keep`, `del`, `snapshot_sent`, or `unreadable`.
    pub kind: String,
    /// Pod UID; empty for `snapshot_sent`.
    pub uid: String,
    /// `namespace/name` of an `add`.
    pub pod: Option<String>,
    /// Service account of an `add`.
    pub service_account: Option<String>,
    /// Inode of the netns that came with an `add`.
    pub netns_inode: Option<u64>,
    /// `ack`, `nack: TEXT`, `none`, `garbage`, `twice`.
    pub answer: String,
}

/// One pod held.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct WorkloadReport {
    /// `namespace/name`.
    pub pod: String,
    /// Service account.
    pub service_account: String,
    /// Inode of its netns.
    pub netns_inode: u64,
    /// Whether the listeners are open.
    pub listening: bool,
    /// Its addresses, read inside its netns.
    pub addresses: Vec<std::net::IpAddr>,
    /// What was relayed for it.
    pub counts: Counts,
}

/// How many connections or queries reached each listener.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Port 15001.
    pub outbound: u64,
    /// Port 15006.
    pub inbound: u64,
    /// Port 15008.
    pub tunnel: u64,
    /// Port 15053, UDP.
    pub dns_udp: u64,
    /// Port 15053, TCP.
    pub dns_tcp: u64,
    /// Connections whose other side could not be reached.
    pub failed: u64,
    /// Connections open now.
    pub open: u64,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) outbound: AtomicU64,
    pub(super) inbound: AtomicU64,
    pub(super) tunnel: AtomicU64,
    pub(super) dns_udp: AtomicU64,
    pub(super) dns_tcp: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) open: AtomicU64,
}

impl Counters {
    pub(super) fn read(&self) -> Counts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            outbound: read(&self.outbound),
            inbound: read(&self.inbound),
            tunnel: read(&self.tunnel),
            dns_udp: read(&self.dns_udp),
            dns_tcp: read(&self.dns_tcp),
            failed: read(&self.failed),
            open: read(&self.open),
        }
    }
}

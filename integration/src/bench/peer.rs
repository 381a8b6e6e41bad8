//! A ZDS peer that does nothing but acknowledge: what is measured is the broker, not a proxy.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::socket::{AddressFamily, Shutdown, SockFlag, SockType, UnixAddr, connect, shutdown, socket};
use prost::Message;
use sluice_proto::pb::zds::workload_request::Payload;
use sluice_proto::pb::zds::{
    Ack, SnapshotSent, Version, WorkloadRequest, WorkloadResponse, ZdsHello, workload_response,
};
use sluice_proto::transport::descriptors;
use sluice_testkit::wait::poll_until;

/// Longest packet of ZDS.
const MAX_PACKET: usize = 1024;

#[derive(Debug, Default)]
struct Seen {
    adds: usize,
    snapshot_acked: Option<Instant>,
}

/// A connection that acknowledges everything until dropped.
#[derive(Debug)]
pub(super) struct ZdsPeer {
    connected: Instant,
    socket: Arc<OwnedFd>,
    seen: Arc<Mutex<Seen>>,
    thread: Option<JoinHandle<()>>,
}

/// The bytes of a successful answer.
pub(super) fn ack() -> Vec<u8> {
    let payload = Some(workload_response::Payload::Ack(Ack { error: String::new() }));
    WorkloadResponse { payload }.encode_to_vec()
}

/// The bytes that end a snapshot: compared with instead of decoding each message, as little as a peer can do.
fn snapshot_sent() -> Vec<u8> {
    let payload = Some(Payload::SnapshotSent(SnapshotSent {}));
    WorkloadRequest { payload }.encode_to_vec()
}

impl ZdsPeer {
    /// Connects to the broker's socket, trying until somebody listens.
    pub(super) fn connect(path: &Path) -> anyhow::Result<Self> {
        let address = UnixAddr::new(path)?;
        let socket = socket(
            AddressFamily::Unix,
            SockType::SeqPacket,
            SockFlag::SOCK_CLOEXEC,
            None,
        )?;
        let mut connected = Instant::now();
        poll_until(
            "the ZDS socket takes a connection",
            Duration::from_secs(10),
            || {
                connected = Instant::now();
                connect(std::os::fd::AsRawFd::as_raw_fd(&socket), &address).ok()
            },
        )?;
        let hello = ZdsHello {
            version: Version::V1.into(),
        }
        .encode_to_vec();
        descriptors::send(&socket, &hello, &[])?;
        let (socket, seen) = (Arc::new(socket), Arc::new(Mutex::new(Seen::default())));
        let (ours, noted) = (socket.clone(), seen.clone());
        let thread = std::thread::spawn(move || answer(&ours, &noted));
        Ok(Self {
            connected,
            socket,
            seen,
            thread: Some(thread),
        })
    }

    /// Waits until the snapshot was acknowledged; gives the time since the connection was made, and how many pods came.
    pub(super) fn snapshot(&self) -> anyhow::Result<(Duration, usize)> {
        let acked = poll_until("the snapshot is complete", Duration::from_secs(20), || {
            let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            seen.snapshot_acked.map(|at| (at, seen.adds))
        });
        let (at, adds) = acked?;
        Ok((at - self.connected, adds))
    }
}

impl Drop for ZdsPeer {
    fn drop(&mut self) {
        let _ = shutdown(std::os::fd::AsRawFd::as_raw_fd(&*self.socket), Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn answer(socket: &OwnedFd, seen: &Mutex<Seen>) {
    let (ack, end) = (ack(), snapshot_sent());
    while let Ok(received) = descriptors::receive(socket, MAX_PACKET, 1) {
        if received.bytes.is_empty() {
            return;
        }
        // As a proxy would have it by then; the descriptor itself is let go.
        drop(received.descriptors);
        if descriptors::send(socket, &ack, &[]).is_err() {
            return;
        }
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        if received.bytes == end {
            seen.snapshot_acked = Some(Instant::now());
        } else {
            // Nothing is taken back while a benchmark looks.
            seen.adds += 1;
        }
    }
}

/// Two connected sockets as ZDS has them.
pub(super) fn pair() -> anyhow::Result<(OwnedFd, OwnedFd)> {
    Ok(nix::sys::socket::socketpair(
        AddressFamily::Unix,
        SockType::SeqPacket,
        None,
        SockFlag::SOCK_CLOEXEC,
    )?)
}

//! The floors: what cannot be beaten, measured beside what is compared with it.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::sys::socket::{Shutdown, shutdown};
use sluice_proto::transport::descriptors;
use sluice_testkit::cni::{Execution, start_plugin, start_program};
use sluice_testkit::netns::{Netns, Place};
use sluice_testkit::process::binary;

use super::peer;

/// Name of the floor: an empty program.
pub(super) const EMPTY: &str = "empty program";
/// Name of the floor: nft.
pub(super) const NFT: &str = "nft -f -";
/// Name of the floor: a bare pair of sockets.
pub(super) const PAIR: &str = "bare pair";
/// Name of the floor: a single message over it.
pub(super) const ONE: &str = "bare pair, once";

/// Executes the empty program.
pub(super) fn empty(place: &Place) -> anyhow::Result<Duration> {
    let execution = start_plugin(
        place,
        "floor-empty",
        &binary("floor-empty")?,
        Vec::new(),
        Vec::new(),
    )?
    .wait()?;
    anyhow::ensure!(execution.status.success(), "floor-empty: {}", execution.status);
    Ok(execution.elapsed)
}

/// `nft -f -` in `netns`.
pub(super) fn nft(netns: &Netns, rules: &str) -> anyhow::Result<Execution> {
    let program = ["/usr/sbin/nft", "/sbin/nft", "/usr/bin/nft"]
        .iter()
        .map(Path::new)
        .find(|path| path.exists());
    let program = program.context("nft is not installed; it is one of the floors")?;
    let args = vec!["-f".to_owned(), "-".to_owned()];
    let running = start_program(
        &Place::from(netns),
        "nft",
        program,
        args,
        Vec::new(),
        rules.as_bytes().to_vec(),
    )?;
    let execution = running.wait()?;
    anyhow::ensure!(
        execution.status.success(),
        "nft: {} {}",
        execution.status,
        execution.stderr
    );
    Ok(execution)
}

/// A bare pair of sockets, whose other end acknowledges every message.
#[derive(Debug)]
pub(super) struct BarePair {
    ours: OwnedFd,
    other: Option<JoinHandle<()>>,
}

impl BarePair {
    pub(super) fn start() -> anyhow::Result<Self> {
        let (ours, theirs) = peer::pair()?;
        let other = std::thread::spawn(move || {
            let ack = peer::ack();
            while descriptors::receive(&theirs, 1024, 1).is_ok_and(|received| !received.bytes.is_empty()) {
                if descriptors::send(&theirs, &ack, &[]).is_err() {
                    return;
                }
            }
        });
        let other = Some(other);
        Ok(Self { ours, other })
    }

    /// `rounds` messages with a descriptor, each after the acknowledgement of the one before; the mean.
    pub(super) fn pass(&self, netns: &Netns, rounds: u32) -> anyhow::Result<Duration> {
        // About as long as an Add.
        let message = [0x0a; 90];
        let began = Instant::now();
        for _ in 0..rounds {
            descriptors::send(&self.ours, &message, &[netns.as_fd()])?;
            descriptors::receive(&self.ours, 1024, 0)?;
        }
        Ok(began.elapsed() / rounds)
    }
}

impl Drop for BarePair {
    fn drop(&mut self) {
        let _ = shutdown(self.ours.as_raw_fd(), Shutdown::Both);
        if let Some(other) = self.other.take() {
            let _ = other.join();
        }
    }
}

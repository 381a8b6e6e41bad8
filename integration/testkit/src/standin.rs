//! A **stand-in for ztunnel**, for tests and the demo only. It speaks ZDS as ztunnel does, enters each pod's netns,
//! listens on ztunnel's ports and relays what the redirection rules bring; but there is no TLS, no identity, no
//! authorisation: HBONE is replaced by one line of text (`CONNECT address:port`).
//!
//! It can be told to misbehave ([`Behaviour`]) and tells what it received and relayed ([`Report`]), through its control
//! socket ([`Control`]). It needs CAP_NET_ADMIN (marks, foreign source addresses) and CAP_SYS_ADMIN (entering).

mod behaviour;
mod control;
mod relay;
mod report;
mod sockets;
mod workloads;
mod zds;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;

pub use self::behaviour::Behaviour;
pub use self::control::Control;
pub use self::report::{Counts, MESSAGES_KEPT, Report, WorkloadReport, ZdsMessage};
use self::workloads::State;

/// `SO_MARK` of every socket of the proxy (1337, as ztunnel's).
pub const MARK: u32 = 0x539;
/// Port of captured outbound connections.
pub const OUTBOUND_PORT: u16 = 15001;
/// Port of captured plain-text inbound connections.
pub const INBOUND_PORT: u16 = 15006;
/// Port of tunnelled connections (HBONE with ztunnel).
pub const TUNNEL_PORT: u16 = 15008;
/// Port of captured DNS queries, on loopback.
pub const DNS_PORT: u16 = 15053;
/// What the stand-in answers to every A query: a documentation address (RFC 5737) that no resolver would give.
pub const DNS_MARKER_V4: std::net::Ipv4Addr = std::net::Ipv4Addr::new(192, 0, 2, 53);
/// What the stand-in answers to every AAAA query (RFC 3849).
pub const DNS_MARKER_V6: std::net::Ipv6Addr = std::net::Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0x53);

/// Command line of `standin-proxy`.
#[derive(Debug, Clone, clap::Parser)]
#[command(
    about = "Stand-in for ztunnel in tests and the demo: relays traffic of enrolled pods, without any security"
)]
pub struct Options {
    /// The node agent's ZDS socket.
    #[arg(long)]
    pub zds: PathBuf,
    /// Where to serve the control socket.
    #[arg(long)]
    pub control: Option<PathBuf>,
    /// Only answer ZDS messages; open nothing inside the pods.
    #[arg(long)]
    pub no_listeners: bool,
    /// Send connections between two held pods through the tunnel port of the destination.
    #[arg(long)]
    pub tunnel: bool,
    /// Ask this server, over UDP from inside the pod, instead of answering UDP queries with the marker address.
    #[arg(long)]
    pub dns_upstream: Option<std::net::SocketAddr>,
    /// What to do wrong, as JSON; see the control socket for changing it later.
    #[arg(long, value_parser = Behaviour::parse, default_value = "{}")]
    pub behaviour: Behaviour,
    /// Longest pause between two attempts to connect, in milliseconds; it starts at 10.
    #[arg(long, default_value_t = 200)]
    pub max_backoff_ms: u64,
    /// How long connections may go on after SIGTERM, in milliseconds.
    #[arg(long, default_value_t = 1000)]
    pub grace_ms: u64,
}

/// Runs until SIGTERM or SIGINT, then lets connections end for the grace period.
pub fn run(options: Options) -> anyhow::Result<()> {
    let (_, hard) = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE)?;
    nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE, hard, hard)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let grace = Duration::from_millis(options.grace_ms);
    let state = Arc::new(State::new(options, runtime.handle().clone()));
    let zds = zds::Client::start(state.clone())?;
    if let Some(path) = &state.options.control {
        control::serve(path, state.clone()).with_context(|| format!("control socket {}", path.display()))?;
    }
    runtime.block_on(async {
        use tokio::signal::unix::{SignalKind, signal};
        let (mut terminate, mut interrupt) =
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
        zds.close();
        let _ = tokio::time::timeout(grace, state.drain()).await;
        anyhow::Ok(())
    })
}

//! The node that the demo plays on, and small questions that several steps ask.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context;
use sluice_proto::pb::executor::NodeStatusResponse;
use sluice_testkit::pod::Pod;
use sluice_testkit::standin::Counts;
use sluice_testkit::traffic::client::LoadOptions;
use sluice_testkit::traffic::server::EchoServer;
use sluice_testkit::wait::poll_until;

use super::kernel::View;
use crate::mesh::Mesh;

/// Port of the application in every pod.
pub(super) const PORT: u16 = 8080;
/// A request without an answer after this counts as failed.
pub(super) const ANSWER: Duration = Duration::from_secs(3);

/// The running node with its pods.
#[derive(Debug)]
pub(super) struct Stage {
    /// Mesh pod that requests come from.
    pub(super) client: Pod,
    /// Mesh pod with an application.
    pub(super) server: Pod,
    /// Pod outside of the mesh, with an application and a name server.
    pub(super) plain: Pod,
    /// Another pod outside of the mesh.
    pub(super) outsider: Pod,
    /// The applications.
    pub(super) _apps: Vec<EchoServer>,
    /// The node. Last, so that pods go before it.
    pub(super) mesh: Mesh,
}

impl Stage {
    /// The pod's application, IPv4 or IPv6.
    pub(super) fn app(pod: &Pod, ipv6: bool) -> SocketAddr {
        SocketAddr::new(pod.address(ipv6), PORT)
    }

    /// What the stand-in relayed for a pod so far; zero if it does not hold the pod.
    pub(super) fn relayed(&self, pod: &Pod) -> anyhow::Result<Counts> {
        let report = self.mesh.control().counts()?;
        Ok(report
            .workloads
            .get(pod.uid())
            .map(|workload| workload.counts)
            .unwrap_or_default())
    }

    /// Number of nftables rules in a pod.
    pub(super) fn rules(pod: &Pod) -> anyhow::Result<usize> {
        View::of(pod.netns())
            .and_then(|view| view.rules())
            .with_context(|| format!("rules of pod {}", pod.name()))
    }

    /// The generation of the rules of a pod.
    pub(super) fn generation(pod: &Pod) -> anyhow::Result<u32> {
        let generation = View::of(pod.netns()).and_then(|view| view.generation());
        generation.with_context(|| format!("generation of the rules of pod {}", pod.name()))
    }

    /// What the executor says about itself.
    pub(super) fn executor(&self) -> anyhow::Result<NodeStatusResponse> {
        self.mesh
            .node_status()?
            .executor
            .context("the broker has no executor")
    }

    /// Polls `condition` and gives how long it took.
    pub(super) fn timed<T>(
        what: &str,
        within: Duration,
        condition: impl FnMut() -> Option<T>,
    ) -> anyhow::Result<(Duration, T)> {
        let began = std::time::Instant::now();
        let value = poll_until(what, within, condition)?;
        Ok((began.elapsed(), value))
    }
}

/// 200 requests a second over new connections and 20 kept ones to a pod's application, IPv4.
pub(super) fn steady(to: &Pod) -> LoadOptions {
    LoadOptions {
        timeout: ANSWER,
        ..LoadOptions::new(Stage::app(to, false))
    }
}

//! What is counted, in Prometheus' terms. Names that Istio's node agent has are kept.

mod executor;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use sluice_proto::pb::executor::NodeStatusResponse;
use sluice_proto::pb::node::{InstallerReport, Installs};

use crate::reconcile::Event;
use crate::reconcile::report::{PodReport, Standing};
use crate::zds::{Phase, ServerStatus};

/// Seconds, from below one netlink call to the ADD's deadline.
const BUCKETS: [f64; 14] = [
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Type {
    r#type: &'static str,
}
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Stage {
    stage: &'static str,
}
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: &'static str,
}
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Connections {
    state: &'static str,
}
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Response {
    response_code: u16,
}
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    result: &'static str,
}
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Socket {
    socket: &'static str,
}

/// All metrics of the process.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    reconcile_events: Family<Type, Counter>,
    plugin_requests: Family<Response, Counter>,
    add_seconds: Family<Stage, Histogram, fn() -> Histogram>,
    reconcile_seconds: Histogram,
    api_initial_sync_seconds: Gauge<f64, AtomicU64>,
    start_to_ready_seconds: Gauge<f64, AtomicU64>,
    pods_expected: Gauge,
    pods_enrolled: Gauge,
    pods_unprotected: Gauge,
    pods_pending: Gauge,
    pods_broken: Family<Reason, Gauge>,
    ztunnel_connected: Gauge,
    zds_connections: Family<Connections, Gauge>,
    zds_queue_depth: Gauge,
    zds_oldest_waiter_seconds: Gauge<f64, AtomicU64>,
    zds_refused_peers: Gauge,
    refused_peers: Family<Socket, Counter>,
    zds_protocol_errors: Gauge,
    host_and_pod_repairs: Gauge,
    open_descriptors: Gauge,
    install_ready: Gauge,
    installs: Family<Outcome, Counter>,
    installer_repairs: Gauge,
}

fn seconds() -> Histogram {
    Histogram::new(BUCKETS)
}

impl Default for Metrics {
    fn default() -> Self {
        let mut metrics = Self {
            registry: Registry::default(),
            reconcile_events: Family::default(),
            plugin_requests: Family::default(),
            add_seconds: Family::new_with_constructor(seconds),
            reconcile_seconds: Histogram::new([0.00001, 0.0001, 0.001, 0.01, 0.1, 1.0]),
            api_initial_sync_seconds: Gauge::default(),
            start_to_ready_seconds: Gauge::default(),
            pods_expected: Gauge::default(),
            pods_enrolled: Gauge::default(),
            pods_unprotected: Gauge::default(),
            pods_pending: Gauge::default(),
            pods_broken: Family::default(),
            ztunnel_connected: Gauge::default(),
            zds_connections: Family::default(),
            zds_queue_depth: Gauge::default(),
            zds_oldest_waiter_seconds: Gauge::default(),
            zds_refused_peers: Gauge::default(),
            refused_peers: Family::default(),
            zds_protocol_errors: Gauge::default(),
            host_and_pod_repairs: Gauge::default(),
            open_descriptors: Gauge::default(),
            install_ready: Gauge::default(),
            installs: Family::default(),
            installer_repairs: Gauge::default(),
        };
        metrics.register();
        metrics
    }
}

impl Metrics {
    fn register(&mut self) {
        let registry = &mut self.registry;
        macro_rules! register {
            ($name:literal, $help:literal, $field:ident) => {
                registry.register($name, $help, self.$field.clone());
            };
        }
        register!(
            "nodeagent_reconcile_events",
            "Pod events from the source",
            reconcile_events
        );
        register!(
            "istio_cni_plugin_requests",
            "Requests of an installed istio-cni plugin",
            plugin_requests
        );
        register!("add_seconds", "Duration of each step of an ADD", add_seconds);
        register!(
            "reconcile_seconds",
            "Time one event took in the state machine",
            reconcile_seconds
        );
        register!(
            "api_initial_sync_seconds",
            "Start until the source had told everything",
            api_initial_sync_seconds
        );
        register!(
            "start_to_ready_seconds",
            "Start until the node could take pods; 0: not yet",
            start_to_ready_seconds
        );
        register!(
            "pods_expected",
            "Selected pods that have not ended",
            pods_expected
        );
        register!("pods_enrolled", "Pods in the mesh", pods_enrolled);
        register!(
            "pods_unprotected",
            "Selected pods that run without being redirected",
            pods_unprotected
        );
        register!("pods_pending", "Selected pods on their way", pods_pending);
        register!("pods_broken", "Selected pods with a problem", pods_broken);
        register!("ztunnel_connected", "Live ztunnel connections", ztunnel_connected);
        register!("zds_connections", "ztunnel connections by state", zds_connections);
        register!(
            "zds_queue_depth",
            "Messages waiting to be sent or answered",
            zds_queue_depth
        );
        register!(
            "zds_oldest_waiter_seconds",
            "How long the oldest unanswered message waits",
            zds_oldest_waiter_seconds
        );
        register!("zds_refused_peers", "Peers refused by uid", zds_refused_peers);
        register!(
            "refused_peers",
            "Peers of the other sockets refused by uid",
            refused_peers
        );
        register!(
            "zds_protocol_errors",
            "Connections closed for breaking the protocol",
            zds_protocol_errors
        );
        register!(
            "executor_repairs",
            "Drift repaired by the executor",
            host_and_pod_repairs
        );
        register!(
            "open_descriptors",
            "Open descriptors of this process",
            open_descriptors
        );
        register!(
            "istio_cni_install_ready",
            "Whether plugin, chain entry and credentials are in place and in force",
            install_ready
        );
        register!(
            "istio_cni_installs",
            "Times that plugin, chain entry and credentials became ready, and steps towards it that failed",
            installs
        );
        register!(
            "installer_repairs",
            "Files of the installer that somebody had damaged",
            installer_repairs
        );
    }

    /// Counts a fact on its way into the state machine.
    pub fn event(&self, event: &Event) {
        let kind = match event {
            Event::PodApplied(_) => "update",
            Event::PodDeleted(_) => "delete",
            Event::SandboxPending(_) => "add",
            _ => return,
        };
        self.reconcile_events.get_or_create(&Type { r#type: kind }).inc();
    }

    /// A step of an ADD took so long.
    pub fn stage(&self, stage: &'static str, elapsed: Duration) {
        self.add_seconds
            .get_or_create(&Stage { stage })
            .observe(elapsed.as_secs_f64());
    }

    /// One event took so long.
    pub fn reconciled(&self, elapsed: Duration) {
        self.reconcile_seconds.observe(elapsed.as_secs_f64());
    }

    /// The source has told everything.
    pub fn synced(&self, elapsed: Duration) {
        self.api_initial_sync_seconds.set(elapsed.as_secs_f64());
    }

    /// The node can take pods.
    pub fn ready(&self, elapsed: Duration) {
        self.start_to_ready_seconds.set(elapsed.as_secs_f64());
    }

    /// A request of an installed istio-cni plugin was answered.
    pub fn plugin_request(&self, response_code: u16) {
        self.plugin_requests
            .get_or_create(&Response { response_code })
            .inc();
    }

    /// A peer of a Unix socket other than ZDS was refused.
    pub(crate) fn refused_peer(&self, socket: &'static str) {
        self.refused_peers.get_or_create(&Socket { socket }).inc();
    }

    /// Where the pods stand.
    pub fn standing(&self, reports: &[Arc<PodReport>]) {
        let (mut enrolled, mut pending, mut unprotected) = (0, 0, 0);
        let mut broken: BTreeMap<&'static str, i64> = BTreeMap::new();
        for report in reports {
            unprotected += i64::from(report.unprotected);
            match report.standing {
                Standing::Enrolled => enrolled += 1,
                Standing::Pending => pending += 1,
                Standing::Broken => *broken.entry(report.reason).or_default() += 1,
                Standing::Out | Standing::Draining => {}
            }
        }
        self.pods_enrolled.set(enrolled);
        self.pods_unprotected.set(unprotected);
        self.pods_pending.set(pending);
        self.pods_expected
            .set(enrolled + pending + broken.values().sum::<i64>());
        self.pods_broken.clear();
        for (reason, count) in broken {
            self.pods_broken.get_or_create(&Reason { reason }).set(count);
        }
    }

    /// How the ZDS server stands.
    pub fn zds(&self, status: &ServerStatus) {
        let number = |value: usize| i64::try_from(value).unwrap_or(i64::MAX);
        self.ztunnel_connected.set(number(status.connections.len()));
        for phase in [Phase::Hello, Phase::Snapshot, Phase::Ready] {
            let state = phase.as_str();
            let count = status
                .connections
                .iter()
                .filter(|c| c.phase.as_str() == state)
                .count();
            self.zds_connections
                .get_or_create(&Connections { state })
                .set(number(count));
        }
        let depth = status.connections.iter().map(|c| c.pending).sum();
        self.zds_queue_depth.set(number(depth));
        let oldest = status
            .connections
            .iter()
            .filter_map(|c| c.oldest)
            .max()
            .unwrap_or_default();
        self.zds_oldest_waiter_seconds.set(oldest.as_secs_f64());
        self.zds_refused_peers
            .set(i64::try_from(status.refused_peers).unwrap_or(i64::MAX));
        self.zds_protocol_errors
            .set(i64::try_from(status.protocol_errors).unwrap_or(i64::MAX));
    }

    /// What the installer said last.
    pub fn installer(&self, report: &InstallerReport) {
        self.install_ready.set(i64::from(report.ready));
        let Installs {
            succeeded,
            plugin_failed,
            kubeconfig_failed,
            configuration_failed,
        } = report.installs.unwrap_or_default();
        for (result, count) in [
            ("SUCCESS", succeeded),
            ("COPY_BINARIES_FAILURE", plugin_failed),
            ("CREATE_KUBECONFIG_FAILURE", kubeconfig_failed),
            ("CREATE_CNI_CONFIG_FAILURE", configuration_failed),
        ] {
            // The installer counts, from its start on.
            let counter = self.installs.get_or_create(&Outcome { result });
            counter.inner().store(count, Ordering::Relaxed);
        }
        self.installer_repairs
            .set(i64::try_from(report.repairs).unwrap_or(i64::MAX));
    }

    /// Facts that are only looked up when somebody asks.
    pub fn process(&self, repaired: u64) {
        self.host_and_pod_repairs
            .set(i64::try_from(repaired).unwrap_or(i64::MAX));
        let open = sluice_runtime::limits::open_files().unwrap_or(0);
        self.open_descriptors.set(i64::try_from(open).unwrap_or(i64::MAX));
    }

    /// The text form; with the executor's figures, if it has told them.
    pub fn render(&self, executor: Option<&NodeStatusResponse>) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        if let Some(status) = executor {
            text += &executor::render(status)?;
        }
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

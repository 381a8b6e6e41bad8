//! Counters and histograms that `NodeStatus` reports.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use sluice_proto::pb::executor;

use crate::kernel::{HostDamage, Tracked};

/// Upper bounds of the histograms' buckets, in seconds; the last bucket has none.
pub const BOUNDS: [f64; 12] = [
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 2.0, 10.0,
];

/// Stages of one ADD.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Connection accepted until its first call.
    Connect,
    /// Checking the descriptors and recording the sandbox.
    Netns,
    /// Until the broker's first word.
    Classify,
    /// Programming the namespace.
    Rules,
    /// From there until the broker completes: fetching the descriptor, the proxy's answer.
    Handoff,
    /// The host's address sets.
    ProbeSet,
    /// Everything inside the executor.
    Total,
}

impl Stage {
    fn label(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Netns => "netns",
            Self::Classify => "classify",
            Self::Rules => "rules",
            Self::Handoff => "handoff",
            Self::ProbeSet => "probe-set",
            Self::Total => "total",
        }
    }
}

#[derive(Debug, Default, Clone)]
struct Histogram {
    counts: [u64; BOUNDS.len() + 1],
    sum: f64,
}

/// All of them.
#[derive(Debug, Default)]
pub struct Metrics {
    stages: Mutex<BTreeMap<Stage, Histogram>>,
    refused_descriptors: Mutex<BTreeMap<&'static str, u64>>,
    refused_peers: Mutex<BTreeMap<&'static str, u64>>,
    repaired_pods: AtomicU64,
    repaired_host: Mutex<BTreeMap<HostDamage, u64>>,
    tracked_connections: Mutex<BTreeMap<&'static str, u64>>,
    unlisted_enrolments: AtomicU64,
}

impl Metrics {
    /// A stage of an ADD took this long.
    pub fn observe(&self, stage: Stage, took: Duration) {
        let seconds = took.as_secs_f64();
        let bucket = BOUNDS
            .iter()
            .position(|bound| seconds <= *bound)
            .unwrap_or(BOUNDS.len());
        let mut stages = self.stages.lock().unwrap_or_else(PoisonError::into_inner);
        let histogram = stages.entry(stage).or_default();
        histogram.counts[bucket] += 1;
        histogram.sum += seconds;
    }

    /// Descriptors were refused.
    pub fn refused_descriptor(&self, reason: &'static str) {
        count(&self.refused_descriptors, reason, 1);
    }

    /// A peer was refused at a socket.
    pub fn refused_peer(&self, socket: &'static str) {
        count(&self.refused_peers, socket, 1);
    }

    /// A pod's namespace was repaired.
    pub fn repaired_pod(&self) {
        self.repaired_pods.fetch_add(1, Ordering::Relaxed);
    }

    /// The host's rules were repaired; this was the worst of what was found.
    pub fn repaired_host(&self, worst: HostDamage) {
        let mut repaired = self.repaired_host.lock().unwrap_or_else(PoisonError::into_inner);
        *repaired.entry(worst).or_default() += 1;
    }

    /// Conntrack was told of a running pod's connections.
    pub fn tracked(&self, tracked: &Tracked) {
        for (outcome, connections) in [
            ("made", tracked.made),
            ("known", tracked.known),
            ("refused", tracked.refused),
        ] {
            count(&self.tracked_connections, outcome, connections.into());
        }
    }

    /// A running pod is enrolled although its connections could not be listed.
    pub fn unlisted_enrolment(&self) {
        self.unlisted_enrolments.fetch_add(1, Ordering::Relaxed);
    }

    /// Writes everything into a status.
    pub fn report(&self, status: &mut executor::NodeStatusResponse) {
        status.repaired_pods = self.repaired_pods.load(Ordering::Relaxed);
        let repaired = self.repaired_host.lock().unwrap_or_else(PoisonError::into_inner);
        // A counter is there before it counts: nobody notices the step from nothing to one.
        status.host_repairs = HostDamage::ALL
            .into_iter()
            .map(|damage| executor::Counter {
                label: damage.label().to_owned(),
                value: repaired.get(&damage).copied().unwrap_or_default(),
            })
            .collect();
        status.repaired_host = repaired.values().sum();
        status.refused_descriptors = counters(&self.refused_descriptors);
        status.refused_peers = counters(&self.refused_peers);
        status.tracked_connections = counters(&self.tracked_connections);
        status.unlisted_enrolments = self.unlisted_enrolments.load(Ordering::Relaxed);
        let stages = self.stages.lock().unwrap_or_else(PoisonError::into_inner);
        status.add_seconds = stages
            .iter()
            .map(|(stage, histogram)| executor::Histogram {
                label: stage.label().to_owned(),
                bounds: BOUNDS.into_iter().chain([f64::INFINITY]).collect(),
                counts: histogram
                    .counts
                    .iter()
                    .scan(0, |sum, count| {
                        *sum += count;
                        Some(*sum)
                    })
                    .collect(),
                sum: histogram.sum,
            })
            .collect();
    }
}

fn count(counters: &Mutex<BTreeMap<&'static str, u64>>, label: &'static str, number: u64) {
    let mut counters = counters.lock().unwrap_or_else(PoisonError::into_inner);
    *counters.entry(label).or_default() += number;
}

fn counters(counters: &Mutex<BTreeMap<&'static str, u64>>) -> Vec<executor::Counter> {
    let counters = counters.lock().unwrap_or_else(PoisonError::into_inner);
    let counter = |(label, value): (&&str, &u64)| executor::Counter {
        label: (*label).to_owned(),
        value: *value,
    };
    counters.iter().map(counter).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Mended;

    #[test]
    fn a_repair_of_the_host_counts_once_for_the_worst_that_was_found() {
        let metrics = Metrics::default();
        let mut mended = Mended::default();
        mended.add(HostDamage::Leftovers, Vec::new());
        assert_eq!(mended.worst, None, "nothing was found");
        for damage in [
            HostDamage::AddressesMissing,
            HostDamage::RulesChanged,
            HostDamage::Leftovers,
        ] {
            mended.add(damage, [damage.label().to_owned()]);
        }
        assert_eq!(mended.lines.len(), 3);
        metrics.repaired_host(mended.worst.unwrap());
        let mut status = executor::NodeStatusResponse::default();
        metrics.report(&mut status);
        assert_eq!(status.repaired_host, 1);
        for counter in &status.host_repairs {
            assert_eq!(
                counter.value,
                u64::from(counter.label == "rules-changed"),
                "{counter:?}"
            );
        }
        assert_eq!(status.host_repairs.len(), HostDamage::ALL.len());
    }

    #[test]
    fn buckets_are_cumulative_and_end_with_all() {
        let metrics = Metrics::default();
        metrics.observe(Stage::Rules, Duration::from_micros(600));
        metrics.observe(Stage::Rules, Duration::from_mins(1));
        metrics.refused_descriptor("host-netns");
        let mut status = executor::NodeStatusResponse::default();
        metrics.report(&mut status);
        let histogram = &status.add_seconds[0];
        assert_eq!(histogram.counts.len(), histogram.bounds.len());
        assert_eq!(histogram.counts[3], 1, "0.6 ms is below 1 ms");
        assert_eq!(histogram.counts.last(), Some(&2));
        assert_eq!(status.refused_descriptors[0].label, "host-netns");
    }
}

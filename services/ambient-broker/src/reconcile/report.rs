//! Where a pod stands, and what people and the control plane are told.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use sluice_proto::ambient::Desired;
use sluice_proto::id::{Namespace, PodRef};
use sluice_proto::sandbox::{Failure, NetnsIdentity};
use sluice_selection::Phase;

use super::effect::{Effect, Level};
use super::event::ConnectionId;
use super::pod::{Answer, Current, Offer, Pod};
use super::world::World;

/// Where a pod stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Standing {
    /// Not selected.
    Out,
    /// Selected, on its way or waiting.
    Pending,
    /// Rules are right and a live connection has acknowledged the netns.
    Enrolled,
    /// Selected, but something is wrong.
    Broken,
    /// Leaving.
    Draining,
}

/// What node-local tools are told of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodReport {
    /// The pod.
    pub pod: PodRef,
    /// Where it stands.
    pub standing: Standing,
    /// It runs without its traffic being redirected although it is selected.
    pub unprotected: bool,
    /// Why it is in or out.
    pub verdict: String,
    /// Annotations with values that are not taken, and why not; empty: none.
    pub ignored: String,
    /// For pending and broken: a stable reason.
    pub reason: &'static str,
    /// What failed last.
    pub last_error: Option<Failure>,
    /// Its netns.
    pub netns: Option<NetnsIdentity>,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// How long each step took.
    pub timings: Vec<(&'static str, Duration)>,
    /// Who acknowledged it and when (Unix time in milliseconds).
    pub acked: Option<(ConnectionId, u64)>,
    /// Failed attempts in a row.
    pub retries: u32,
    /// Short fingerprint of the rules in the netns; empty: none, or not programmed in this life of the broker.
    pub rules_version: String,
}

impl World {
    /// Compares the pod with what was told of it last and tells what is new.
    pub(super) fn settle(&mut self, pod: &mut Pod) {
        let held = self.hold_reach(pod);
        let (standing, reason) = self.standing(pod, held);
        self.settle_status(pod, standing);
        let enrolled = standing == Standing::Enrolled;
        if enrolled != pod.was_enrolled {
            pod.was_enrolled = enrolled;
            let message = if enrolled {
                "pod enrolled"
            } else {
                "pod no longer enrolled"
            };
            self.log(pod, Level::Info, message, reason.to_owned());
        }
        let report = Self::report(pod, standing, reason);
        if pod.report.as_deref() != Some(&report) {
            let report = Arc::new(report);
            pod.report = Some(report.clone());
            self.emit(Effect::Publish {
                pod: pod.reference.clone(),
                report: Some(report),
            });
        }
    }

    /// A restarted executor cannot reach any netns until it got the descriptors back, which takes moments; the rules
    /// are in place meanwhile. True while that is believed of the pod.
    fn hold_reach(&self, pod: &mut Pod) -> bool {
        let unreachable = |pod: &Pod| {
            pod.usable()
                .is_some_and(|current| current.established && !current.sandbox.reachable)
        };
        if !pod.was_enrolled || !unreachable(pod) {
            pod.reach_hold = None;
            return false;
        }
        let until = self.now + self.settings.status_hold;
        *pod.reach_hold.get_or_insert(until) > self.now
    }

    /// Every selected pod that has not ended is exactly one of pending, enrolled and broken.
    fn standing(&self, pod: &Pod, held: bool) -> (Standing, &'static str) {
        let Some(options) = pod.wanted() else {
            if pod.is_undecided() && !pod.ended() {
                return (Standing::Pending, "namespace-undetermined");
            }
            let redirected = pod.usable().is_some_and(|current| !current.is_clean());
            let leaving = redirected && pod.object.is_some() && !pod.ended();
            return if leaving || pod.offer != Offer::Off {
                (Standing::Draining, "")
            } else {
                (Standing::Out, "")
            };
        };
        let Some(current) = pod.usable() else {
            return match &pod.problem {
                Some((reason, _)) => (Standing::Broken, reason),
                None => (Standing::Pending, "no-sandbox"),
            };
        };
        if let Some(failure) = current.sandbox.broken.as_ref().filter(|_| !held) {
            return (Standing::Broken, super::add::reason(failure));
        }
        if let Some((reason, _)) = &pod.problem {
            return (Standing::Broken, reason);
        }
        let Some(proxy) = self.proxy() else {
            return (Standing::Pending, "no-proxy");
        };
        let acked = match pod.answers.get(&proxy) {
            Some(Answer::Nacked { .. }) => return (Standing::Broken, "proxy-nack"),
            Some(Answer::Acked { .. }) => true,
            Some(Answer::Awaited { .. }) | None => false,
        };
        let in_place = current.is_programmed(&Desired::Ambient(options.clone())) && pod.probes_confirmed;
        if acked && in_place && current.add.is_none() {
            (Standing::Enrolled, "")
        } else if !current.sandbox.reachable {
            (Standing::Pending, "netns-unreachable")
        } else {
            (Standing::Pending, "enrolling")
        }
    }

    /// Peers use what the control plane is told. Nothing may be told that is known to be wrong, and nothing withdrawn
    /// that merely is not known again yet: after a restart of ours or the executor's, the pods are in the mesh all the
    /// time.
    fn settle_status(&mut self, pod: &mut Pod, standing: Standing) {
        let mut wanted = standing == Standing::Enrolled;
        let lost = self.executor_up() && pod.usable().is_none() && !pod.awaits_adoption();
        if pod.status && standing == Standing::Pending && !lost {
            wanted = !self.executor_up() || {
                let until = self.now + self.settings.status_hold;
                *pod.status_hold.get_or_insert(until) > self.now
            };
        }
        if standing != Standing::Pending || !wanted || !self.executor_up() {
            pod.status_hold = None;
        }
        if wanted != pod.status {
            pod.status = wanted;
            self.emit(Effect::WriteStatus {
                pod: pod.reference.clone(),
                enrolled: wanted,
            });
        }
    }

    fn report(pod: &Pod, standing: Standing, reason: &'static str) -> PodReport {
        let mut verdict = match (&pod.object, &pod.decision) {
            (Some(_), Some(decision)) => decision.text.clone(),
            (Some(_), None) => undetermined(&pod.reference.namespace),
            (None, _) => "the source knows no such pod".to_owned(),
        };
        if let Some(object) = &pod.object
            && object.phase.is_terminal()
            && pod.decision.as_ref().is_some_and(|d| d.options.is_some())
        {
            verdict = format!("the pod has ended (phase {})", object.phase.as_str());
        }
        let current = pod.current.as_ref();
        let acked = pod
            .answers
            .iter()
            .rev()
            .find_map(|(connection, answer)| match answer {
                Answer::Acked { unix_ms } => Some((*connection, *unix_ms)),
                Answer::Awaited { .. } | Answer::Nacked { .. } => None,
            });
        PodReport {
            pod: pod.reference.clone(),
            standing,
            unprotected: matches!(standing, Standing::Pending | Standing::Broken) && runs_unredirected(pod),
            verdict,
            ignored: pod
                .decision
                .as_ref()
                .map(|d| d.ignored.clone())
                .unwrap_or_default(),
            reason,
            last_error: current
                .and_then(|current| current.sandbox.broken.clone())
                .or_else(|| pod.problem.as_ref().map(|(_, failure)| failure.clone())),
            netns: current.map(|current| current.sandbox.netns.clone()),
            addresses: pod.addresses(),
            timings: pod.timings.clone(),
            acked,
            retries: pod
                .backoff
                .attempts()
                .max(current.map_or(0, |current| current.sandbox.attempts)),
            rules_version: current
                .filter(|current| current.rules != Desired::None)
                .map(|current| current.rules_version.clone())
                .unwrap_or_default(),
        }
    }
}

/// Its containers run, and none of our rules is in its namespace.
fn runs_unredirected(pod: &Pod) -> bool {
    let runs = pod
        .object
        .as_ref()
        .is_some_and(|object| object.phase == Phase::Running);
    let redirected = |current: &Current| current.add.is_some() || current.rules != Desired::None;
    runs && !pod.usable().is_some_and(redirected)
}

/// Why nothing can be decided about a pod of this namespace.
pub(super) fn undetermined(namespace: &Namespace) -> String {
    format!("nothing is known of namespace {namespace}, and something of the source was never readable")
}

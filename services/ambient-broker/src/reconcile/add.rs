//! A pending ADD: decide, do, complete. Each ends with exactly one verdict.

use std::time::Duration;

use sluice_proto::ambient::Desired;
use sluice_proto::code::ErrorCode;
use sluice_proto::sandbox::Failure;

use super::COMPONENT;
use super::effect::{Effect, Verdict};
use super::pod::{Answer, Completing, Descriptor, Pod};
use super::world::World;

impl World {
    pub(super) fn advance_add(&mut self, pod: &mut Pod) {
        let Some(add) = pod.pending_add() else { return };
        if add.completing.is_some() {
            return;
        }
        if add.refusing.is_none() && self.now >= add.deadline {
            let failure = self.overdue(pod);
            self.refuse(pod, failure);
            return;
        }
        if add.refusing.is_some() {
            self.continue_refusal(pod);
            return;
        }
        if !self.synced {
            let cause = "the pod cache has never been filled";
            self.refuse(
                pod,
                Failure::new(ErrorCode::BrokerState, COMPONENT, "decide", cause),
            );
            return;
        }
        if !self.is_known(pod) {
            self.look_up(pod);
            return;
        }
        match pod.wanted().cloned() {
            None => {
                if self.unwind(pod) {
                    self.complete(pod, Verdict::Pass);
                }
            }
            Some(options) => {
                // A list that prunes was made without this pod's addresses.
                if self.pipeline(pod, &options) && !self.probes.is_pruning() {
                    self.complete(pod, Verdict::Ambient);
                }
            }
        }
    }

    /// The pod is known, and its namespace as far as it matters; or the source was asked and has no such namespace.
    fn is_known(&mut self, pod: &mut Pod) -> bool {
        if pod.object.is_none() {
            return false;
        }
        let asked = pod.pending_add().is_some_and(|add| add.found);
        let absent = asked || self.absent.contains(&pod.reference.namespace);
        !pod.lacks_namespace || (absent && !self.undetermined)
    }

    fn look_up(&mut self, pod: &mut Pod) {
        let (now, limit) = (self.now, self.settings.lookup);
        let reference = pod.reference.clone();
        let Some(add) = pod.pending_add() else { return };
        if add.looking || !add.look.ready(now) {
            return;
        }
        if now >= add.since + limit {
            let cause = match &add.look_error {
                Some(error) => format!("the source cannot tell: {error}"),
                None => format!(
                    "the source knows no pod {reference} with uid {} after {} ms",
                    reference.uid,
                    (now - add.since).as_millis()
                ),
            };
            self.refuse(
                pod,
                Failure::new(ErrorCode::PodUnknown, COMPONENT, "classify", cause),
            );
            return;
        }
        add.looking = true;
        self.emit(Effect::Lookup(reference));
    }

    /// Starts the refusal of an ADD, unless its verdict is on its way: first everything is taken back.
    pub(super) fn refuse(&mut self, pod: &mut Pod, failure: Failure) {
        let open = |add: &mut super::pod::Add| add.completing.is_none() && add.refusing.is_none();
        if !pod.pending_add().is_some_and(open) {
            return;
        }
        let until = self.now + self.settings.unwind;
        self.log(
            pod,
            super::effect::Level::Warn,
            "pod refused",
            failure.to_string(),
        );
        pod.problem = Some((reason(&failure), failure.clone()));
        pod.backoff.hurry();
        if let Some(add) = pod.pending_add() {
            add.refusing = Some(failure);
            add.unwind_until = Some(until);
        }
        self.continue_refusal(pod);
    }

    fn continue_refusal(&mut self, pod: &mut Pod) {
        let clean = self.unwind(pod);
        let now = self.now;
        let Some(add) = pod.pending_add() else { return };
        let overdue = add.unwind_until.is_some_and(|until| now >= until);
        if let Some(failure) = add.refusing.clone()
            && (clean || overdue)
        {
            self.complete(pod, Verdict::Refuse(failure));
        }
    }

    fn complete(&mut self, pod: &mut Pod, verdict: Verdict) {
        let now = self.now;
        let uid = pod.reference.uid.clone();
        let Some(current) = pod.current.as_mut() else {
            return;
        };
        let id = current.id().clone();
        let Some(add) = current.add.as_mut() else { return };
        add.completing = Some(match verdict {
            Verdict::Pass => Completing::Pass,
            Verdict::Ambient => Completing::Ambient,
            Verdict::Refuse(_) => Completing::Refusal,
        });
        let elapsed = now - add.since;
        pod.timed("decided", elapsed);
        self.emit(Effect::Timed {
            stage: "decided",
            elapsed,
        });
        self.emit(Effect::Complete {
            id,
            pod: uid,
            verdict,
        });
    }

    /// What an ADD was still waiting for when its time was over.
    fn overdue(&mut self, pod: &Pod) -> Failure {
        let after = |since: std::time::Instant| seconds(self.now - since);
        let Some(current) = pod.current.as_ref() else {
            return Failure::new(ErrorCode::BrokerTimeout, COMPONENT, "add", "no sandbox");
        };
        let waited = current.add.as_ref().map_or(0.0, |add| after(add.since));
        if !self.executor_up() {
            let cause = format!("the executor is not connected, waited {waited:.1} s");
            return Failure::new(ErrorCode::BrokerTimeout, COMPONENT, "connect", cause);
        }
        if let Some((Desired::Ambient(_), since)) = &current.programming {
            let cause = format!("no answer from the executor for {:.1} s", after(*since));
            return Failure::new(ErrorCode::BrokerTimeout, COMPONENT, "program rules", cause);
        }
        if !matches!(current.descriptor, Descriptor::Held(_)) {
            let mut cause = format!("the netns descriptor did not come within {waited:.1} s");
            if let Some(error) = current.add.as_ref().and_then(|add| add.fetch_error.as_ref()) {
                cause = format!("{cause}: {error}");
            }
            return Failure::new(ErrorCode::BrokerTimeout, COMPONENT, "fetch descriptor", cause);
        }
        match self.proxy().map(|proxy| pod.answers.get(&proxy)) {
            None => Failure::new(
                ErrorCode::NoProxy,
                COMPONENT,
                "wait for ztunnel",
                format!("no ready ztunnel connection within {waited:.1} s"),
            ),
            Some(Some(Answer::Awaited { since })) => Failure::new(
                ErrorCode::ProxyTimeout,
                COMPONENT,
                "waiting for ztunnel ack",
                format!("uid {}: no answer for {:.1} s", pod.reference.uid, after(*since)),
            ),
            Some(_) => Failure::new(
                ErrorCode::BrokerTimeout,
                COMPONENT,
                "add",
                format!("not finished within {waited:.1} s"),
            ),
        }
    }
}

fn seconds(elapsed: Duration) -> f64 {
    elapsed.as_secs_f64()
}

/// The stable reason that goes with a failure.
pub(super) fn reason(failure: &Failure) -> &'static str {
    match failure.code {
        ErrorCode::NoProxy => "no-proxy",
        ErrorCode::ProxyNack => "proxy-nack",
        ErrorCode::ProxyTimeout => "proxy-timeout",
        ErrorCode::ProxyConnection => "proxy-connection",
        ErrorCode::PodUnknown => "pod-unknown",
        ErrorCode::Rules | ErrorCode::Routes | ErrorCode::KernelFeature => "rules",
        ErrorCode::ProbeSet | ErrorCode::HostUnreachable => "probe-set",
        ErrorCode::Drift => "drift",
        ErrorCode::SandboxGone | ErrorCode::OpenerNetns | ErrorCode::OpenerUnavailable => "netns-not-found",
        ErrorCode::BrokerTimeout => "timeout",
        _ => "failed",
    }
}

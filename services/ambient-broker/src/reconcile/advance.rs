//! One pod, one step: compares what is with what should be and starts whatever may be started now.
//!
//! Called after every event that concerns the pod; never waits, and starts nothing that is already on its way.

use std::time::Duration;

use sluice_proto::ambient::{AmbientOptions, Desired};
use sluice_proto::sandbox::Failure;

use super::effect::Effect;
use super::event::{ConnectionId, Epoch};
use super::pod::{Answer, Current, Descriptor, Drain, Offer, Pod};
use super::world::World;

impl World {
    pub(super) fn advance(&mut self, pod: &mut Pod) {
        // A pod that passes needs no descriptor for that: its verdict goes out first.
        if pod.wanted().is_some() {
            self.fetch_descriptor(pod);
        }
        if pod.pending_add().is_some() {
            self.advance_add(pod);
        } else if pod.usable().is_none() {
            self.without_sandbox(pod);
        } else if pod.object.is_none() || pod.ended() {
            // Its netns is going away: rules and drain do not matter any more, ztunnel and the probe set do.
            self.withdraw(pod);
            self.drop_probes(pod);
            self.tell_gone(pod);
        } else if pod.usable().is_some_and(|current| current.undo) {
            self.undo(pod);
        } else if let Some(options) = pod.wanted().cloned() {
            self.enrol(pod, &options);
        } else {
            self.leave(pod);
        }
        self.fetch_descriptor(pod);
        self.foresee(pod);
        self.settle(pod);
    }

    /// No sandbox: wait for the runtime's ADD, or find the netns of a pod that runs already.
    fn without_sandbox(&mut self, pod: &mut Pod) {
        self.withdraw(pod);
        if pod.wanted().is_none() {
            self.drop_probes(pod);
            return;
        }
        let Some(object) = pod.object.clone() else { return };
        let runs = object.phase == sluice_selection::Phase::Running;
        let refused = pod.current.is_some();
        if !runs || refused || pod.adopting || !self.executor_up() || object.ips.is_empty() {
            return;
        }
        // Its netns has gone, and the runtime makes no other: a search would read every process of the node for nothing.
        let over = pod.sandbox_ended && object.deletion_timestamp.is_some();
        if over || !pod.backoff.ready(self.now) {
            return;
        }
        pod.adopting = true;
        self.emit(Effect::Adopt {
            pod: pod.reference.clone(),
            addresses: object.ips.clone(),
        });
    }

    /// Every sandbox's netns is held, mesh or not: a restarted executor may need it back.
    fn fetch_descriptor(&mut self, pod: &mut Pod) {
        if !self.executor_up() {
            return;
        }
        let now = self.now;
        let Some(current) = pod.current.as_mut().filter(|current| !current.refused) else {
            return;
        };
        let missing = current.descriptor == Descriptor::Missing;
        if missing && current.sandbox.reachable && current.fetch.ready(now) {
            current.descriptor = Descriptor::Fetching;
            let (id, netns) = (current.id().clone(), current.sandbox.netns.clone());
            self.emit(Effect::FetchDescriptor {
                id,
                pod: pod.reference.uid.clone(),
                netns,
            });
        }
    }

    /// Of a pod that is being added: rules and ztunnel at the same time, since nothing runs in it yet; then the probe
    /// set. Returns true once the rules are there and the newest ready connection has acknowledged.
    pub(super) fn pipeline(&mut self, pod: &mut Pod, options: &AmbientOptions) -> bool {
        let desired = Desired::Ambient(options.clone());
        self.offer_back(pod);
        self.program(pod, &desired);
        let taken = self.hand_over(pod);
        let right = pod
            .current
            .as_ref()
            .is_some_and(|current| current.is_programmed(&desired));
        taken && right
    }

    /// Of a pod that runs: ztunnel first, so that no connection is redirected to where nobody listens yet. The executor
    /// sees to the connections that there are.
    fn pipeline_running(&mut self, pod: &mut Pod, options: &AmbientOptions, redirected: bool) -> bool {
        let desired = Desired::Ambient(options.clone());
        self.offer_back(pod);
        let taken = self.hand_over(pod);
        if taken || redirected {
            self.program(pod, &desired);
        }
        taken
            && pod
                .current
                .as_ref()
                .is_some_and(|current| current.is_programmed(&desired))
    }

    /// Enrols a running pod. While no proxy is ready a pod that is not yet redirected is left alone, but is in the
    /// snapshot of the next one.
    fn enrol(&mut self, pod: &mut Pod, options: &AmbientOptions) {
        let Some(current) = pod.current.as_mut() else {
            return;
        };
        current.drain = Drain::default();
        let redirected = current.established && matches!(current.rules, Desired::Ambient(_));
        let proxy = self.proxy();
        if !redirected && proxy.is_none() {
            if !current.is_clean() && !matches!(current.rules, Desired::Draining(_)) {
                current.undo = true;
                self.undo(pod);
            } else if pod.backoff.ready(self.now) {
                self.offer_to_snapshot(pod);
            }
            return;
        }
        if matches!(pod.offer, Offer::Withdrawing(_)) || !pod.backoff.ready(self.now) {
            return;
        }
        let right = self.pipeline_running(pod, options, redirected);
        // Not after the redirections: the host's probes would be captured in between.
        if right || pod.current.as_ref().is_some_and(Current::is_being_redirected) {
            self.ensure_probes(pod);
        }
        if right && pod.probes_confirmed {
            if let Some(current) = pod.current.as_mut() {
                current.established = true;
            }
            pod.problem = None;
            pod.backoff.reset();
        }
    }

    /// A restarted executor gets the descriptor back that it lacks.
    fn offer_back(&mut self, pod: &mut Pod) {
        if !self.executor_up() {
            return;
        }
        let uid = pod.reference.uid.clone();
        let now = self.now;
        let Some(current) = pod.current.as_mut() else {
            return;
        };
        if current.sandbox.reachable || current.offering || !current.fetch.ready(now) {
            return;
        }
        if let Some(held) = current.held().cloned() {
            current.offering = true;
            let id = current.id().clone();
            self.emit(Effect::OfferDescriptor { id, pod: uid, held });
        }
    }

    /// Starts programming unless it is right, under way, or cannot be.
    pub(super) fn program(&mut self, pod: &mut Pod, desired: &Desired) {
        if !self.executor_up() {
            return;
        }
        let now = self.now;
        let Some(current) = pod.current.as_mut() else {
            return;
        };
        let right = current.rules == *desired;
        if right || current.programming.is_some() || !current.sandbox.reachable || !pod.backoff.ready(now) {
            return;
        }
        current.programming = Some((desired.clone(), now));
        let id = current.id().clone();
        self.emit(Effect::Program {
            id,
            pod: pod.reference.uid.clone(),
            desired: desired.clone(),
        });
    }

    /// Offers the netns to ztunnel; true once the serving connection has acknowledged.
    fn hand_over(&mut self, pod: &mut Pod) -> bool {
        let Some(held) = pod.current.as_ref().and_then(Current::held).cloned() else {
            return false;
        };
        let proxy = self.proxy();
        match pod.offer {
            Offer::Withdrawing(_) => false,
            Offer::Off => {
                let epoch = self.next_epoch();
                pod.offer = Offer::On(epoch);
                self.send_offer(pod, epoch, held, proxy);
                false
            }
            Offer::On(epoch) => {
                let Some(proxy) = proxy else { return false };
                match pod.answers.get(&proxy) {
                    Some(Answer::Acked { .. }) => true,
                    Some(Answer::Awaited { .. }) => false,
                    Some(Answer::Nacked { again }) if *again > self.now => false,
                    Some(Answer::Nacked { .. }) | None => {
                        self.send_offer(pod, epoch, held, Some(proxy));
                        false
                    }
                }
            }
        }
    }

    fn send_offer(
        &mut self,
        pod: &mut Pod,
        epoch: Epoch,
        held: super::event::SandboxId,
        to: Option<ConnectionId>,
    ) {
        if let Some(proxy) = to {
            pod.answers.insert(proxy, Answer::Awaited { since: self.now });
        }
        self.emit(Effect::ZdsOffer {
            pod: pod.reference.uid.clone(),
            epoch,
            held,
            info: pod.info(),
            to,
        });
    }

    /// Puts a netns into the snapshot, whatever becomes of the pod later.
    pub(super) fn offer_to_snapshot(&mut self, pod: &mut Pod) {
        if pod.offer != Offer::Off {
            return;
        }
        if let Some(held) = pod.current.as_ref().and_then(Current::held).cloned() {
            let epoch = self.next_epoch();
            pod.offer = Offer::On(epoch);
            let proxy = self.proxy();
            self.send_offer(pod, epoch, held, proxy);
        }
    }

    /// Starts taking the pod away from ztunnel; true once nobody has it any more.
    pub(super) fn withdraw(&mut self, pod: &mut Pod) -> bool {
        if let Offer::On(epoch) = pod.offer {
            pod.offer = Offer::Withdrawing(epoch);
            pod.answers.clear();
            self.emit(Effect::ZdsWithdraw {
                pod: pod.reference.uid.clone(),
                epoch,
            });
        }
        pod.offer == Offer::Off
    }

    /// Takes a failed enrolment of a running pod back.
    fn undo(&mut self, pod: &mut Pod) {
        if self.unwind(pod)
            && let Some(current) = pod.current.as_mut()
        {
            current.undo = false;
        }
    }

    /// Takes everything back at once; true once nothing is left.
    pub(super) fn unwind(&mut self, pod: &mut Pod) -> bool {
        let withdrawn = self.withdraw(pod);
        self.drop_probes(pod);
        self.program(pod, &Desired::None);
        withdrawn && pod.current.as_ref().is_none_or(Current::is_clean)
    }

    /// Puts the pod's addresses into the probe set.
    pub(super) fn ensure_probes(&mut self, pod: &mut Pod) {
        let wanted = pod.addresses();
        if pod.probes == wanted {
            return;
        }
        let surplus: Vec<_> = pod
            .probes
            .iter()
            .copied()
            .filter(|a| !wanted.contains(a))
            .collect();
        for entry in Self::entries(&pod.reference, &surplus) {
            self.probes.remove(entry);
        }
        for entry in Self::entries(&pod.reference, &wanted) {
            self.probes.add(entry);
        }
        pod.probes_confirmed = wanted.is_empty();
        pod.probes = wanted;
    }

    pub(super) fn drop_probes(&mut self, pod: &mut Pod) {
        for entry in Self::entries(&pod.reference, &std::mem::take(&mut pod.probes)) {
            self.probes.remove(entry);
        }
        pod.probes_confirmed = false;
    }

    /// Records a failure and when to try again.
    pub(super) fn failed(&mut self, pod: &mut Pod, reason: &'static str, failure: Failure) {
        let (first, longest) = self.settings.retry;
        self.failed_for(pod, reason, failure, first, longest);
    }

    pub(super) fn failed_for(
        &mut self,
        pod: &mut Pod,
        reason: &'static str,
        failure: Failure,
        first: Duration,
        longest: Duration,
    ) {
        pod.backoff.failed(self.now, first, longest, &mut self.jitter);
        self.log(
            pod,
            super::effect::Level::Warn,
            "pod could not be enrolled",
            format!("{failure}; attempt {}", pod.backoff.attempts()),
        );
        pod.problem = Some((reason, failure));
    }
}

//! Leaving the mesh so that nothing is lost: first no new connection is redirected and peers are told; once the
//! kept connections have ended, or nobody waits any longer, ztunnel is told and the rest is removed.

use std::time::Duration;

use sluice_proto::ambient::Desired;

use super::effect::Effect;
use super::pod::{Drain, Pod};
use super::world::World;

/// Pause before the executor is told that a pod is gone, and told again.
const LET_GO: Duration = Duration::from_secs(1);

impl World {
    /// The source no longer has the pod, and the runtime has not deleted its sandbox. Usually it is about to, so
    /// that nobody is bothered for a second; then the executor lets go once nobody else has the namespace, and is told until it does.
    pub(super) fn tell_gone(&mut self, pod: &mut Pod) {
        // Before the source has told everything, a pod that it has not told of may well exist.
        if pod.object.is_some() || !self.synced || !self.executor_up() {
            return;
        }
        let now = self.now;
        let Some(current) = pod.current.as_mut() else {
            return;
        };
        if current.let_go.attempts() == 0 {
            current.let_go.failed(now, LET_GO, LET_GO, &mut self.jitter);
        }
        if current.letting_go || !current.let_go.ready(now) {
            return;
        }
        current.letting_go = true;
        let id = current.id().clone();
        self.emit(Effect::LetGo {
            id,
            pod: pod.reference.uid.clone(),
        });
    }

    /// Whether the executor has let go of a pod that is gone. If it has, its watch says so too.
    pub(super) fn told_gone(&mut self, pod: &mut Pod, result: Result<(), String>) {
        let now = self.now;
        let Some(current) = pod.current.as_mut() else {
            return;
        };
        current.letting_go = false;
        current.let_go.failed(now, LET_GO, LET_GO, &mut self.jitter);
        if let Err(cause) = result {
            self.log(pod, super::effect::Level::Info, "sandbox outlives its pod", cause);
        }
    }

    pub(super) fn leave(&mut self, pod: &mut Pod) {
        let Some(current) = pod.current.as_ref() else {
            return;
        };
        match current.rules.clone() {
            Desired::None => {
                if !self.unwind(pod) {
                    return;
                }
                pod.backoff.reset();
                pod.problem = None;
                if let Some(current) = pod.current.as_mut() {
                    current.established = false;
                    current.drain = Drain::default();
                }
            }
            // Captured but never handed over: there are no connections to keep.
            Desired::Ambient(_) | Desired::Joining(_) if !current.established => {
                self.unwind(pod);
            }
            Desired::Ambient(options) | Desired::Joining(options) => {
                self.offer_to_snapshot(pod);
                self.program(pod, &Desired::Draining(options));
            }
            Desired::Draining(_) => self.drain(pod),
        }
    }

    fn drain(&mut self, pod: &mut Pod) {
        let (now, timeout) = (self.now, self.settings.drain);
        let up = self.executor_up();
        let uid = pod.reference.uid.clone();
        let Some(current) = pod.current.as_mut() else {
            return;
        };
        let deadline = *current.drain.deadline.get_or_insert(now + timeout);
        if now >= deadline {
            current.drain.done = true;
        }
        if current.drain.done {
            self.unwind(pod);
            return;
        }
        let due = current.drain.inspect_at.is_none_or(|at| at <= now);
        if due && up && !current.drain.inspecting && current.programming.is_none() {
            current.drain.inspecting = true;
            let id = current.id().clone();
            self.emit(Effect::Inspect { id, pod: uid });
        }
        self.offer_to_snapshot(pod);
    }

    /// What an inspection found.
    pub(super) fn inspected(&mut self, pod: &mut Pod, redirected: Option<u32>) {
        let again = self.now + self.settings.drain_poll;
        let Some(current) = pod.current.as_mut() else {
            return;
        };
        current.drain.inspecting = false;
        current.drain.inspect_at = Some(again);
        if redirected == Some(0) && matches!(current.rules, Desired::Draining(_)) {
            current.drain.done = true;
        }
    }
}

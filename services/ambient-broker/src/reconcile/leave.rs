//! Leaving the mesh so that nothing is lost: first no new connection is redirected and peers are told; once the
//! kept connections have ended, or nobody waits any longer, ztunnel is told and the rest is removed.

use sluice_proto::ambient::Desired;

use super::event::Effect;
use super::pod::{Drain, Pod};
use super::world::World;

impl World {
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
            Desired::Ambient(_) if !current.established => {
                self.unwind(pod);
            }
            Desired::Ambient(options) => {
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

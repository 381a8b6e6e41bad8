//! What the executor tells: sandboxes that come, change and go. Answers to our calls are in `answer.rs`.

use std::collections::HashSet;

use sluice_proto::code::ErrorCode;
use sluice_proto::id::PodUid;
use sluice_proto::sandbox::Failure;

use super::effect::{Effect, Verdict};
use super::event::{Event, Sandbox, SandboxId};
use super::pod::{Add, Current, Descriptor, Pod};
use super::world::{Link, World};
use super::{COMPONENT, State};
use crate::reconcile::backoff::Backoff;

impl State {
    pub(super) fn executor(&mut self, event: Event) {
        match event {
            Event::ExecutorConnected => self.world.link = Link::Listing(HashSet::new()),
            Event::ExecutorDisconnected => {
                self.world.link = Link::Down;
                self.advance_all();
                self.world.foresight.forget();
            }
            Event::SandboxesListed => self.listed(),
            Event::SandboxPresent(sandbox) => {
                if let Link::Listing(seen) = &mut self.world.link {
                    seen.insert(sandbox.id.clone());
                }
                self.sandbox(*sandbox);
            }
            Event::SandboxPending(sandbox) | Event::SandboxChanged(sandbox) => self.sandbox(*sandbox),
            Event::SandboxGone { id, pod } => self.gone(&id, &pod, true),
            Event::Adopted { pod, result } => self.adopted(&pod, result),
            Event::LetGo { id, pod, result } => {
                self.of(&id, &pod, |world, pod| world.told_gone(pod, result));
            }
            Event::ProbesSynced(result) => self.probes_synced(result),
            Event::Foreseen { call, result } => self.world.foreseen(call, &result),
            Event::Programmed {
                id,
                pod,
                desired,
                result,
            } => self.of(&id, &pod, |world, pod| world.programmed(pod, desired, result)),
            Event::Fetched { id, pod, result } => self.fetched(&id, &pod, result),
            Event::DescriptorOffered { id, pod, result } => {
                self.of(&id, &pod, |world, pod| world.offered(pod, &result));
            }
            Event::Inspected { id, pod, result } => {
                self.of(&id, &pod, |world, pod| world.inspected(pod, result.ok()));
            }
            Event::Completed { id, pod, result } => {
                self.of(&id, &pod, |world, pod| world.completed(pod, result));
            }
            _ => {}
        }
    }

    /// A fact about one generation: means nothing if the pod has another sandbox by now.
    pub(super) fn of(&mut self, id: &SandboxId, uid: &PodUid, change: impl FnOnce(&mut World, &mut Pod)) {
        self.with(uid, |world, pod| {
            if pod.current.as_ref().is_some_and(|current| current.id() == id) {
                change(world, pod);
            }
        });
    }

    fn listed(&mut self) {
        let Link::Listing(seen) = std::mem::replace(&mut self.world.link, Link::Up) else {
            return;
        };
        self.world.listed.get_or_insert(self.world.now);
        let gone: Vec<_> = self
            .pods
            .values()
            .filter_map(|pod| Some((pod.current.as_ref()?.id().clone(), pod.reference.uid.clone())))
            .filter(|(id, _)| !seen.contains(id))
            .collect();
        for (id, uid) in gone {
            self.gone(&id, &uid, false);
        }
        // A new executor may have lost the probe set with the host's rules.
        for pod in self.pods.values_mut() {
            if !pod.probes.is_empty() {
                for entry in World::entries(&pod.reference, &pod.probes) {
                    self.world.probes.add(entry);
                }
            }
        }
        self.advance_all();
    }

    fn sandbox(&mut self, sandbox: Sandbox) {
        let uid = sandbox.pod.uid.clone();
        self.pods
            .entry(uid.clone())
            .or_insert_with(|| Pod::new(sandbox.pod.clone()));
        self.with(&uid, |world, pod| world.take_sandbox(pod, sandbox));
    }

    /// `told`: the runtime has ended it; otherwise it may be that only the executor does not know it any more.
    fn gone(&mut self, id: &SandboxId, uid: &PodUid, told: bool) {
        self.of(id, uid, |world, pod| {
            pod.sandbox_ended |= told;
            // Between two tries of the runtime people ask why; its DEL may come before we hear that our word has arrived.
            let refused = pod
                .current
                .as_ref()
                .is_some_and(|current| current.refused || current.is_being_refused());
            world.let_go(pod);
            if !refused {
                pod.problem = None;
            }
            pod.backoff.reset();
        });
    }
}

impl World {
    /// A sandbox as it is now: a new one replaces what the pod had.
    fn take_sandbox(&mut self, pod: &mut Pod, sandbox: Sandbox) {
        pod.sandbox_ended = false;
        let pending = sandbox.pending;
        match pod.current.as_mut() {
            Some(current)
                if current.sandbox.id == sandbox.id
                    && sandbox.netns.is_same_netns(&current.sandbox.netns) =>
            {
                let listing = matches!(self.link, Link::Listing(_));
                current.update(sandbox, listing);
            }
            Some(current) if current.sandbox.id.attachment == sandbox.id.attachment => {
                if sandbox.id.generation < current.sandbox.id.generation {
                    return;
                }
                if sandbox.netns.is_same_netns(&current.sandbox.netns) && !current.refused {
                    self.renew(pod, sandbox);
                } else {
                    self.replace(pod, sandbox);
                }
            }
            // A further interface of the same sandbox is none of the mesh's business.
            Some(current)
                if current.sandbox.id.attachment.container_id == sandbox.id.attachment.container_id
                    && !current.refused =>
            {
                if pending {
                    self.emit(Effect::Complete {
                        id: sandbox.id,
                        pod: pod.reference.uid.clone(),
                        verdict: Verdict::Pass,
                    });
                }
                return;
            }
            // Of several that were there before us, one that is in use wins over one that is not.
            Some(current)
                if !pending && !current.refused && (current.sandbox.reachable || !sandbox.reachable) =>
            {
                return;
            }
            Some(_) => self.replace(pod, sandbox),
            None => pod.current = Some(Current::new(sandbox)),
        }
        if pending {
            self.begin_add(pod);
        }
    }

    /// What was found by looking for it is the pod's netns now, whatever we had.
    pub(super) fn take_adopted(&mut self, pod: &mut Pod, sandbox: Sandbox) {
        match pod.current.as_ref() {
            Some(current) if current.add.is_some() => {}
            Some(current) if current.sandbox.id.attachment != sandbox.id.attachment => {
                self.replace(pod, sandbox);
            }
            _ => self.take_sandbox(pod, sandbox),
        }
    }

    fn begin_add(&mut self, pod: &mut Pod) {
        let (now, limit) = (self.now, self.settings.add_deadline);
        let Some(current) = pod.current.as_mut() else {
            return;
        };
        if current.refused || current.add.is_some() {
            return;
        }
        current.add = Some(Add {
            since: now,
            deadline: now + limit,
            refusing: None,
            unwind_until: None,
            completing: None,
            found: false,
            looking: false,
            look: Backoff::default(),
            look_error: None,
            fetch_error: None,
        });
        pod.timings.clear();
        pod.problem = None;
        pod.backoff.reset();
    }

    /// The same netns under a new generation: what was done in it still holds.
    fn renew(&mut self, pod: &mut Pod, sandbox: Sandbox) {
        self.supersede_add(pod, &sandbox.id);
        if let Some(current) = pod.current.as_mut() {
            if current.descriptor == Descriptor::Fetching {
                current.descriptor = Descriptor::Missing;
            }
            // Its answer will name the old generation; the executor says how things are.
            current.programming = None;
            current.rules = sandbox.programmed.clone();
            current.offering = false;
            current.letting_go = false;
            current.undo = false;
            current.drain.inspecting = false;
            current.sandbox = sandbox;
        }
    }

    fn replace(&mut self, pod: &mut Pod, sandbox: Sandbox) {
        self.supersede_add(pod, &sandbox.id);
        self.let_go(pod);
        pod.backoff.reset();
        pod.problem = None;
        pod.current = Some(Current::new(sandbox));
    }

    /// An ADD that was still open when its sandbox was replaced ends here.
    fn supersede_add(&mut self, pod: &mut Pod, by: &SandboxId) {
        let uid = pod.reference.uid.clone();
        let Some(current) = pod.current.as_mut() else {
            return;
        };
        let id = current.id().clone();
        // Under the same id the verdict would end the new ADD.
        if let Some(add) = current.add.take()
            && add.completing.is_none()
            && id != *by
        {
            let cause = "a newer sandbox of the same pod has taken its place";
            let failure = Failure::new(ErrorCode::TooLate, COMPONENT, "add", cause);
            self.emit(Effect::Complete {
                id,
                pod: uid,
                verdict: Verdict::Refuse(failure),
            });
        }
    }

    /// The sandbox is gone: nobody may hold its netns, and no message may carry it.
    fn let_go(&mut self, pod: &mut Pod) {
        self.withdraw(pod);
        self.drop_probes(pod);
        if let Some(held) = pod.current.as_ref().and_then(Current::held).cloned() {
            self.emit(Effect::DropDescriptor(held));
        }
        pod.current = None;
    }

    /// The executor has ended this generation.
    pub(super) fn too_late(&mut self, pod: &mut Pod) {
        if let Some(current) = pod.current.as_mut() {
            current.add = None;
        }
        self.abandon(pod);
    }

    /// The sandbox must not be used any more, though it may still be listed.
    pub(super) fn abandon(&mut self, pod: &mut Pod) {
        let Some(current) = pod.current.as_mut() else {
            return;
        };
        current.refused = true;
        current.programming = None;
        let descriptor = std::mem::replace(&mut current.descriptor, Descriptor::Missing);
        if let Descriptor::Held(key) = descriptor {
            self.emit(Effect::DropDescriptor(key));
        }
        self.withdraw(pod);
        self.drop_probes(pod);
    }
}

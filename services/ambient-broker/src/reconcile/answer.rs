//! What the executor answers to our calls.

use std::collections::BTreeSet;
use std::time::Duration;

use sluice_proto::ambient::Desired;
use sluice_proto::code::ErrorCode;
use sluice_proto::id::PodUid;
use sluice_proto::sandbox::Failure;

use super::State;
use super::add::reason;
use super::effect::{Effect, Level};
use super::event::{Refused, Sandbox, SandboxId};
use super::pod::{Completing, Descriptor, Pod, version};
use super::world::{Prune, World};

impl State {
    pub(super) fn fetched(&mut self, id: &SandboxId, uid: &PodUid, result: Result<(), Failure>) {
        let expected = |pod: &Pod| {
            let current = pod.usable()?;
            (current.id() == id && current.descriptor == Descriptor::Fetching).then_some(())
        };
        if self.pods.get(uid).and_then(expected).is_none() {
            // Nobody waits for it any more: it would keep a dead netns alive.
            if result.is_ok() {
                self.world.emit(Effect::DropDescriptor(id.clone()));
            }
            return;
        }
        self.of(id, uid, |world, pod| world.descriptor(pod, result));
    }

    pub(super) fn adopted(&mut self, uid: &PodUid, result: Result<Box<Sandbox>, Failure>) {
        let (first, longest) = self.world.settings.adopt_retry;
        self.with(uid, |world, pod| {
            pod.adopting = false;
            match result {
                Ok(sandbox) => world.take_adopted(pod, *sandbox),
                Err(failure) if pod.usable().is_none() => {
                    world.failed_for(pod, "netns-not-found", failure, first, longest);
                }
                Err(_) => {}
            }
        });
    }

    pub(super) fn probes_synced(&mut self, result: Result<(), Failure>) {
        let Some(batch) = self.world.probes.in_flight.take() else {
            return;
        };
        let owners: BTreeSet<_> = batch.0.iter().map(|entry| entry.owner.clone()).collect();
        let pruned = batch.2;
        let failure = match result {
            Ok(()) => {
                self.world.probes.backoff.reset();
                if pruned {
                    self.world.prune = Prune::default();
                }
                None
            }
            Err(failure) => {
                if pruned {
                    self.world.prune_later();
                }
                let (first, longest) = self.world.settings.retry;
                let World {
                    probes, jitter, now, ..
                } = &mut self.world;
                probes.put_back(batch);
                probes.backoff.failed(*now, first, longest, jitter);
                Some(failure)
            }
        };
        for owner in owners {
            self.with(&owner, |_, pod| match &failure {
                None => pod.probes_confirmed = !pod.probes.is_empty(),
                // What is in the set already was not the reason.
                Some(_) if pod.probes_confirmed => {}
                Some(failure) => pod.problem = Some(("probe-set", failure.clone())),
            });
        }
        // An ADD may have waited for a list that prunes.
        if pruned {
            self.advance_all();
        }
    }
}

impl World {
    pub(super) fn programmed(&mut self, pod: &mut Pod, desired: Desired, result: Result<String, Refused>) {
        let now = self.now;
        let Some(current) = pod.current.as_mut() else {
            return;
        };
        let Some((asked, since)) = current.programming.take() else {
            return;
        };
        if asked != desired {
            current.programming = Some((asked, since));
            return;
        }
        match result {
            Ok(fingerprint) => {
                current.rules = desired;
                current.rules_version = version(&fingerprint);
                current.drain.inspect_at = None;
                pod.timed("rules", now - since);
                self.emit(Effect::Timed {
                    stage: "rules",
                    elapsed: now - since,
                });
            }
            Err(Refused::TooLate) => self.too_late(pod),
            Err(Refused::Failed(failure)) => match pod.pending_add() {
                Some(add) if add.refusing.is_none() => self.refuse(pod, failure),
                _ => self.failed(pod, reason(&failure), failure),
            },
            // An ADD goes on within its deadline. It may have been done: what the executor told last counts.
            Err(Refused::Lost(failure)) => {
                current.rules = current.sandbox.programmed.clone();
                self.failed(pod, reason(&failure), failure);
            }
        }
    }

    /// The executor has the descriptor back, or not.
    pub(super) fn offered(&mut self, pod: &mut Pod, result: &Result<(), Failure>) {
        let now = self.now;
        let (first, longest) = self.settings.retry;
        let Some(current) = pod.current.as_mut() else {
            return;
        };
        current.offering = false;
        match result {
            Ok(()) => current.sandbox.reachable = true,
            Err(_) => current.fetch.failed(now, first, longest, &mut self.jitter),
        }
    }

    fn descriptor(&mut self, pod: &mut Pod, result: Result<(), Failure>) {
        let now = self.now;
        let (first, longest) = self.settings.retry;
        let wanted = pod.wanted().is_some();
        let Some(current) = pod.current.as_mut() else {
            return;
        };
        match result {
            Ok(()) => {
                current.descriptor = Descriptor::Held(current.id().clone());
                current.fetch.reset();
            }
            Err(failure) => {
                current.descriptor = Descriptor::Missing;
                current.fetch.failed(now, first, longest, &mut self.jitter);
                match current.add.as_mut() {
                    Some(add)
                        if add.refusing.is_none() && wanted && failure.code == ErrorCode::SandboxGone =>
                    {
                        self.refuse(pod, failure);
                    }
                    // Tried again within the ADD's deadline.
                    Some(add) => add.fetch_error = Some(failure),
                    None if wanted => pod.problem = Some((reason(&failure), failure)),
                    _ => {}
                }
            }
        }
    }

    pub(super) fn completed(&mut self, pod: &mut Pod, result: Result<(), Refused>) {
        let now = self.now;
        let Some(current) = pod.current.as_mut() else {
            return;
        };
        let Some(add) = current.add.as_mut() else { return };
        let Some(completing) = add.completing else { return };
        let since = add.since;
        match (completing, result) {
            (Completing::Refusal, _) => {
                current.add = None;
                self.abandon(pod);
            }
            (Completing::Ambient, Ok(())) => {
                current.add = None;
                current.established = true;
                pod.probes = pod.addresses();
                pod.probes_confirmed = true;
                pod.problem = None;
                pod.backoff.reset();
                self.total(pod, now - since);
            }
            (Completing::Pass, Ok(())) => {
                current.add = None;
                self.total(pod, now - since);
            }
            (_, Err(Refused::TooLate)) => self.too_late(pod),
            (_, Err(Refused::Failed(failure))) => {
                self.log(pod, Level::Warn, "pod refused", failure.to_string());
                pod.problem = Some((reason(&failure), failure));
                pod.probes = pod.addresses();
                self.too_late(pod);
            }
            // The runtime may have been answered or not; if not, the ADD is announced again. If it was, the pod
            // serves in the mesh, and its rules must not go.
            (_, Err(Refused::Lost(_))) => {
                current.add = None;
                current.established |= completing == Completing::Ambient;
            }
        }
    }

    fn total(&mut self, pod: &mut Pod, elapsed: Duration) {
        pod.timed("total", elapsed);
        self.emit(Effect::Timed {
            stage: "total",
            elapsed,
        });
    }
}

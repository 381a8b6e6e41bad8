//! What is known of one pod, and what follows from it without looking elsewhere.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sluice_proto::ambient::{AmbientOptions, Desired};
use sluice_proto::code::ErrorCode;
use sluice_proto::id::PodRef;
use sluice_proto::sandbox::Failure;

use super::backoff::Backoff;
use super::decide::Decision;
use super::earliest;
use super::effect::WorkloadInfo;
use super::event::{ConnectionId, Epoch, Sandbox, SandboxId};
use super::report::PodReport;
use crate::source;

/// Whether ztunnel has been, or is being, told of the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Offer {
    /// Not in any snapshot.
    Off,
    /// In every snapshot from now on.
    On(Epoch),
    /// Connections still have to answer.
    Withdrawing(Epoch),
}

/// One connection's answer to the current offer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// Not yet.
    Awaited { since: Instant },
    /// Yes, at this Unix time in milliseconds.
    Acked { unix_ms: u64 },
    /// No; ask again then.
    Nacked { again: Instant },
}

/// The descriptor of the sandbox's netns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Descriptor {
    /// Not held.
    Missing,
    /// Asked for.
    Fetching,
    /// Held under this key.
    Held(SandboxId),
}

/// An ADD that waits for us.
#[derive(Debug, Clone)]
pub(super) struct Add {
    pub(super) since: Instant,
    /// Refused then, whatever is missing.
    pub(super) deadline: Instant,
    /// Why it will be refused, once everything is taken back.
    pub(super) refusing: Option<Failure>,
    /// Do not wait longer for things to be taken back.
    pub(super) unwind_until: Option<Instant>,
    /// The verdict is on its way.
    pub(super) completing: Option<Completing>,
    /// The source was asked and told of the pod.
    pub(super) found: bool,
    pub(super) looking: bool,
    pub(super) look: Backoff,
    pub(super) look_error: Option<String>,
    /// Why the descriptor did not come the last time.
    pub(super) fetch_error: Option<Failure>,
}

/// Which verdict is on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Completing {
    Pass,
    Ambient,
    Refusal,
}

/// The pod's sandbox, and what was done in it.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts, not one state")]
pub(super) struct Current {
    pub(super) sandbox: Sandbox,
    /// How the namespace is, as far as is known.
    pub(super) rules: Desired,
    /// Short fingerprint of the rules as they were programmed last in this life.
    pub(super) rules_version: String,
    /// What is being programmed, and since when.
    pub(super) programming: Option<(Desired, Instant)>,
    pub(super) descriptor: Descriptor,
    pub(super) fetch: Backoff,
    pub(super) offering: bool,
    pub(super) add: Option<Add>,
    /// Its ADD was refused: it must not be used any more.
    pub(super) refused: bool,
    /// It has served as a mesh pod: failures no longer take its rules away.
    pub(super) established: bool,
    /// A failed enrolment is being taken back.
    pub(super) undo: bool,
    pub(super) drain: Drain,
    /// The executor is being told that the pod is gone.
    pub(super) letting_go: bool,
    /// When it is told again.
    pub(super) let_go: Backoff,
}

/// Leaving the mesh.
#[derive(Debug, Clone, Default)]
pub(super) struct Drain {
    pub(super) deadline: Option<Instant>,
    pub(super) inspecting: bool,
    pub(super) inspect_at: Option<Instant>,
    /// No kept connection is left, or nobody waits any longer.
    pub(super) done: bool,
}

/// A fingerprint as far as it is shown.
pub(super) fn version(fingerprint: &str) -> String {
    fingerprint.chars().take(12).collect()
}

impl Current {
    pub(super) fn new(sandbox: Sandbox) -> Self {
        // One that is being added has never served.
        let established = sandbox.programmed != Desired::None && !sandbox.pending;
        Self {
            rules: sandbox.programmed.clone(),
            rules_version: version(&sandbox.fingerprint),
            sandbox,
            programming: None,
            descriptor: Descriptor::Missing,
            fetch: Backoff::default(),
            offering: false,
            add: None,
            refused: false,
            established,
            undo: false,
            drain: Drain::default(),
            letting_go: false,
            let_go: Backoff::default(),
        }
    }

    /// The same sandbox as the executor tells of it now; `listing`: in a list of all.
    pub(super) fn update(&mut self, sandbox: Sandbox, listing: bool) {
        if self.programming.is_none() {
            self.rules = sandbox.programmed.clone();
        }
        if !sandbox.fingerprint.is_empty() {
            self.rules_version = version(&sandbox.fingerprint);
        }
        if sandbox.reachable && !self.sandbox.reachable {
            self.fetch.reset();
        }
        if !sandbox.pending && self.add.as_ref().is_some_and(|add| add.completing.is_none()) {
            // The executor has answered the runtime without us; the sandbox lives on.
            self.add = None;
            self.undo = !self.established && !self.is_clean();
        } else if listing && !sandbox.pending && sandbox.programmed != Desired::None {
            // An answer of ours may have been lost: the pod may serve.
            self.established = true;
        }
        self.sandbox = sandbox;
    }

    pub(super) fn id(&self) -> &SandboxId {
        &self.sandbox.id
    }

    /// The namespace is like this, and nothing is on its way that would change it.
    pub(super) fn is_programmed(&self, desired: &Desired) -> bool {
        self.rules == *desired && self.programming.is_none()
    }

    /// Redirections are on their way.
    pub(super) fn is_being_redirected(&self) -> bool {
        matches!(&self.programming, Some((Desired::Ambient(_), _)))
    }

    /// Nothing of ours is in the namespace and nothing is on its way.
    pub(super) fn is_clean(&self) -> bool {
        self.is_programmed(&Desired::None)
    }

    /// Its ADD is about to fail.
    pub(super) fn is_being_refused(&self) -> bool {
        self.add.as_ref().is_some_and(|add| add.refusing.is_some())
    }

    pub(super) fn held(&self) -> Option<&SandboxId> {
        match &self.descriptor {
            Descriptor::Held(key) => Some(key),
            Descriptor::Missing | Descriptor::Fetching => None,
        }
    }
}

/// One pod.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts, not one state")]
pub(super) struct Pod {
    pub(super) reference: PodRef,
    pub(super) object: Option<Arc<source::Pod>>,
    pub(super) decision: Option<Decision>,
    /// Its namespace is not known, and the namespace's labels could make a difference.
    pub(super) lacks_namespace: bool,
    pub(super) current: Option<Current>,
    pub(super) offer: Offer,
    pub(super) answers: BTreeMap<ConnectionId, Answer>,
    /// Addresses that are, or will be, in the host's probe set.
    pub(super) probes: Vec<IpAddr>,
    pub(super) probes_confirmed: bool,
    /// What the control plane was told last.
    pub(super) status: bool,
    /// The status outlives a lost connection until then.
    pub(super) status_hold: Option<Instant>,
    /// An enrolled pod whose netns a restarted executor cannot reach yet counts as enrolled until then.
    pub(super) reach_hold: Option<Instant>,
    pub(super) backoff: Backoff,
    pub(super) problem: Option<(&'static str, Failure)>,
    pub(super) adopting: bool,
    /// The runtime has ended the sandbox that it had.
    pub(super) sandbox_ended: bool,
    /// What the executor has been, or is being, told of its ADD.
    pub(super) foreseen: Option<Desired>,
    pub(super) timings: Vec<(&'static str, Duration)>,
    pub(super) logged: Option<Instant>,
    pub(super) was_enrolled: bool,
    pub(super) report: Option<Arc<PodReport>>,
    /// When it is looked at again; as in the state's index.
    pub(super) due: Option<Instant>,
}

impl Pod {
    pub(super) fn new(reference: PodRef) -> Self {
        Self {
            reference,
            object: None,
            decision: None,
            lacks_namespace: false,
            current: None,
            offer: Offer::Off,
            answers: BTreeMap::new(),
            probes: Vec::new(),
            probes_confirmed: false,
            status: false,
            status_hold: None,
            reach_hold: None,
            backoff: Backoff::default(),
            problem: None,
            adopting: false,
            sandbox_ended: false,
            foreseen: None,
            timings: Vec::new(),
            logged: None,
            was_enrolled: false,
            report: None,
            due: None,
        }
    }

    /// The pod's containers have ended for good.
    pub(super) fn ended(&self) -> bool {
        self.object
            .as_ref()
            .is_none_or(|object| object.phase.is_terminal())
    }

    /// How its rules should be; `None`: out, ended or unknown. A phase means nothing while a sandbox is added.
    pub(super) fn wanted(&self) -> Option<&AmbientOptions> {
        let adding = self.current.as_ref().is_some_and(|c| c.add.is_some());
        if self.object.is_none() || (self.ended() && !adding) {
            return None;
        }
        match &self.decision {
            Some(decision) => decision.options.as_ref(),
            None => self.kept(),
        }
    }

    /// Nobody can say yet whether it is in the mesh.
    pub(super) fn is_undecided(&self) -> bool {
        self.object.is_some() && self.decision.is_none()
    }

    /// A pod that nobody can decide about stays as it is.
    fn kept(&self) -> Option<&AmbientOptions> {
        let current = self.usable().filter(|current| current.add.is_none())?;
        match &current.rules {
            Desired::Ambient(options) if current.established => Some(options),
            _ => None,
        }
    }

    /// It runs and belongs into the mesh, and nobody has looked for its netns yet.
    pub(super) fn awaits_adoption(&self) -> bool {
        let found_nothing = |(_, failure): &(_, Failure)| failure.code != ErrorCode::OpenerUnavailable;
        let runs = |object: &Arc<source::Pod>| {
            object.phase == sluice_selection::Phase::Running && !object.ips.is_empty()
        };
        let looked = self.current.is_some() || self.problem.as_ref().is_some_and(found_nothing);
        self.wanted().is_some() && self.object.as_ref().is_some_and(runs) && !looked
    }

    /// The sandbox, unless its ADD was refused.
    pub(super) fn usable(&self) -> Option<&Current> {
        self.current.as_ref().filter(|current| !current.refused)
    }

    pub(super) fn pending_add(&mut self) -> Option<&mut Add> {
        self.current.as_mut()?.add.as_mut()
    }

    /// Addresses the host's probes will go to.
    pub(super) fn addresses(&self) -> Vec<IpAddr> {
        let mut addresses = match self.usable() {
            Some(current) if !current.sandbox.addresses.is_empty() => current.sandbox.addresses.clone(),
            _ => self
                .object
                .as_ref()
                .map(|object| object.ips.clone())
                .unwrap_or_default(),
        };
        addresses.sort();
        addresses.dedup();
        addresses
    }

    pub(super) fn info(&self) -> WorkloadInfo {
        WorkloadInfo {
            name: self.reference.name.to_string(),
            namespace: self.reference.namespace.to_string(),
            service_account: self
                .object
                .as_ref()
                .map_or_else(|| "default".to_owned(), |object| object.service_account.clone()),
        }
    }

    /// Records how long a step took; the last value of each step is kept.
    pub(super) fn timed(&mut self, stage: &'static str, elapsed: Duration) {
        match self.timings.iter_mut().find(|(known, _)| *known == stage) {
            Some((_, value)) => *value = elapsed,
            None => self.timings.push((stage, elapsed)),
        }
    }

    /// Nothing is left to do or to remember.
    pub(super) fn forgettable(&self) -> bool {
        self.object.is_none()
            && self.current.is_none()
            && self.offer == Offer::Off
            && self.probes.is_empty()
            && !self.adopting
    }

    /// When something becomes due without an event; always in the future.
    pub(super) fn wake(&self, now: Instant) -> Option<Instant> {
        let mut wake = None;
        let mut at = |at: Option<Instant>| wake = earliest(wake, at.filter(|at| *at > now));
        at(self.backoff.wake(now));
        at(self.status_hold);
        at(self.reach_hold);
        for answer in self.answers.values() {
            if let Answer::Nacked { again } = answer {
                at(Some(*again));
            }
        }
        let Some(current) = &self.current else {
            return wake;
        };
        at(current.fetch.wake(now));
        at(current.let_go.wake(now));
        if let Some(add) = &current.add
            && add.completing.is_none()
        {
            at(add.look.wake(now));
            at(add
                .unwind_until
                .or(Some(add.deadline).filter(|_| add.refusing.is_none())));
        }
        if !current.drain.done {
            at(current.drain.deadline);
            if !current.drain.inspecting {
                at(current.drain.inspect_at);
            }
        }
        wake
    }
}

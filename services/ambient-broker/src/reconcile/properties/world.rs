//! The world around the machine: what happens in it, what it remembers, and what must never be asked of it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sluice_proto::ambient::Desired;
use sluice_proto::code::ErrorCode;
use sluice_proto::id::PodUid;
use sluice_proto::sandbox::Failure;
use sluice_selection::{Labels, Phase, SelectionConfig};

use super::Step;
use crate::reconcile::effect::{Effect, Verdict};
use crate::reconcile::event::{ConnectionId, Epoch, Event, Sandbox, SandboxId};
use crate::reconcile::tests::{failure, pod, sandbox, uid};
use crate::reconcile::{Settings, State};
use crate::source;

/// A world that answers as it likes, and remembers what it was told.
pub(super) struct World {
    state: State,
    now: Instant,
    pub(super) calls: Vec<Effect>,
    lives: u32,
    /// Sandboxes the executor has.
    pub(super) sandboxes: HashMap<u32, Sandbox>,
    /// Verdicts given to each ADD.
    pub(super) adds: HashMap<SandboxId, u32>,
    /// ADDs that ended without us.
    pub(super) ended: HashSet<SandboxId>,
    pub(super) connections: Vec<(ConnectionId, bool)>,
    next_connection: u64,
    /// What ready connections have acknowledged.
    pub(super) acks: HashSet<(ConnectionId, u32, Epoch)>,
    /// What is offered now, and in which netns.
    offers: HashMap<u32, (Epoch, SandboxId)>,
    pub(super) rules: HashMap<SandboxId, Desired>,
    /// What the executor does without asking.
    pub(super) foreseen: HashMap<u32, Desired>,
    /// Calls up to this one were made to an executor that is gone.
    pub(super) foresee_lost: u64,
    /// Whether the source's pods are in the mesh.
    pub(super) mesh: HashMap<u32, bool>,
}

impl World {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        let mut world = Self {
            state: State::new(Settings::default(), SelectionConfig::default(), now),
            now,
            calls: Vec::new(),
            lives: 0,
            sandboxes: HashMap::new(),
            adds: HashMap::new(),
            ended: HashSet::new(),
            connections: Vec::new(),
            next_connection: 0,
            acks: HashSet::new(),
            offers: HashMap::new(),
            rules: HashMap::new(),
            foreseen: HashMap::new(),
            foresee_lost: 0,
            mesh: HashMap::new(),
        };
        world.tell(Event::SourceSynced);
        world.tell(Event::ExecutorConnected);
        world.tell(Event::SandboxesListed);
        world
    }

    pub(super) fn number(uid: &PodUid) -> u32 {
        uid.as_str().trim_start_matches("uid-").parse().unwrap()
    }

    fn newest_ready(&self) -> Option<ConnectionId> {
        self.connections
            .iter()
            .rev()
            .find(|(_, ready)| *ready)
            .map(|(id, _)| *id)
    }

    pub(super) fn tell(&mut self, event: Event) {
        let effects = self.state.handle(self.now, event);
        for effect in effects {
            self.check(&effect);
            self.record(effect);
        }
        let counts = self.state.counts();
        assert_eq!(
            counts.expected,
            counts.enrolled + counts.broken + counts.pending,
            "every selected pod is exactly one of enrolled, broken and pending"
        );
    }

    fn check(&self, effect: &Effect) {
        match effect {
            Effect::Complete {
                id,
                pod,
                verdict: Verdict::Ambient,
            } => {
                let n = Self::number(pod);
                let proxy = self.newest_ready().expect("admitted without a ready connection");
                let (epoch, held) = self.offers.get(&n).expect("admitted without an offer");
                assert!(
                    self.acks.contains(&(proxy, n, *epoch)),
                    "admitted without the live connection's ack"
                );
                let same = held.attachment == id.attachment;
                assert!(same, "admitted with another sandbox's ack");
                assert!(
                    matches!(self.rules.get(id), Some(Desired::Ambient(_))),
                    "admitted without rules"
                );
            }
            Effect::ZdsOffer { pod, held, to, .. } => {
                let n = Self::number(pod);
                let current = self.sandboxes.get(&n);
                assert!(
                    current.is_some_and(|sandbox| sandbox.id.attachment == held.attachment),
                    "a dead sandbox is offered to ztunnel"
                );
                if let Some(to) = to {
                    assert_eq!(
                        Some(*to),
                        self.newest_ready(),
                        "offered to a connection that does not serve"
                    );
                }
            }
            _ => {}
        }
    }

    fn record(&mut self, effect: Effect) {
        match &effect {
            Effect::Complete { id, .. } => {
                let verdicts = self.adds.get_mut(id).expect("a verdict for no ADD");
                *verdicts += 1;
            }
            Effect::ZdsOffer { pod, epoch, held, .. } => {
                self.offers.insert(Self::number(pod), (*epoch, held.clone()));
            }
            Effect::ZdsWithdraw { pod, .. } => {
                self.offers.remove(&Self::number(pod));
            }
            _ => {}
        }
        let call = !matches!(
            effect,
            Effect::Publish { .. }
                | Effect::Timed { .. }
                | Effect::Log { .. }
                | Effect::DropDescriptor(_)
                | Effect::ZdsOpen
                | Effect::WriteStatus { .. }
        );
        if call {
            self.calls.push(effect);
        }
    }

    pub(super) fn run(&mut self, step: &Step) {
        match *step {
            Step::Apply { pod: n, mesh, phase } => {
                let mut object = pod(n, mesh);
                object.phase =
                    [Phase::Pending, Phase::Running, Phase::Running, Phase::Succeeded][usize::from(phase)];
                if phase > 0 {
                    object.ips = sandbox(n, 0, false).addresses;
                }
                self.mesh.insert(n, mesh);
                self.tell(Event::PodApplied(Arc::new(object)));
            }
            Step::Delete(n) => {
                self.mesh.remove(&n);
                self.tell(Event::PodDeleted(Arc::new(pod(n, true))));
            }
            Step::Namespace => self.tell(Event::NamespaceApplied(Arc::new(source::Namespace {
                name: "default".parse().unwrap(),
                labels: Labels::default(),
            }))),
            Step::Add(n) => self.add(n),
            Step::Del(n) => self.del(n),
            Step::Connect => {
                self.next_connection += 1;
                let id = ConnectionId(self.next_connection);
                self.connections.push((id, false));
                self.tell(Event::ZdsConnected(id));
            }
            Step::Ready(which) => self.ready(which),
            Step::Close(which) => {
                if which < self.connections.len() {
                    let (id, _) = self.connections.remove(which);
                    self.acks.retain(|(connection, ..)| *connection != id);
                    self.tell(Event::ZdsClosed(id));
                }
            }
            Step::Answer { which, well } => {
                if which < self.calls.len() {
                    let call = self.calls.remove(which);
                    self.answer(call, well);
                }
            }
            Step::ExecutorRestart => {
                self.foreseen.clear();
                let calls = self.calls.iter().filter_map(|call| match call {
                    Effect::Foresee { call, .. } => Some(*call),
                    _ => None,
                });
                self.foresee_lost = calls.fold(self.foresee_lost, u64::max);
                self.tell(Event::ExecutorDisconnected);
                self.tell(Event::ExecutorConnected);
                for sandbox in self.sandboxes.values().cloned().collect::<Vec<_>>() {
                    let mut sandbox = sandbox;
                    if std::mem::take(&mut sandbox.pending) {
                        self.ended.insert(sandbox.id.clone());
                    }
                    sandbox.programmed = self.rules.get(&sandbox.id).cloned().unwrap_or(Desired::None);
                    self.sandboxes
                        .insert(Self::number(&sandbox.pod.uid), sandbox.clone());
                    self.tell(Event::SandboxPresent(Box::new(sandbox)));
                }
                self.tell(Event::SandboxesListed);
            }
            Step::Pass(millis) => self.pass(Duration::from_millis(millis.into())),
        }
    }

    pub(super) fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        let mut ticks = 0;
        while let Some(wake) = self.state.wake().filter(|wake| *wake <= until) {
            self.now = self.now.max(wake);
            self.tell(Event::Tick);
            ticks += 1;
            assert!(ticks < 5_000, "the machine wakes itself all the time");
        }
        self.now = until;
        self.tell(Event::Tick);
    }

    fn add(&mut self, n: u32) {
        let replaced = self.sandboxes.remove(&n);
        if let Some(old) = &replaced {
            self.ended.insert(old.id.clone());
        }
        self.lives += 1;
        let ahead = self.foreseen.remove(&n).filter(|_| replaced.is_none());
        if ahead == Some(Desired::None) {
            let sandbox = sandbox(n, self.lives, false);
            self.sandboxes.insert(n, sandbox.clone());
            self.tell(Event::SandboxChanged(Box::new(sandbox)));
            return;
        }
        let mut sandbox = sandbox(n, self.lives, true);
        self.sandboxes.insert(n, sandbox.clone());
        self.adds.insert(sandbox.id.clone(), 0);
        let Some(desired) = ahead else {
            self.tell(Event::SandboxPending(Box::new(sandbox)));
            return;
        };
        // Announced as it is being made, which may fail.
        self.rules.insert(sandbox.id.clone(), desired.clone());
        sandbox.programmed = desired;
        self.tell(Event::SandboxPending(Box::new(sandbox.clone())));
        if self.lives.is_multiple_of(3) {
            self.rules.remove(&sandbox.id);
            sandbox.programmed = Desired::None;
            self.tell(Event::SandboxChanged(Box::new(sandbox)));
        }
    }

    pub(super) fn foresee(
        &mut self,
        fails: bool,
        decided: Vec<(PodUid, Desired)>,
        ask: &[PodUid],
    ) -> Result<(), Failure> {
        if fails {
            return Err(failure(ErrorCode::ExecutorUnreachable));
        }
        for n in ask.iter().map(Self::number) {
            self.foreseen.remove(&n);
        }
        for (pod, desired) in decided {
            let n = Self::number(&pod);
            if !self.sandboxes.contains_key(&n) {
                self.foreseen.insert(n, desired);
            }
        }
        Ok(())
    }

    pub(super) fn del(&mut self, n: u32) {
        let Some(sandbox) = self.sandboxes.remove(&n) else {
            return;
        };
        self.ended.insert(sandbox.id.clone());
        self.tell(Event::SandboxGone {
            id: sandbox.id,
            pod: uid(n),
        });
    }

    fn ready(&mut self, which: usize) {
        let Some((id, ready)) = self.connections.get_mut(which) else {
            return;
        };
        if std::mem::replace(ready, true) {
            return;
        }
        let id = *id;
        let acked: Vec<_> = self.offers.iter().map(|(n, (epoch, _))| (*n, *epoch)).collect();
        self.acks.extend(acked.iter().map(|(n, epoch)| (id, *n, *epoch)));
        self.tell(Event::ZdsReady {
            connection: id,
            acked: acked.into_iter().map(|(n, epoch)| (uid(n), epoch)).collect(),
            unix_ms: 1,
        });
    }

    pub(super) fn lives(&self, id: &SandboxId) -> bool {
        self.sandboxes.values().any(|sandbox| sandbox.id == *id)
    }
}

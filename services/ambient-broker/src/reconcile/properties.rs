//! Random orders of facts: whatever happens, in whatever order, some things never do.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use sluice_proto::ambient::Desired;
use sluice_proto::code::ErrorCode;
use sluice_proto::id::PodUid;
use sluice_proto::sandbox::Failure;
use sluice_selection::{Labels, Phase, SelectionConfig};

use super::event::{ConnectionId, Effect, Epoch, Event, Refused, Sandbox, SandboxId, Verdict};
use super::tests::{failure, pod, sandbox, uid};
use super::{Settings, State};
use crate::source;

const PODS: u32 = 3;

#[derive(Debug, Clone)]
enum Step {
    Apply {
        pod: u32,
        mesh: bool,
        phase: u8,
    },
    Delete(u32),
    Namespace,
    Add(u32),
    Del(u32),
    Connect,
    Ready(usize),
    Close(usize),
    /// Answers one outstanding call, well or not.
    Answer {
        which: usize,
        well: u8,
    },
    ExecutorRestart,
    Pass(u16),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (1..=PODS, any::<bool>(), 0..4_u8).prop_map(|(pod, mesh, phase)| Step::Apply { pod, mesh, phase }),
        1 => (1..=PODS).prop_map(Step::Delete),
        1 => Just(Step::Namespace),
        3 => (1..=PODS).prop_map(Step::Add),
        2 => (1..=PODS).prop_map(Step::Del),
        2 => Just(Step::Connect),
        3 => (0..4_usize).prop_map(Step::Ready),
        1 => (0..4_usize).prop_map(Step::Close),
        20 => (0..8_usize, 0..10_u8).prop_map(|(which, well)| Step::Answer { which, well }),
        1 => Just(Step::ExecutorRestart),
        3 => (0..6_000_u16).prop_map(Step::Pass),
    ]
}

/// A world that answers as it likes, and remembers what it was told.
struct World {
    state: State,
    now: Instant,
    calls: Vec<Effect>,
    lives: u32,
    /// Sandboxes the executor has.
    sandboxes: HashMap<u32, Sandbox>,
    /// Verdicts given to each ADD.
    adds: HashMap<SandboxId, u32>,
    /// ADDs that ended without us.
    ended: HashSet<SandboxId>,
    connections: Vec<(ConnectionId, bool)>,
    next_connection: u64,
    /// What ready connections have acknowledged.
    acks: HashSet<(ConnectionId, u32, Epoch)>,
    /// What is offered now, and in which netns.
    offers: HashMap<u32, (Epoch, SandboxId)>,
    rules: HashMap<SandboxId, Desired>,
    /// What the executor does without asking.
    foreseen: HashMap<u32, Desired>,
    /// Calls up to this one were made to an executor that is gone.
    foresee_lost: u64,
    /// Whether the source's pods are in the mesh.
    mesh: HashMap<u32, bool>,
}

impl World {
    fn new() -> Self {
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

    fn number(uid: &sluice_proto::id::PodUid) -> u32 {
        uid.as_str().trim_start_matches("uid-").parse().unwrap()
    }

    fn newest_ready(&self) -> Option<ConnectionId> {
        self.connections
            .iter()
            .rev()
            .find(|(_, ready)| *ready)
            .map(|(id, _)| *id)
    }

    fn tell(&mut self, event: Event) {
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

    fn run(&mut self, step: &Step) {
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

    fn pass(&mut self, time: Duration) {
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

    fn foresee(
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

    fn del(&mut self, n: u32) {
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

    fn lives(&self, id: &SandboxId) -> bool {
        self.sandboxes.values().any(|sandbox| sandbox.id == *id)
    }

    #[expect(clippy::too_many_lines, reason = "one arm a call")]
    fn answer(&mut self, call: Effect, well: u8) {
        let fails = well == 0;
        let lost = well == 1;
        let broken = || failure(ErrorCode::Rules);
        let event = match call {
            Effect::Program { id, pod, desired } => {
                let result = if !self.lives(&id) {
                    Err(Refused::TooLate)
                } else if fails {
                    Err(Refused::Failed(broken()))
                } else if lost {
                    Err(Refused::Lost(broken()))
                } else {
                    self.rules.insert(id.clone(), desired.clone());
                    Ok(String::new())
                };
                Event::Programmed {
                    id,
                    pod,
                    desired,
                    result,
                }
            }
            Effect::FetchDescriptor { id, pod, .. } => {
                let result = if fails { Err(broken()) } else { Ok(()) };
                Event::Fetched { id, pod, result }
            }
            Effect::OfferDescriptor { id, pod, .. } => {
                let result = if fails { Err(broken()) } else { Ok(()) };
                Event::DescriptorOffered { id, pod, result }
            }
            Effect::Inspect { id, pod } => Event::Inspected {
                id,
                pod,
                result: if fails {
                    Err(broken())
                } else {
                    Ok(u32::from(well % 3))
                },
            },
            Effect::Complete { id, pod, verdict } => {
                let refused = matches!(verdict, Verdict::Refuse(_));
                let pending = self
                    .sandboxes
                    .values_mut()
                    .find(|sandbox| sandbox.id == id && sandbox.pending);
                let result = match pending {
                    None => Err(Refused::TooLate),
                    // Refused by us or by the executor: it takes everything back and forgets the sandbox.
                    Some(_) if refused || fails => {
                        self.del(World::number(&pod));
                        if refused {
                            Ok(())
                        } else {
                            Err(Refused::Failed(broken()))
                        }
                    }
                    Some(sandbox) => {
                        sandbox.pending = false;
                        Ok(())
                    }
                };
                Event::Completed { id, pod, result }
            }
            Effect::Adopt { pod, .. } => Event::Adopted {
                pod: pod.uid,
                result: Err(broken()),
            },
            Effect::LetGo { id, pod } => {
                let known = self.sandboxes.values().any(|sandbox| sandbox.id == id);
                if known && !fails {
                    self.del(World::number(&pod));
                }
                let result = if known && fails {
                    Err("mounted".into())
                } else {
                    Ok(())
                };
                Event::LetGo { id, pod, result }
            }
            Effect::SyncProbes { .. } => Event::ProbesSynced(if fails { Err(broken()) } else { Ok(()) }),
            Effect::Lookup(pod) => Event::LookedUp {
                pod,
                found: if fails {
                    Err("gone".into())
                } else {
                    Ok(source::Lookup::default())
                },
            },
            Effect::Foresee { call, decided, ask } => Event::Foreseen {
                call,
                result: self.foresee(fails || call <= self.foresee_lost, decided, &ask),
            },
            Effect::ZdsWithdraw { pod, epoch } => Event::ZdsWithdrawn { pod, epoch },
            Effect::ZdsOffer { pod, epoch, to, .. } => {
                let Some(connection) = to.filter(|to| self.connections.iter().any(|(id, _)| id == to)) else {
                    return;
                };
                match well {
                    0 => Event::ZdsNacked {
                        connection,
                        pod,
                        epoch,
                        error: "no".into(),
                    },
                    1 => {
                        let waited = Duration::from_secs(4);
                        self.tell(Event::ZdsExpired {
                            connection,
                            pod,
                            epoch,
                            waited,
                        });
                        self.connections.retain(|(id, _)| *id != connection);
                        self.acks.retain(|(id, ..)| *id != connection);
                        Event::ZdsClosed(connection)
                    }
                    _ => {
                        self.acks.insert((connection, World::number(&pod), epoch));
                        Event::ZdsAcked {
                            connection,
                            pod,
                            epoch,
                            took: Duration::ZERO,
                            unix_ms: 1,
                        }
                    }
                }
            }
            other => panic!("not a call: {other:?}"),
        };
        self.tell(event);
    }

    /// Everything is answered well until nothing is left to do.
    fn quiesce(&mut self) {
        for _ in 0..200 {
            while let Some(call) = self.calls.pop() {
                self.answer(call, 9);
            }
            self.pass(Duration::from_secs(1));
            if self.calls.is_empty() && self.sandboxes.values().all(|sandbox| !sandbox.pending) {
                return;
            }
        }
    }
}

proptest! {
    // PROPTEST_CASES asks for more.
    #![proptest_config(ProptestConfig { max_shrink_iters: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn no_order_of_events_breaks_the_promises(steps in proptest::collection::vec(step(), 1..120)) {
        let mut world = World::new();
        for step in steps {
            world.run(&step);
        }
        world.quiesce();
        for (id, verdicts) in &world.adds {
            prop_assert!(*verdicts <= 1, "{id} got {verdicts} verdicts");
            prop_assert!(*verdicts == 1 || world.ended.contains(id), "{id} never got a verdict");
        }
        for (n, desired) in &world.foreseen {
            let mesh = matches!(desired, Desired::Ambient(_));
            prop_assert_eq!(world.mesh.get(n), Some(&mesh), "pod {} would be {:?}", n, desired);
        }
    }
}

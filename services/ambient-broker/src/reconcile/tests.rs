//! Sequences of facts, and what is done about them.

mod adds;
mod foresight;
mod leaving;
mod lost;
mod peers;
mod running;
mod sandboxes;
mod status;
mod undetermined;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sluice_proto::ambient::{AmbientOptions, Desired};
use sluice_proto::code::ErrorCode;
use sluice_proto::id::{Attachment, ContainerId, InterfaceName, NetworkName, PodRef, PodUid};
use sluice_proto::sandbox::{Failure, NetnsIdentity};
use sluice_selection::{Labels, Phase, SelectionConfig};

use super::effect::{Effect, Level, Verdict};
use super::event::{ConnectionId, Epoch, Event, Refused, Sandbox, SandboxId};
use super::report::{PodReport, Standing};
use super::{Settings, State};
use crate::source;

pub(super) fn failure(code: ErrorCode) -> Failure {
    Failure::new(code, "test", "stage", "cause")
}

pub(super) fn uid(n: u32) -> PodUid {
    PodUid::parse(format!("uid-{n}")).unwrap()
}

pub(super) fn pod(n: u32, mesh: bool) -> source::Pod {
    let mut labels = Labels::new();
    if mesh {
        labels.insert("istio.io/dataplane-mode".into(), "ambient".into());
    }
    source::Pod {
        id: PodRef {
            namespace: "default".parse().unwrap(),
            name: format!("pod-{n}").parse().unwrap(),
            uid: uid(n),
        },
        labels,
        annotations: Labels::new(),
        deletion_timestamp: None,
        host_network: false,
        service_account: "sa".into(),
        node_name: None,
        phase: Phase::Pending,
        ips: Vec::new(),
    }
}

pub(super) fn sandbox(n: u32, life: u32, pending: bool) -> Sandbox {
    Sandbox {
        id: SandboxId {
            attachment: Attachment {
                network_name: NetworkName::parse("net").unwrap(),
                container_id: ContainerId::parse(format!("c{n}-{life}")).unwrap(),
                ifname: InterfaceName::parse("eth0").unwrap(),
            },
            generation: u64::from(life),
        },
        pod: pod(n, true).id,
        addresses: vec![IpAddr::from([10, 0, 0, u8::try_from(n).unwrap()])],
        netns: NetnsIdentity {
            cookie: u64::from(n) * 1000 + u64::from(life),
            device: 4,
            inode: 100 + u64::from(n),
            boot_id: "boot".into(),
        },
        programmed: Desired::None,
        reachable: true,
        broken: None,
        pending,
        fingerprint: String::new(),
        attempts: 0,
    }
}

/// The machine under test with a clock, and every effect that nobody has looked at yet.
struct Bench {
    state: State,
    now: Instant,
    effects: Vec<Effect>,
}

const C1: ConnectionId = ConnectionId(1);
const C2: ConnectionId = ConnectionId(2);

impl Bench {
    /// Source synced, executor up without sandboxes, namespace `default` known.
    fn new() -> Self {
        let mut bench = Self::cold();
        bench.tell(Event::NamespaceApplied(Arc::new(source::Namespace {
            name: "default".parse().unwrap(),
            labels: Labels::new(),
        })));
        bench.tell(Event::SourceSynced);
        bench.list(&[]);
        bench.tell(Event::ProbesSynced(Ok(())));
        bench.take();
        bench
    }

    /// As [`Self::new`], with a proxy, and pod 1 selected; it has no sandbox yet.
    fn selected() -> Self {
        let mut bench = Self::new();
        bench.proxy(C1, &[]);
        bench.apply(pod(1, true));
        bench
    }

    /// As [`Self::selected`]; pod 1 runs, not enrolled yet, and its netns is at hand.
    fn running() -> (Self, Sandbox) {
        let mut bench = Self::selected();
        let sandbox = sandbox(1, 1, false);
        bench.changed(&sandbox);
        bench.fetched(&sandbox);
        (bench, sandbox)
    }

    fn cold() -> Self {
        let now = Instant::now();
        Self {
            state: State::new(Settings::default(), SelectionConfig::default(), now),
            now,
            effects: Vec::new(),
        }
    }

    fn tell(&mut self, event: Event) {
        let effects = self.state.handle(self.now, event);
        self.effects.extend(effects);
    }

    /// Lets time pass, with every tick that falls due.
    fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        while let Some(wake) = self.state.wake().filter(|wake| *wake <= until) {
            self.now = self.now.max(wake);
            self.tell(Event::Tick);
        }
        self.now = until;
        self.tell(Event::Tick);
    }

    /// What was to be done since the last look, without reports, timings, messages and what is told ahead.
    fn take(&mut self) -> Vec<Effect> {
        let noise = |effect: &Effect| {
            matches!(
                effect,
                Effect::Publish { .. } | Effect::Timed { .. } | Effect::Log { .. } | Effect::Foresee { .. }
            )
        };
        let mut effects = std::mem::take(&mut self.effects);
        effects.retain(|effect| !noise(effect));
        effects
    }

    fn apply(&mut self, pod: source::Pod) {
        self.tell(Event::PodApplied(Arc::new(pod)));
    }

    /// An ADD of `sandbox` waits.
    fn pending(&mut self, sandbox: &Sandbox) {
        self.tell(Event::SandboxPending(Box::new(sandbox.clone())));
    }

    fn changed(&mut self, sandbox: &Sandbox) {
        self.tell(Event::SandboxChanged(Box::new(sandbox.clone())));
    }

    fn gone(&mut self, sandbox: &Sandbox) {
        self.tell(Event::SandboxGone {
            id: sandbox.id.clone(),
            pod: sandbox.pod.uid.clone(),
        });
    }

    /// An executor comes and lists these.
    fn list(&mut self, sandboxes: &[Sandbox]) {
        self.tell(Event::ExecutorConnected);
        for sandbox in sandboxes {
            self.tell(Event::SandboxPresent(Box::new(sandbox.clone())));
        }
        self.tell(Event::SandboxesListed);
    }

    fn proxy(&mut self, connection: ConnectionId, acked: &[(u32, Epoch)]) {
        self.tell(Event::ZdsConnected(connection));
        self.tell(Event::ZdsReady {
            connection,
            acked: acked.iter().map(|(n, epoch)| (uid(*n), *epoch)).collect(),
            unix_ms: 1,
        });
    }

    fn programmed(&mut self, sandbox: &Sandbox, desired: Desired) {
        self.tell(Event::Programmed {
            id: sandbox.id.clone(),
            pod: sandbox.pod.uid.clone(),
            desired,
            result: Ok("0123456789abcdef".into()),
        });
    }

    fn fetched(&mut self, sandbox: &Sandbox) {
        self.tell(Event::Fetched {
            id: sandbox.id.clone(),
            pod: sandbox.pod.uid.clone(),
            result: Ok(()),
        });
    }

    /// The rules of the mesh could not be made.
    fn not_programmed(&mut self, sandbox: &Sandbox, refused: Refused) {
        self.tell(Event::Programmed {
            id: sandbox.id.clone(),
            pod: sandbox.pod.uid.clone(),
            desired: ambient(),
            result: Err(refused),
        });
    }

    fn not_fetched(&mut self, sandbox: &Sandbox, code: ErrorCode) {
        self.tell(Event::Fetched {
            id: sandbox.id.clone(),
            pod: sandbox.pod.uid.clone(),
            result: Err(failure(code)),
        });
    }

    fn inspected(&mut self, sandbox: &Sandbox, redirected: u32) {
        self.tell(Event::Inspected {
            id: sandbox.id.clone(),
            pod: sandbox.pod.uid.clone(),
            result: Ok(redirected),
        });
    }

    /// The answer about the netns of pod 1.
    fn adopted(&mut self, result: Result<Sandbox, Failure>) {
        self.tell(Event::Adopted {
            pod: uid(1),
            result: result.map(Box::new),
        });
    }

    fn looked_up(&mut self, sandbox: &Sandbox, found: Result<source::Lookup, String>) {
        self.tell(Event::LookedUp {
            pod: sandbox.pod.clone(),
            found,
        });
    }

    fn nacked(&mut self, n: u32, connection: ConnectionId, epoch: Epoch, error: &str) {
        self.tell(Event::ZdsNacked {
            connection,
            pod: uid(n),
            epoch,
            error: error.into(),
        });
    }

    fn acked(&mut self, n: u32, connection: ConnectionId, epoch: Epoch) {
        self.tell(Event::ZdsAcked {
            connection,
            pod: uid(n),
            epoch,
            took: Duration::from_micros(30),
            unix_ms: 5,
        });
    }

    fn completed(&mut self, sandbox: &Sandbox, result: Result<(), Refused>) {
        self.tell(Event::Completed {
            id: sandbox.id.clone(),
            pod: sandbox.pod.uid.clone(),
            result,
        });
    }

    fn report(&self, n: u32) -> Arc<PodReport> {
        self.state
            .reports()
            .find(|report| report.pod.uid == uid(n))
            .cloned()
            .unwrap()
    }

    /// An ADD of pod 1 up to where ztunnel has been asked.
    fn add_until_offered(&mut self, sandbox: &Sandbox) -> Epoch {
        self.pending(sandbox);
        self.programmed(sandbox, ambient());
        self.fetched(sandbox);
        offered(&self.take())
    }

    /// Pod 1 in the mesh, on connection C1.
    fn enrolled() -> (Self, Sandbox, Epoch) {
        let mut bench = Self::selected();
        let sandbox = sandbox(1, 1, true);
        let epoch = bench.add_until_offered(&sandbox);
        bench.acked(1, C1, epoch);
        bench.completed(&sandbox, Ok(()));
        assert_eq!(bench.report(1).standing, Standing::Enrolled);
        bench.take();
        (bench, sandbox, epoch)
    }

    fn withdrawn(&mut self, epoch: Epoch) {
        self.tell(Event::ZdsWithdrawn { pod: uid(1), epoch });
    }
}

fn ambient() -> Desired {
    Desired::Ambient(AmbientOptions::default())
}

fn draining() -> Desired {
    Desired::Draining(AmbientOptions::default())
}

fn offered(effects: &[Effect]) -> Epoch {
    let mut epochs = effects.iter().filter_map(|effect| match effect {
        Effect::ZdsOffer { epoch, .. } => Some(*epoch),
        _ => None,
    });
    let epoch = epochs
        .next()
        .unwrap_or_else(|| panic!("nothing offered: {effects:?}"));
    assert_eq!(epochs.next(), None, "offered twice: {effects:?}");
    epoch
}

fn verdicts(effects: &[Effect]) -> Vec<Verdict> {
    effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::Complete { verdict, .. } => Some(verdict.clone()),
            _ => None,
        })
        .collect()
}

fn refusal(effects: &[Effect]) -> Failure {
    match verdicts(effects).as_slice() {
        [Verdict::Refuse(failure)] => failure.clone(),
        other => panic!("not one refusal: {other:?}"),
    }
}

fn withdraws(effects: &[Effect]) -> usize {
    effects
        .iter()
        .filter(|effect| matches!(effect, Effect::ZdsWithdraw { .. }))
        .count()
}

fn programs(effects: &[Effect]) -> Vec<Desired> {
    effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::Program { desired, .. } => Some(desired.clone()),
            _ => None,
        })
        .collect()
}

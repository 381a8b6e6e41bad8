//! Sequences of facts, and what is done about them.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sluice_proto::ambient::Desired;
use sluice_proto::code::ErrorCode;
use sluice_proto::id::{Attachment, ContainerId, InterfaceName, NetworkName, PodRef, PodUid};
use sluice_proto::sandbox::{Failure, NetnsIdentity};
use sluice_selection::{Labels, Phase, SelectionConfig};

use super::event::{
    ConnectionId, Effect, Epoch, Event, PodReport, Refused, Sandbox, SandboxId, Standing, Verdict,
};
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
        bench.tell(Event::ExecutorConnected);
        bench.tell(Event::SandboxesListed);
        bench.tell(Event::ProbesSynced(Ok(())));
        bench.take();
        bench
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

    /// What was to be done since the last look, without reports, timings and messages.
    fn take(&mut self) -> Vec<Effect> {
        let noise = |effect: &Effect| {
            matches!(
                effect,
                Effect::Publish { .. } | Effect::Timed { .. } | Effect::Log { .. }
            )
        };
        let mut effects = std::mem::take(&mut self.effects);
        effects.retain(|effect| !noise(effect));
        effects
    }

    fn apply(&mut self, pod: source::Pod) {
        self.tell(Event::PodApplied(Arc::new(pod)));
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
            result: Ok(()),
        });
    }

    fn fetched(&mut self, sandbox: &Sandbox) {
        self.tell(Event::Fetched {
            id: sandbox.id.clone(),
            pod: sandbox.pod.uid.clone(),
            result: Ok(()),
        });
    }

    fn acked(&mut self, n: u32, connection: ConnectionId, epoch: Epoch) {
        self.tell(Event::ZdsAcked {
            connection,
            pod: uid(n),
            epoch,
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
        self.tell(Event::SandboxPending(Box::new(sandbox.clone())));
        self.programmed(sandbox, ambient());
        self.fetched(sandbox);
        offered(&self.take())
    }

    /// Pod 1 in the mesh, on connection C1.
    fn enrolled() -> (Self, Sandbox, Epoch) {
        let mut bench = Self::new();
        bench.proxy(C1, &[]);
        bench.apply(pod(1, true));
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
    Desired::Ambient(Default::default())
}

fn draining() -> Desired {
    Desired::Draining(Default::default())
}

fn offered(effects: &[Effect]) -> Epoch {
    let mut epochs = effects.iter().filter_map(|effect| match effect {
        Effect::ZdsOffer { epoch, .. } => Some(*epoch),
        _ => None,
    });
    let epoch = epochs.next().unwrap_or_else(|| panic!("nothing offered: {effects:?}"));
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

#[test]
fn a_mesh_pod_gets_rules_and_descriptor_at_once_then_ztunnel_then_the_verdict() {
    let mut bench = Bench::new();
    bench.proxy(C1, &[]);
    bench.apply(pod(1, true));
    let sandbox = sandbox(1, 1, true);
    bench.take();
    bench.tell(Event::SandboxPending(Box::new(sandbox.clone())));
    let effects = bench.take();
    assert!(matches!(
        effects.as_slice(),
        [Effect::FetchDescriptor { .. }, Effect::Program { .. }]
    ));
    bench.fetched(&sandbox);
    assert!(bench.take().is_empty(), "nothing goes to ztunnel before the rules are there");
    bench.programmed(&sandbox, ambient());
    let effects = bench.take();
    let epoch = offered(&effects);
    assert!(matches!(&effects[0], Effect::ZdsOffer { to: Some(C1), .. }));
    bench.acked(1, C1, epoch);
    assert_eq!(verdicts(&bench.take()), [Verdict::Ambient]);
    assert_eq!(bench.report(1).standing, Standing::Pending);
    bench.completed(&sandbox, Ok(()));
    let effects = bench.take();
    assert!(
        matches!(effects.as_slice(), [Effect::WriteStatus { enrolled: true, .. }]),
        "{effects:?}"
    );
    let report = bench.report(1);
    assert_eq!(report.standing, Standing::Enrolled);
    assert_eq!(report.acked, Some((C1, 5)));
}

#[test]
fn a_pod_that_is_not_in_the_mesh_passes_with_this_one_call() {
    let mut bench = Bench::new();
    bench.apply(pod(1, false));
    bench.tell(Event::SandboxPending(Box::new(sandbox(1, 1, true))));
    let effects = bench.take();
    assert_eq!(verdicts(&effects), [Verdict::Pass]);
    assert!(programs(&effects).is_empty());
}

#[test]
fn host_network_and_ended_pods_are_never_enrolled() {
    let mut bench = Bench::new();
    bench.proxy(C1, &[]);
    let mut host = pod(1, true);
    host.host_network = true;
    bench.apply(host);
    bench.tell(Event::SandboxChanged(Box::new(sandbox(1, 1, false))));
    let mut ended = pod(2, true);
    ended.phase = Phase::Succeeded;
    bench.apply(ended);
    bench.tell(Event::SandboxChanged(Box::new(sandbox(2, 1, false))));
    let effects = bench.take();
    assert!(programs(&effects).is_empty(), "{effects:?}");
}

#[test]
fn an_add_of_an_unknown_pod_asks_the_source_and_is_refused_in_the_end() {
    let mut bench = Bench::new();
    let sandbox = sandbox(1, 1, true);
    bench.tell(Event::SandboxPending(Box::new(sandbox.clone())));
    let mut asked = 0;
    for _ in 0..100 {
        let effects = bench.take();
        if effects.iter().any(|effect| matches!(effect, Effect::Lookup(_))) {
            asked += 1;
            bench.tell(Event::LookedUp {
                pod: sandbox.pod.clone(),
                found: Ok(source::Lookup::default()),
            });
        }
        if !verdicts(&effects).is_empty() {
            assert_eq!(refusal(&effects).code, ErrorCode::PodUnknown);
            assert!(asked >= 3, "asked {asked} times");
            return;
        }
        bench.pass(Duration::from_millis(20));
    }
    panic!("never refused");
}

#[test]
fn an_add_goes_on_as_soon_as_the_source_tells_of_the_pod() {
    let mut bench = Bench::new();
    bench.tell(Event::SandboxPending(Box::new(sandbox(1, 1, true))));
    assert!(matches!(bench.take().last(), Some(Effect::Lookup(_))));
    bench.apply(pod(1, false));
    assert_eq!(verdicts(&bench.take()), [Verdict::Pass]);
}

#[test]
fn a_lookup_that_finds_another_uid_does_not_count() {
    let mut bench = Bench::new();
    let sandbox = sandbox(1, 1, true);
    bench.tell(Event::SandboxPending(Box::new(sandbox.clone())));
    let mut older = pod(1, false);
    older.id.uid = uid(99);
    bench.tell(Event::LookedUp {
        pod: sandbox.pod.clone(),
        found: Ok(source::Lookup {
            pod: Some(Arc::new(older)),
            namespace: None,
        }),
    });
    assert!(verdicts(&bench.take()).is_empty());
    let mut effects = Vec::new();
    while verdicts(&effects).is_empty() {
        bench.pass(Duration::from_millis(10));
        effects = bench.take();
        if effects.iter().any(|effect| matches!(effect, Effect::Lookup(_))) {
            bench.tell(Event::LookedUp {
                pod: sandbox.pod.clone(),
                found: Err("directory gone".into()),
            });
        }
    }
    let refused = refusal(&effects);
    assert_eq!(refused.code, ErrorCode::PodUnknown);
    assert!(refused.cause.contains("directory gone"), "{refused}");
}

#[test]
fn an_add_before_the_source_has_told_anything_is_refused() {
    let mut bench = Bench::cold();
    bench.tell(Event::ExecutorConnected);
    bench.tell(Event::SandboxesListed);
    bench.tell(Event::SandboxPending(Box::new(sandbox(1, 1, true))));
    assert_eq!(refusal(&bench.take()).code, ErrorCode::BrokerState);
}

#[test]
fn an_add_waits_for_a_ztunnel_and_takes_the_snapshots_ack() {
    let mut bench = Bench::new();
    bench.apply(pod(1, true));
    let sandbox = sandbox(1, 1, true);
    let epoch = bench.add_until_offered(&sandbox);
    bench.pass(Duration::from_secs(3));
    assert!(verdicts(&bench.take()).is_empty());
    assert_eq!(bench.report(1).reason, "no-proxy");
    bench.proxy(C1, &[(1, epoch)]);
    assert_eq!(verdicts(&bench.take()), [Verdict::Ambient]);
}

#[test]
fn an_add_without_any_ztunnel_is_refused_before_the_executor_gives_up() {
    let mut bench = Bench::new();
    bench.apply(pod(1, true));
    let sandbox = sandbox(1, 1, true);
    let epoch = bench.add_until_offered(&sandbox);
    bench.pass(Duration::from_secs(8));
    assert!(verdicts(&bench.take()).is_empty());
    bench.pass(Duration::from_millis(600));
    let effects = bench.take();
    assert_eq!(withdraws(&effects), 1);
    assert_eq!(programs(&effects), [Desired::None]);
    bench.withdrawn(epoch);
    bench.programmed(&sandbox, Desired::None);
    assert_eq!(refusal(&bench.take()).code, ErrorCode::NoProxy);
}

#[test]
fn each_failing_stage_takes_the_earlier_ones_back() {
    // Rules.
    let mut bench = Bench::new();
    bench.proxy(C1, &[]);
    bench.apply(pod(1, true));
    let sandbox = sandbox(1, 1, true);
    bench.tell(Event::SandboxPending(Box::new(sandbox.clone())));
    bench.take();
    bench.tell(Event::Programmed {
        id: sandbox.id.clone(),
        pod: uid(1),
        desired: ambient(),
        result: Err(Refused::Failed(failure(ErrorCode::Rules))),
    });
    assert_eq!(refusal(&bench.take()).code, ErrorCode::Rules);
    bench.completed(&sandbox, Ok(()));

    // Descriptor.
    let second = super::tests::sandbox(1, 2, true);
    bench.tell(Event::SandboxPending(Box::new(second.clone())));
    bench.programmed(&second, ambient());
    bench.take();
    bench.tell(Event::Fetched {
        id: second.id.clone(),
        pod: uid(1),
        result: Err(failure(ErrorCode::SandboxGone)),
    });
    assert_eq!(programs(&bench.take()), [Desired::None]);
    bench.programmed(&second, Desired::None);
    assert_eq!(refusal(&bench.take()).code, ErrorCode::SandboxGone);
    bench.completed(&second, Ok(()));

    // ztunnel refuses: it is told to forget the pod.
    let third = super::tests::sandbox(1, 3, true);
    let epoch = bench.add_until_offered(&third);
    bench.tell(Event::ZdsNacked {
        connection: C1,
        pod: uid(1),
        epoch,
        error: "failed to start proxy : bind [::1]:15053".into(),
    });
    let effects = bench.take();
    assert_eq!(withdraws(&effects), 1);
    assert_eq!(programs(&effects), [Desired::None]);
    bench.withdrawn(epoch);
    bench.programmed(&third, Desired::None);
    let refused = refusal(&bench.take());
    assert_eq!(refused.code, ErrorCode::ProxyNack);
    assert!(refused.cause.contains("disable_ipv6"), "{refused}");
    bench.completed(&third, Ok(()));
    assert!(bench.take().iter().any(|e| matches!(e, Effect::DropDescriptor(id) if *id == third.id)));

    // The executor fails at the last step (probe set): it has ended the ADD, we take back the rest.
    let fourth = super::tests::sandbox(1, 4, true);
    let epoch = bench.add_until_offered(&fourth);
    bench.acked(1, C1, epoch);
    bench.take();
    bench.completed(&fourth, Err(Refused::Failed(failure(ErrorCode::ProbeSet))));
    let effects = bench.take();
    assert_eq!(withdraws(&effects), 1);
    assert!(verdicts(&effects).is_empty());
    assert!(effects.iter().any(|e| matches!(e, Effect::DropDescriptor(_))));
    assert!(effects.iter().any(|e| matches!(e, Effect::SyncProbes { remove, .. } if remove.len() == 1)));
    assert_eq!(bench.report(1).reason, "probe-set");
}

#[test]
fn only_the_expired_pod_fails_and_the_other_goes_with_the_next_snapshot() {
    let mut bench = Bench::new();
    bench.proxy(C1, &[]);
    bench.apply(pod(1, true));
    bench.apply(pod(2, true));
    let (one, two) = (sandbox(1, 1, true), sandbox(2, 1, true));
    let first = bench.add_until_offered(&one);
    bench.tell(Event::SandboxPending(Box::new(two.clone())));
    bench.programmed(&two, ambient());
    bench.fetched(&two);
    let second = offered(&bench.take());
    bench.pass(Duration::from_secs(4));
    bench.tell(Event::ZdsExpired {
        connection: C1,
        pod: uid(1),
        epoch: first,
        waited: Duration::from_secs(4),
    });
    bench.tell(Event::ZdsClosed(C1));
    bench.withdrawn(first);
    bench.programmed(&one, Desired::None);
    let effects = bench.take();
    let refused = refusal(&effects);
    assert_eq!(refused.code, ErrorCode::ProxyTimeout);
    assert!(refused.cause.contains("uid-1"), "{refused}");
    assert_eq!(refused.stage, "waiting for ztunnel ack");
    bench.proxy(C2, &[(2, second)]);
    assert_eq!(verdicts(&bench.take()), [Verdict::Ambient]);
}

#[test]
fn three_sandboxes_of_one_uid_leave_only_the_last_netns() {
    let mut bench = Bench::new();
    bench.apply(pod(1, true));
    let mut dropped = Vec::new();
    for life in 1..=2 {
        let failing = sandbox(1, life, true);
        let epoch = bench.add_until_offered(&failing);
        bench.pass(Duration::from_secs(9));
        bench.withdrawn(epoch);
        bench.programmed(&failing, Desired::None);
        bench.completed(&failing, Ok(()));
        bench.tell(Event::SandboxGone {
            id: failing.id.clone(),
            pod: uid(1),
        });
        dropped.extend(bench.take().into_iter().filter(|e| matches!(e, Effect::DropDescriptor(_))));
    }
    assert_eq!(dropped.len(), 2);
    let last = sandbox(1, 3, true);
    bench.tell(Event::SandboxPending(Box::new(last.clone())));
    bench.programmed(&last, ambient());
    bench.fetched(&last);
    let effects = bench.take();
    let epoch = offered(&effects);
    assert!(effects.iter().any(|e| matches!(e, Effect::ZdsOffer { held, .. } if *held == last.id)));
    bench.proxy(C1, &[(1, epoch)]);
    assert_eq!(verdicts(&bench.take()), [Verdict::Ambient]);
}

#[test]
fn a_newer_sandbox_ends_the_add_of_the_older_one() {
    let mut bench = Bench::new();
    bench.apply(pod(1, true));
    let first = sandbox(1, 1, true);
    let epoch = bench.add_until_offered(&first);
    let second = sandbox(1, 2, true);
    bench.tell(Event::SandboxPending(Box::new(second.clone())));
    let effects = bench.take();
    assert_eq!(refusal(&effects).code, ErrorCode::TooLate);
    assert_eq!(withdraws(&effects), 1);
    assert!(effects.iter().any(|e| matches!(e, Effect::DropDescriptor(id) if *id == first.id)));
    bench.programmed(&second, ambient());
    bench.fetched(&second);
    assert!(bench.take().is_empty(), "nothing new before ztunnel has forgotten the old netns");
    bench.withdrawn(epoch);
    assert_ne!(offered(&bench.take()), epoch);
}

#[test]
fn a_second_identical_add_changes_nothing_in_the_netns() {
    let (mut bench, first, _) = Bench::enrolled();
    let mut again = first.clone();
    again.id.generation = 2;
    again.programmed = ambient();
    bench.tell(Event::SandboxPending(Box::new(again.clone())));
    let effects = bench.take();
    assert_eq!(verdicts(&effects), [Verdict::Ambient]);
    assert!(programs(&effects).is_empty());
    assert!(!effects.iter().any(|e| matches!(e, Effect::ZdsOffer { .. })));
}

#[test]
fn a_further_interface_of_the_same_sandbox_passes() {
    let (mut bench, first, _) = Bench::enrolled();
    let mut further = first;
    further.id.attachment.ifname = InterfaceName::parse("net1").unwrap();
    further.id.generation = 7;
    bench.tell(Event::SandboxPending(Box::new(further)));
    let effects = bench.take();
    assert_eq!(verdicts(&effects), [Verdict::Pass]);
    assert_eq!(effects.len(), 1);
}

#[test]
fn a_late_verdict_is_taken_back() {
    let mut bench = Bench::new();
    bench.proxy(C1, &[]);
    bench.apply(pod(1, true));
    let sandbox = sandbox(1, 1, true);
    let epoch = bench.add_until_offered(&sandbox);
    bench.acked(1, C1, epoch);
    bench.take();
    bench.completed(&sandbox, Err(Refused::TooLate));
    let effects = bench.take();
    assert_eq!(withdraws(&effects), 1);
    assert!(effects.iter().any(|e| matches!(e, Effect::DropDescriptor(_))));
    assert!(verdicts(&effects).is_empty());
}

#[test]
fn a_deleted_sandbox_is_withdrawn_and_its_descriptor_closed() {
    let (mut bench, sandbox, _) = Bench::enrolled();
    bench.tell(Event::SandboxGone {
        id: sandbox.id.clone(),
        pod: uid(1),
    });
    let effects = bench.take();
    assert_eq!(withdraws(&effects), 1);
    assert!(effects.iter().any(|e| matches!(e, Effect::DropDescriptor(_))));
    assert!(effects.iter().any(|e| matches!(e, Effect::SyncProbes { remove, .. } if remove.len() == 1)));
    assert!(effects.iter().any(|e| matches!(e, Effect::WriteStatus { enrolled: false, .. })));
    assert!(programs(&effects).is_empty());
}

#[test]
fn a_descriptor_that_comes_after_its_sandbox_has_gone_is_closed() {
    let mut bench = Bench::new();
    bench.apply(pod(1, true));
    let sandbox = sandbox(1, 1, true);
    bench.tell(Event::SandboxPending(Box::new(sandbox.clone())));
    bench.tell(Event::SandboxGone {
        id: sandbox.id.clone(),
        pod: uid(1),
    });
    bench.take();
    bench.fetched(&sandbox);
    assert_eq!(bench.take(), [Effect::DropDescriptor(sandbox.id)]);
}

#[test]
fn a_labelled_running_pod_is_enrolled_only_when_a_proxy_is_ready() {
    let mut bench = Bench::new();
    bench.apply(pod(1, false));
    let sandbox = sandbox(1, 1, false);
    bench.tell(Event::SandboxChanged(Box::new(sandbox.clone())));
    bench.fetched(&sandbox);
    bench.take();
    bench.apply(pod(1, true));
    bench.pass(Duration::from_secs(60));
    assert!(programs(&bench.take()).is_empty(), "a running pod is not touched without a proxy");
    let report = bench.report(1);
    assert_eq!((report.standing, report.reason), (Standing::Pending, "no-proxy"));

    bench.proxy(C1, &[]);
    assert_eq!(programs(&bench.take()), [ambient()]);
    bench.programmed(&sandbox, ambient());
    let epoch = offered(&bench.take());
    bench.acked(1, C1, epoch);
    let effects = bench.take();
    assert!(matches!(effects.as_slice(), [Effect::SyncProbes { .. }]), "{effects:?}");
    bench.tell(Event::ProbesSynced(Ok(())));
    assert!(matches!(
        bench.take().as_slice(),
        [Effect::WriteStatus { enrolled: true, .. }]
    ));
    assert_eq!(bench.report(1).standing, Standing::Enrolled);
}

#[test]
fn a_running_pod_whose_enrolment_fails_is_as_before_and_tried_again() {
    let mut bench = Bench::new();
    bench.proxy(C1, &[]);
    bench.apply(pod(1, true));
    let sandbox = sandbox(1, 1, false);
    bench.tell(Event::SandboxChanged(Box::new(sandbox.clone())));
    bench.fetched(&sandbox);
    bench.programmed(&sandbox, ambient());
    let epoch = offered(&bench.take());
    bench.tell(Event::ZdsNacked {
        connection: C1,
        pod: uid(1),
        epoch,
        error: "no".into(),
    });
    assert_eq!(withdraws(&bench.take()), 1);
    bench.withdrawn(epoch);
    bench.pass(Duration::from_secs(7));
    let effects = bench.take();
    assert_eq!(programs(&effects), [Desired::None]);
    bench.programmed(&sandbox, Desired::None);
    assert_eq!(bench.report(1).reason, "proxy-nack");
    bench.pass(Duration::from_secs(7));
    assert_eq!(programs(&bench.take()), [ambient()]);
}

#[test]
fn a_proxy_that_goes_in_the_middle_of_a_running_pods_enrolment_leaves_it_untouched() {
    let mut bench = Bench::new();
    bench.proxy(C1, &[]);
    bench.apply(pod(1, true));
    let sandbox = sandbox(1, 1, false);
    bench.tell(Event::SandboxChanged(Box::new(sandbox.clone())));
    bench.fetched(&sandbox);
    bench.programmed(&sandbox, ambient());
    let epoch = offered(&bench.take());
    bench.tell(Event::ZdsClosed(C1));
    let effects = bench.take();
    assert_eq!(withdraws(&effects), 1);
    assert_eq!(programs(&effects), [Desired::None]);
    bench.withdrawn(epoch);
    bench.programmed(&sandbox, Desired::None);
    assert_eq!(bench.report(1).reason, "no-proxy");
}

#[test]
fn leaving_drains_first_and_then_tells_ztunnel() {
    let (mut bench, sandbox, epoch) = Bench::enrolled();
    bench.apply(pod(1, false));
    let effects = bench.take();
    assert_eq!(programs(&effects), [draining()]);
    assert!(effects.iter().any(|e| matches!(e, Effect::WriteStatus { enrolled: false, .. })));
    assert_eq!(withdraws(&effects), 0);
    assert_eq!(bench.report(1).standing, Standing::Draining);
    bench.programmed(&sandbox, draining());
    let inspect = |effects: &[Effect]| effects.iter().any(|e| matches!(e, Effect::Inspect { .. }));
    assert!(inspect(&bench.take()), "the first look is at once");
    let inspected = |bench: &mut Bench, redirected| {
        bench.tell(Event::Inspected {
            id: sandbox.id.clone(),
            pod: uid(1),
            result: Ok(redirected),
        });
    };
    inspected(&mut bench, 3);
    assert!(bench.take().is_empty());
    bench.pass(Duration::from_millis(260));
    assert!(inspect(&bench.take()));
    inspected(&mut bench, 0);
    let effects = bench.take();
    assert_eq!(withdraws(&effects), 1);
    assert!(effects.iter().any(|e| matches!(e, Effect::SyncProbes { remove, .. } if remove.len() == 1)));
    bench.withdrawn(epoch);
    bench.programmed(&sandbox, Desired::None);
    assert_eq!(bench.report(1).standing, Standing::Out);
}

#[test]
fn a_drain_ends_at_its_timeout() {
    let (mut bench, sandbox, _) = Bench::enrolled();
    bench.apply(pod(1, false));
    bench.programmed(&sandbox, draining());
    bench.take();
    for _ in 0..59 {
        bench.tell(Event::Inspected {
            id: sandbox.id.clone(),
            pod: uid(1),
            result: Ok(1),
        });
        bench.pass(Duration::from_secs(1));
        assert_eq!(withdraws(&bench.take()), 0);
    }
    bench.pass(Duration::from_secs(2));
    assert_eq!(withdraws(&bench.take()), 1);
}

#[test]
fn a_pod_labelled_again_while_it_drains_goes_back_without_ztunnel_noticing() {
    let (mut bench, sandbox, _) = Bench::enrolled();
    bench.apply(pod(1, false));
    bench.programmed(&sandbox, draining());
    bench.take();
    bench.apply(pod(1, true));
    let effects = bench.take();
    assert_eq!(programs(&effects), [ambient()]);
    bench.programmed(&sandbox, ambient());
    let effects = bench.take();
    assert!(!effects.iter().any(|e| matches!(e, Effect::ZdsOffer { .. })));
    assert_eq!(withdraws(&effects), 0);
    assert_eq!(bench.report(1).standing, Standing::Enrolled);
}

#[test]
fn twenty_times_off_and_on_are_twenty_offers_and_twenty_withdrawals() {
    let (mut bench, sandbox, mut epoch) = Bench::enrolled();
    let (mut offers, mut withdrawals) = (0, 0);
    for _ in 0..20 {
        bench.apply(pod(1, false));
        bench.programmed(&sandbox, draining());
        bench.tell(Event::Inspected {
            id: sandbox.id.clone(),
            pod: uid(1),
            result: Ok(0),
        });
        withdrawals += withdraws(&bench.take());
        bench.withdrawn(epoch);
        bench.programmed(&sandbox, Desired::None);
        bench.tell(Event::ProbesSynced(Ok(())));
        bench.apply(pod(1, true));
        bench.programmed(&sandbox, ambient());
        epoch = offered(&bench.take());
        offers += 1;
        bench.acked(1, C1, epoch);
        bench.tell(Event::ProbesSynced(Ok(())));
        assert_eq!(bench.report(1).standing, Standing::Enrolled);
    }
    assert_eq!((offers, withdrawals), (20, 20));
}

#[test]
fn a_deleted_or_ended_pod_is_withdrawn_without_drain_and_keeps_its_rules() {
    for ended in [false, true] {
        let (mut bench, _, epoch) = Bench::enrolled();
        if ended {
            let mut gone = pod(1, true);
            gone.phase = Phase::Succeeded;
            bench.apply(gone);
        } else {
            bench.tell(Event::PodDeleted(Arc::new(pod(1, true))));
        }
        let effects = bench.take();
        assert_eq!(withdraws(&effects), 1);
        assert!(programs(&effects).is_empty());
        bench.withdrawn(epoch);
        assert_eq!(bench.report(1).standing, Standing::Out);
    }
}

#[test]
fn a_pod_that_runs_again_is_enrolled_again() {
    let (mut bench, _, epoch) = Bench::enrolled();
    let mut gone = pod(1, true);
    gone.phase = Phase::Failed;
    bench.apply(gone);
    bench.withdrawn(epoch);
    bench.take();
    let mut back = pod(1, true);
    back.phase = Phase::Running;
    bench.apply(back);
    let again = offered(&bench.take());
    assert_ne!(again, epoch);
}

#[test]
fn adds_go_to_the_newest_ready_connection_and_back_when_it_dies() {
    let (mut bench, _, epoch) = Bench::enrolled();
    bench.tell(Event::ZdsConnected(C2));
    bench.apply(pod(2, true));
    bench.apply(pod(3, true));
    let offer = |bench: &mut Bench, sandbox: &Sandbox| {
        bench.tell(Event::SandboxPending(Box::new(sandbox.clone())));
        bench.programmed(sandbox, ambient());
        bench.fetched(sandbox);
        let effects = bench.take();
        let to = effects.iter().find_map(|e| match e {
            Effect::ZdsOffer { to, .. } => *to,
            _ => None,
        });
        (offered(&effects), to)
    };
    let (two, three) = (sandbox(2, 1, true), sandbox(3, 1, true));
    let (second, to) = offer(&mut bench, &two);
    assert_eq!(to, Some(C1), "a connection without an acknowledged snapshot serves nobody");
    bench.acked(2, C1, second);
    bench.completed(&two, Ok(()));
    bench.tell(Event::ZdsReady {
        connection: C2,
        acked: vec![(uid(1), epoch), (uid(2), second)],
        unix_ms: 9,
    });
    assert!(!bench.take().iter().any(|e| matches!(e, Effect::ZdsOffer { .. })));
    let (third, to) = offer(&mut bench, &three);
    assert_eq!(to, Some(C2));
    bench.acked(3, C2, third);
    bench.completed(&three, Ok(()));
    assert_eq!(bench.report(3).standing, Standing::Enrolled);
    bench.take();
    // The first connection has never heard of pod 3.
    bench.tell(Event::ZdsClosed(C2));
    assert_eq!(offered(&bench.take()), third);
    assert_eq!(bench.report(2).standing, Standing::Enrolled);
}

#[test]
fn a_new_connection_that_refuses_everything_does_not_fail_adds() {
    let mut bench = Bench::new();
    bench.proxy(C1, &[]);
    bench.apply(pod(1, true));
    let sandbox = sandbox(1, 1, true);
    bench.tell(Event::ZdsConnected(C2));
    let epoch = bench.add_until_offered(&sandbox);
    bench.tell(Event::ZdsNacked {
        connection: C2,
        pod: uid(1),
        epoch,
        error: "no".into(),
    });
    assert!(bench.take().is_empty());
    bench.acked(1, C1, epoch);
    assert_eq!(verdicts(&bench.take()), [Verdict::Ambient]);
}

#[test]
fn a_short_loss_of_the_proxy_costs_no_status_write() {
    let (mut bench, _, epoch) = Bench::enrolled();
    bench.tell(Event::ZdsClosed(C1));
    bench.pass(Duration::from_secs(2));
    bench.proxy(C2, &[(1, epoch)]);
    assert!(bench.take().is_empty());
    bench.tell(Event::ZdsClosed(C2));
    bench.pass(Duration::from_secs(6));
    let effects = bench.take();
    assert!(matches!(effects.as_slice(), [Effect::WriteStatus { enrolled: false, .. }]), "{effects:?}");
    assert_eq!(bench.report(1).reason, "no-proxy");
}

#[test]
fn after_a_restart_nothing_is_programmed_and_snapshots_wait_for_every_netns() {
    let mut bench = Bench::cold();
    bench.apply(pod(1, true));
    bench.apply(pod(2, true));
    bench.tell(Event::SourceSynced);
    bench.tell(Event::ExecutorConnected);
    for n in 1..=2 {
        let mut present = sandbox(n, 1, false);
        present.programmed = ambient();
        bench.tell(Event::SandboxPresent(Box::new(present)));
    }
    bench.tell(Event::SandboxesListed);
    let effects = bench.take();
    assert!(programs(&effects).is_empty());
    assert!(!effects.contains(&Effect::ZdsOpen));
    bench.fetched(&sandbox(1, 1, false));
    let first = offered(&bench.take());
    bench.fetched(&sandbox(2, 1, false));
    let effects = bench.take();
    assert!(effects.contains(&Effect::ZdsOpen));
    let second = offered(&effects);
    let prunes = effects
        .iter()
        .any(|e| matches!(e, Effect::SyncProbes { add, prune: true, .. } if add.len() == 2));
    assert!(prunes, "{effects:?}");
    bench.proxy(C1, &[(1, first), (2, second)]);
    bench.tell(Event::ProbesSynced(Ok(())));
    assert_eq!(bench.report(1).standing, Standing::Enrolled);
    assert_eq!(bench.report(2).standing, Standing::Enrolled);
    assert!(programs(&bench.take()).is_empty());
}

#[test]
fn snapshots_wait_only_so_long_for_a_netns_that_cannot_be_reached() {
    let mut bench = Bench::cold();
    bench.apply(pod(1, true));
    bench.tell(Event::SourceSynced);
    bench.tell(Event::ExecutorConnected);
    let mut lost = sandbox(1, 1, false);
    lost.programmed = ambient();
    lost.reachable = false;
    lost.broken = Some(failure(ErrorCode::OpenerNetns));
    bench.tell(Event::SandboxPresent(Box::new(lost)));
    bench.tell(Event::SandboxesListed);
    bench.pass(Duration::from_secs(4));
    assert!(!bench.take().contains(&Effect::ZdsOpen));
    bench.pass(Duration::from_secs(2));
    assert!(bench.take().contains(&Effect::ZdsOpen));
    let report = bench.report(1);
    assert_eq!((report.standing, report.reason), (Standing::Broken, "netns-not-found"));
}

#[test]
fn a_restarted_executor_gets_its_descriptor_back() {
    let (mut bench, enrolled, _) = Bench::enrolled();
    bench.tell(Event::ExecutorDisconnected);
    bench.tell(Event::ExecutorConnected);
    let mut lost = enrolled.clone();
    lost.pending = false;
    lost.programmed = ambient();
    lost.reachable = false;
    bench.tell(Event::SandboxPresent(Box::new(lost)));
    bench.tell(Event::SandboxesListed);
    let effects = bench.take();
    assert!(effects.iter().any(|e| matches!(e, Effect::OfferDescriptor { held, .. } if *held == enrolled.id)));
    assert!(effects.iter().any(|e| matches!(e, Effect::SyncProbes { add, .. } if add.len() == 1)));
    assert!(programs(&effects).is_empty());
    assert_eq!(withdraws(&effects), 0);
}

#[test]
fn a_sandbox_that_a_restarted_executor_does_not_list_is_gone() {
    let (mut bench, _, _) = Bench::enrolled();
    bench.tell(Event::ExecutorDisconnected);
    bench.tell(Event::ExecutorConnected);
    bench.tell(Event::SandboxesListed);
    assert_eq!(withdraws(&bench.take()), 1);
}

#[test]
fn a_running_pod_without_sandbox_is_looked_for_until_it_is_found() {
    let mut bench = Bench::new();
    bench.proxy(C1, &[]);
    let mut running = pod(1, true);
    running.phase = Phase::Running;
    running.ips = vec![IpAddr::from([10, 0, 0, 1])];
    bench.apply(running);
    for _ in 0..5 {
        let effects = bench.take();
        assert!(effects.iter().any(|e| matches!(e, Effect::Adopt { .. })), "{effects:?}");
        bench.tell(Event::Adopted {
            pod: uid(1),
            result: Err(failure(ErrorCode::OpenerNetns)),
        });
        let report = bench.report(1);
        assert_eq!((report.standing, report.reason), (Standing::Broken, "netns-not-found"));
        bench.pass(Duration::from_secs(5));
    }
    bench.tell(Event::Adopted {
        pod: uid(1),
        result: Ok(Box::new(sandbox(1, 1, false))),
    });
    assert_eq!(programs(&bench.take()), [ambient()]);
}

#[test]
fn drift_that_cannot_be_mended_withdraws_the_status_until_it_is() {
    let (mut bench, mut enrolled, _) = Bench::enrolled();
    enrolled.pending = false;
    enrolled.programmed = ambient();
    enrolled.broken = Some(failure(ErrorCode::Drift));
    bench.tell(Event::SandboxChanged(Box::new(enrolled.clone())));
    assert!(matches!(bench.take().as_slice(), [Effect::WriteStatus { enrolled: false, .. }]));
    assert_eq!(bench.report(1).reason, "drift");
    enrolled.broken = None;
    bench.tell(Event::SandboxChanged(Box::new(enrolled)));
    assert!(matches!(bench.take().as_slice(), [Effect::WriteStatus { enrolled: true, .. }]));
}

#[test]
fn a_namespace_label_enrols_and_its_removal_drains() {
    let mut bench = Bench::new();
    bench.proxy(C1, &[]);
    bench.apply(pod(1, false));
    let sandbox = sandbox(1, 1, false);
    bench.tell(Event::SandboxChanged(Box::new(sandbox.clone())));
    bench.fetched(&sandbox);
    bench.take();
    let namespace = |mesh: bool| {
        let mut labels = Labels::new();
        if mesh {
            labels.insert("istio.io/dataplane-mode".into(), "ambient".into());
        }
        Event::NamespaceApplied(Arc::new(source::Namespace {
            name: "default".parse().unwrap(),
            labels,
        }))
    };
    bench.tell(namespace(true));
    assert_eq!(programs(&bench.take()), [ambient()]);
    bench.programmed(&sandbox, ambient());
    let epoch = offered(&bench.take());
    bench.acked(1, C1, epoch);
    bench.tell(Event::ProbesSynced(Ok(())));
    bench.take();
    bench.tell(namespace(false));
    assert_eq!(programs(&bench.take()), [draining()]);
}

#[test]
fn a_pod_is_complained_about_once_in_ten_seconds() {
    let mut bench = Bench::new();
    bench.proxy(C1, &[]);
    bench.apply(pod(1, true));
    let sandbox = sandbox(1, 1, false);
    bench.tell(Event::SandboxChanged(Box::new(sandbox.clone())));
    let mut complaints = 0;
    for _ in 0..200 {
        bench.tell(Event::Programmed {
            id: sandbox.id.clone(),
            pod: uid(1),
            desired: ambient(),
            result: Err(Refused::Failed(failure(ErrorCode::Rules))),
        });
        bench.pass(Duration::from_millis(95));
        let warned = |e: &&Effect| matches!(e, Effect::Log { level: super::event::Level::Warn, .. });
        complaints += bench.effects.iter().filter(warned).count();
        bench.effects.clear();
    }
    assert!((1..=3).contains(&complaints), "{complaints} in 19 s");
}

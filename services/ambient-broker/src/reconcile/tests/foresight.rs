//! What the executor may do without asking.

use super::*;

/// A call: number, what is decided, who has to be asked about.
type Call = (u64, Vec<(PodUid, Desired)>, Vec<PodUid>);

fn pass(n: u32) -> (PodUid, Desired) {
    (uid(n), Desired::None)
}

fn enrol(n: u32) -> (PodUid, Desired) {
    (uid(n), ambient())
}

impl Bench {
    /// The calls made since the last look.
    fn foresees(&mut self) -> Vec<Call> {
        let effects = std::mem::take(&mut self.effects);
        let calls = effects.into_iter().filter_map(|effect| match effect {
            Effect::Foresee { call, decided, ask } => Some((call, decided, ask)),
            _ => None,
        });
        calls.collect()
    }

    fn foreseen(&mut self, call: u64, result: Result<(), Failure>) {
        self.tell(Event::Foreseen { call, result });
    }

    fn label_namespace(&mut self, mesh: bool) {
        let label = ("istio.io/dataplane-mode".to_owned(), "ambient".to_owned());
        self.tell(Event::NamespaceApplied(Arc::new(source::Namespace {
            name: "default".parse().unwrap(),
            labels: mesh.then_some(label).into_iter().collect(),
        })));
    }
}

#[test]
fn pods_without_a_sandbox_are_told_ahead_as_they_are_decided() {
    let mut bench = Bench::new();
    bench.apply(pod(1, false));
    bench.foreseen(1, Ok(()));
    bench.apply(pod(2, true));
    assert_eq!(
        bench.foresees(),
        [(1, vec![pass(1)], vec![]), (2, vec![enrol(2)], vec![])]
    );
}

#[test]
fn a_pod_that_comes_into_the_mesh_no_longer_passes() {
    let mut bench = Bench::new();
    bench.apply(pod(1, false));
    // The first call is still under way: the second must not overtake it.
    bench.label_namespace(true);
    assert_eq!(bench.foresees(), [(1, vec![pass(1)], vec![])]);
    bench.foreseen(1, Ok(()));
    assert_eq!(bench.foresees(), [(2, vec![enrol(1)], vec![])]);
}

#[test]
fn what_the_executor_did_not_take_is_told_again_as_it_is_by_then() {
    let mut bench = Bench::new();
    bench.apply(pod(1, false));
    bench.apply(pod(2, false));
    bench.label_namespace(true);
    bench.foresees();
    bench.foreseen(1, Err(failure(ErrorCode::ExecutorTimeout)));
    bench.pass(Duration::from_secs(10));
    assert_eq!(bench.foresees(), [(2, vec![enrol(1), enrol(2)], vec![])]);
}

#[test]
fn a_new_executor_is_told_anew_and_late_answers_of_the_old_one_mean_nothing() {
    let mut bench = Bench::new();
    bench.apply(pod(1, false));
    bench.foresees();
    bench.tell(Event::ExecutorDisconnected);
    bench.list(&[]);
    assert_eq!(bench.foresees(), [(2, vec![pass(1)], vec![])]);
    bench.foreseen(1, Ok(()));
    bench.label_namespace(true);
    assert_eq!(bench.foresees(), [], "call 2 is still open");
    bench.foreseen(2, Ok(()));
    assert_eq!(bench.foresees(), [(3, vec![enrol(1)], vec![])]);
}

#[test]
fn a_pod_with_a_sandbox_is_not_foreseen_and_one_whose_sandbox_went_is_again() {
    let mut bench = Bench::new();
    bench.apply(pod(1, false));
    bench.foreseen(1, Ok(()));
    bench.foresees();
    let passed = sandbox(1, 1, false);
    bench.changed(&passed);
    assert_eq!(bench.foresees(), [], "the executor has used it up");
    bench.gone(&passed);
    assert_eq!(bench.foresees(), [(2, vec![pass(1)], vec![])]);
}

#[test]
fn what_is_on_its_way_when_a_sandbox_begins_is_taken_back() {
    let mut bench = Bench::new();
    bench.apply(pod(1, false));
    assert_eq!(bench.foresees(), [(1, vec![pass(1)], vec![])]);
    bench.changed(&sandbox(1, 1, false));
    bench.foreseen(1, Ok(()));
    assert_eq!(bench.foresees(), [(2, vec![], vec![uid(1)])]);
}

#[test]
fn a_pod_whose_namespace_is_not_known_is_asked_about() {
    let mut bench = Bench::cold();
    bench.tell(Event::SourceSynced);
    bench.list(&[]);
    bench.apply(pod(1, false));
    assert_eq!(bench.foresees(), []);
}

#[test]
fn an_add_whose_rules_are_programmed_ahead_needs_only_the_verdict() {
    let mut bench = Bench::selected();
    bench.take();
    let mut sandbox = sandbox(1, 1, true);
    sandbox.programmed = ambient();
    bench.pending(&sandbox);
    let effects = bench.take();
    assert!(
        matches!(effects.as_slice(), [Effect::FetchDescriptor { .. }]),
        "{effects:?}"
    );
    bench.fetched(&sandbox);
    let epoch = offered(&bench.take());
    bench.acked(1, C1, epoch);
    assert_eq!(verdicts(&bench.take()), [Verdict::Ambient]);
    bench.completed(&sandbox, Ok(()));
    sandbox.pending = false;
    sandbox.fingerprint = "0123456789abcdef".into();
    bench.changed(&sandbox);
    assert_eq!(bench.report(1).rules_version, "0123456789ab");
}

#[test]
fn an_add_whose_rules_failed_ahead_is_tried_again_and_then_refused_for_that_reason() {
    let mut bench = Bench::selected();
    let mut sandbox = sandbox(1, 1, true);
    sandbox.programmed = ambient();
    bench.pending(&sandbox);
    bench.take();
    sandbox.programmed = Desired::None;
    bench.changed(&sandbox);
    assert_eq!(programs(&bench.take()), [ambient()]);
    bench.not_programmed(&sandbox, Refused::Failed(failure(ErrorCode::Rules)));
    assert_eq!(refusal(&bench.take()).code, ErrorCode::Rules);
}

#[test]
fn a_pod_that_left_the_mesh_while_its_rules_were_made_ahead_passes_without_them() {
    let mut bench = Bench::new();
    bench.apply(pod(1, false));
    bench.take();
    let mut sandbox = sandbox(1, 1, true);
    sandbox.programmed = ambient();
    bench.pending(&sandbox);
    let effects = bench.take();
    assert_eq!(programs(&effects), [Desired::None]);
    assert!(verdicts(&effects).is_empty(), "before the rules are gone");
    bench.programmed(&sandbox, Desired::None);
    assert_eq!(verdicts(&bench.take()), [Verdict::Pass]);
}

#[test]
fn a_pod_that_left_and_came_back_meanwhile_is_not_admitted_before_what_is_on_its_way_is_answered() {
    let mut bench = Bench::selected();
    bench.apply(pod(1, false));
    let mut sandbox = sandbox(1, 1, true);
    sandbox.programmed = ambient();
    bench.pending(&sandbox);
    assert_eq!(programs(&bench.take()), [Desired::None]);
    bench.apply(pod(1, true));
    bench.fetched(&sandbox);
    let epoch = offered(&bench.take());
    bench.acked(1, C1, epoch);
    assert!(verdicts(&bench.take()).is_empty(), "its rules are being removed");
    bench.programmed(&sandbox, Desired::None);
    assert_eq!(programs(&bench.take()), [ambient()]);
    bench.programmed(&sandbox, ambient());
    assert_eq!(verdicts(&bench.take()), [Verdict::Ambient]);
}

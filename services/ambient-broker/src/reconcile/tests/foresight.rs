//! Pods that the executor may let pass without asking.

use super::*;

impl Bench {
    /// The calls made since the last look: number, who passes, who has to be asked about.
    fn foresees(&mut self) -> Vec<(u64, Vec<PodUid>, Vec<PodUid>)> {
        let effects = std::mem::take(&mut self.effects);
        let calls = effects.into_iter().filter_map(|effect| match effect {
            Effect::Foresee { call, pass, ask } => Some((call, pass, ask)),
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
fn a_pod_outside_the_mesh_is_told_ahead_and_one_inside_is_not() {
    let mut bench = Bench::new();
    bench.apply(pod(1, false));
    bench.foreseen(1, Ok(()));
    bench.apply(pod(2, true));
    assert_eq!(bench.foresees(), [(1, vec![uid(1)], vec![])]);
}

#[test]
fn a_pod_that_comes_into_the_mesh_is_asked_about_again() {
    let mut bench = Bench::new();
    bench.apply(pod(1, false));
    // The first call is still under way: the second must not overtake it.
    bench.label_namespace(true);
    assert_eq!(bench.foresees(), [(1, vec![uid(1)], vec![])]);
    bench.foreseen(1, Ok(()));
    assert_eq!(bench.foresees(), [(2, vec![], vec![uid(1)])]);
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
    assert_eq!(bench.foresees(), [(2, vec![], vec![uid(1), uid(2)])]);
}

#[test]
fn a_new_executor_is_told_anew_and_late_answers_of_the_old_one_mean_nothing() {
    let mut bench = Bench::new();
    bench.apply(pod(1, false));
    bench.foresees();
    bench.tell(Event::ExecutorDisconnected);
    bench.tell(Event::ExecutorConnected);
    bench.tell(Event::SandboxesListed);
    assert_eq!(bench.foresees(), [(2, vec![uid(1)], vec![])]);
    bench.foreseen(1, Ok(()));
    bench.label_namespace(true);
    assert_eq!(bench.foresees(), [], "call 2 is still open");
    bench.foreseen(2, Ok(()));
    assert_eq!(bench.foresees(), [(3, vec![], vec![uid(1)])]);
}

#[test]
fn a_pod_with_a_sandbox_is_not_foreseen_and_one_whose_sandbox_went_is_again() {
    let mut bench = Bench::new();
    bench.apply(pod(1, false));
    bench.foreseen(1, Ok(()));
    bench.foresees();
    let passed = sandbox(1, 1, false);
    bench.tell(Event::SandboxChanged(Box::new(passed.clone())));
    bench.foreseen(2, Ok(()));
    assert_eq!(bench.foresees(), [(2, vec![], vec![uid(1)])]);
    bench.tell(Event::SandboxGone {
        id: passed.id,
        pod: uid(1),
    });
    assert_eq!(bench.foresees(), [(3, vec![uid(1)], vec![])]);
}

#[test]
fn a_pod_whose_namespace_is_not_known_is_asked_about() {
    let mut bench = Bench::cold();
    bench.tell(Event::SourceSynced);
    bench.tell(Event::ExecutorConnected);
    bench.tell(Event::SandboxesListed);
    bench.apply(pod(1, false));
    assert_eq!(bench.foresees(), []);
}

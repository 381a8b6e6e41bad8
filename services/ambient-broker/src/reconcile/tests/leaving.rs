//! Pods that leave the mesh: drained by their labels, ended, deleted.

use super::*;

#[test]
fn leaving_drains_first_and_then_tells_ztunnel() {
    let (mut bench, sandbox, epoch) = Bench::enrolled();
    bench.apply(pod(1, false));
    let effects = bench.take();
    assert_eq!(programs(&effects), [draining()]);
    assert!(
        effects
            .iter()
            .any(|e| matches!(e, Effect::WriteStatus { enrolled: false, .. }))
    );
    assert_eq!(withdraws(&effects), 0);
    assert_eq!(bench.report(1).standing, Standing::Draining);
    bench.programmed(&sandbox, draining());
    let inspect = |effects: &[Effect]| effects.iter().any(|e| matches!(e, Effect::Inspect { .. }));
    assert!(inspect(&bench.take()), "the first look is at once");
    bench.inspected(&sandbox, 3);
    assert!(bench.take().is_empty());
    bench.pass(Duration::from_millis(260));
    assert!(inspect(&bench.take()));
    bench.inspected(&sandbox, 0);
    let effects = bench.take();
    assert_eq!(withdraws(&effects), 1);
    assert!(
        effects
            .iter()
            .any(|e| matches!(e, Effect::SyncProbes { remove, .. } if remove.len() == 1))
    );
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
        bench.inspected(&sandbox, 1);
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
        bench.inspected(&sandbox, 0);
        withdrawals += withdraws(&bench.take());
        bench.withdrawn(epoch);
        bench.programmed(&sandbox, Desired::None);
        bench.tell(Event::ProbesSynced(Ok(())));
        bench.apply(pod(1, true));
        epoch = offered(&bench.take());
        offers += 1;
        bench.acked(1, C1, epoch);
        bench.programmed(&sandbox, draining());
        bench.programmed(&sandbox, ambient());
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

fn told_gone(bench: &mut Bench) -> Vec<SandboxId> {
    let effects = bench.take().into_iter();
    let told = effects.filter_map(|effect| match effect {
        Effect::LetGo { id, .. } => Some(id),
        _ => None,
    });
    told.collect()
}

fn let_go(bench: &mut Bench, sandbox: &Sandbox, result: Result<(), String>) {
    bench.tell(Event::LetGo {
        id: sandbox.id.clone(),
        pod: uid(1),
        result,
    });
}

#[test]
fn the_executor_is_told_of_a_deleted_pod_until_the_sandbox_is_gone() {
    let (mut bench, sandbox, _) = Bench::enrolled();
    bench.tell(Event::PodDeleted(Arc::new(pod(1, true))));
    assert!(
        told_gone(&mut bench).is_empty(),
        "the runtime's DEL is on its way"
    );
    bench.pass(Duration::from_millis(1500));
    assert_eq!(told_gone(&mut bench), std::slice::from_ref(&sandbox.id));
    bench.pass(Duration::from_secs(5));
    assert!(told_gone(&mut bench).is_empty(), "the answer is still to come");
    let_go(&mut bench, &sandbox, Err("mounted".into()));
    assert!(told_gone(&mut bench).is_empty());
    bench.pass(Duration::from_millis(1500));
    assert_eq!(told_gone(&mut bench), std::slice::from_ref(&sandbox.id));
    let_go(&mut bench, &sandbox, Ok(()));
    bench.gone(&sandbox);
    bench.pass(Duration::from_secs(5));
    assert!(told_gone(&mut bench).is_empty());
}

#[test]
fn a_pod_that_is_back_is_not_let_go() {
    let (mut bench, sandbox, _) = Bench::enrolled();
    bench.tell(Event::PodDeleted(Arc::new(pod(1, true))));
    let_go(&mut bench, &sandbox, Err("mounted".into()));
    bench.take();
    bench.apply(pod(1, true));
    bench.pass(Duration::from_secs(5));
    assert!(told_gone(&mut bench).is_empty());
}

#[test]
fn what_the_source_has_not_told_yet_is_not_gone() {
    let mut bench = Bench::cold();
    let sandbox = sandbox(1, 1, false);
    bench.list(std::slice::from_ref(&sandbox));
    bench.pass(Duration::from_secs(5));
    assert!(told_gone(&mut bench).is_empty());
    bench.tell(Event::SourceSynced);
    bench.pass(Duration::from_millis(1500));
    assert_eq!(told_gone(&mut bench), [sandbox.id]);
}

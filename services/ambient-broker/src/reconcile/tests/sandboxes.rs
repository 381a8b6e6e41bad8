//! Sandboxes that come and go, and several of one pod.

use super::*;

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
        bench.gone(&failing);
        dropped.extend(
            bench
                .take()
                .into_iter()
                .filter(|e| matches!(e, Effect::DropDescriptor(_))),
        );
    }
    assert_eq!(dropped.len(), 2);
    let last = sandbox(1, 3, true);
    bench.pending(&last);
    bench.programmed(&last, ambient());
    bench.fetched(&last);
    let effects = bench.take();
    let epoch = offered(&effects);
    assert!(
        effects
            .iter()
            .any(|e| matches!(e, Effect::ZdsOffer { held, .. } if *held == last.id))
    );
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
    bench.pending(&second);
    let effects = bench.take();
    assert_eq!(refusal(&effects).code, ErrorCode::TooLate);
    assert_eq!(withdraws(&effects), 1);
    assert!(
        effects
            .iter()
            .any(|e| matches!(e, Effect::DropDescriptor(id) if *id == first.id))
    );
    bench.programmed(&second, ambient());
    bench.fetched(&second);
    assert!(
        bench.take().is_empty(),
        "nothing new before ztunnel has forgotten the old netns"
    );
    bench.withdrawn(epoch);
    assert_ne!(offered(&bench.take()), epoch);
}

#[test]
fn a_second_identical_add_changes_nothing_in_the_netns() {
    let (mut bench, first, _) = Bench::enrolled();
    let mut again = first.clone();
    again.id.generation = 2;
    again.programmed = ambient();
    bench.pending(&again);
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
    bench.pending(&further);
    let effects = bench.take();
    assert_eq!(verdicts(&effects), [Verdict::Pass]);
    assert_eq!(effects.len(), 1);
}

#[test]
fn a_deleted_sandbox_is_withdrawn_and_its_descriptor_closed() {
    let (mut bench, sandbox, _) = Bench::enrolled();
    bench.gone(&sandbox);
    let effects = bench.take();
    assert_eq!(withdraws(&effects), 1);
    assert!(effects.iter().any(|e| matches!(e, Effect::DropDescriptor(_))));
    assert!(
        effects
            .iter()
            .any(|e| matches!(e, Effect::SyncProbes { remove, .. } if remove.len() == 1))
    );
    assert!(
        effects
            .iter()
            .any(|e| matches!(e, Effect::WriteStatus { enrolled: false, .. }))
    );
    assert!(programs(&effects).is_empty());
}

#[test]
fn a_descriptor_that_comes_after_its_sandbox_has_gone_is_closed() {
    let mut bench = Bench::new();
    bench.apply(pod(1, true));
    let sandbox = sandbox(1, 1, true);
    bench.pending(&sandbox);
    bench.gone(&sandbox);
    bench.take();
    bench.fetched(&sandbox);
    assert_eq!(bench.take(), [Effect::DropDescriptor(sandbox.id)]);
}

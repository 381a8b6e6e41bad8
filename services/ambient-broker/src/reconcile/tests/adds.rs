//! Pending ADDs.

use super::*;

#[test]
fn a_mesh_pod_gets_rules_while_ztunnel_is_told_and_then_the_verdict() {
    let mut bench = Bench::selected();
    let sandbox = sandbox(1, 1, true);
    bench.take();
    bench.pending(&sandbox);
    let effects = bench.take();
    assert!(matches!(
        effects.as_slice(),
        [Effect::FetchDescriptor { .. }, Effect::Program { .. }]
    ));
    bench.fetched(&sandbox);
    let effects = bench.take();
    let epoch = offered(&effects);
    assert!(matches!(&effects[0], Effect::ZdsOffer { to: Some(C1), .. }));
    bench.acked(1, C1, epoch);
    assert!(bench.take().is_empty(), "no verdict before the rules are there");
    bench.programmed(&sandbox, ambient());
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
    assert_eq!(report.rules_version, "0123456789ab");
}

#[test]
fn a_pod_whose_rules_fail_is_taken_back_from_ztunnel_before_the_runtime_hears() {
    let mut bench = Bench::selected();
    let sandbox = sandbox(1, 1, true);
    bench.pending(&sandbox);
    bench.fetched(&sandbox);
    let epoch = offered(&bench.take());
    bench.acked(1, C1, epoch);
    bench.not_programmed(&sandbox, Refused::Failed(failure(ErrorCode::Rules)));
    let effects = bench.take();
    assert!(
        effects
            .iter()
            .any(|effect| matches!(effect, Effect::ZdsWithdraw { .. })),
        "{effects:?}"
    );
    assert!(verdicts(&effects).is_empty(), "refused while ztunnel has it");
    bench.withdrawn(epoch);
    assert_eq!(refusal(&bench.take()).code, ErrorCode::Rules);
}

#[test]
fn a_pod_that_is_not_in_the_mesh_passes_with_this_one_call() {
    let mut bench = Bench::new();
    bench.apply(pod(1, false));
    bench.pending(&sandbox(1, 1, true));
    let effects = bench.take();
    assert!(
        matches!(
            effects.as_slice(),
            [
                Effect::Complete {
                    verdict: Verdict::Pass,
                    ..
                },
                Effect::FetchDescriptor { .. }
            ]
        ),
        "{effects:?}"
    );
}

#[test]
fn host_network_and_ended_pods_are_never_enrolled() {
    let mut bench = Bench::new();
    bench.proxy(C1, &[]);
    let mut host = pod(1, true);
    host.host_network = true;
    bench.apply(host);
    bench.changed(&sandbox(1, 1, false));
    let mut ended = pod(2, true);
    ended.phase = Phase::Succeeded;
    bench.apply(ended);
    bench.changed(&sandbox(2, 1, false));
    let effects = bench.take();
    assert!(programs(&effects).is_empty(), "{effects:?}");
}

#[test]
fn an_add_of_an_unknown_pod_asks_the_source_and_is_refused_in_the_end() {
    let mut bench = Bench::new();
    let sandbox = sandbox(1, 1, true);
    bench.pending(&sandbox);
    let mut asked = 0;
    for _ in 0..100 {
        let effects = bench.take();
        if effects.iter().any(|effect| matches!(effect, Effect::Lookup(_))) {
            asked += 1;
            bench.looked_up(&sandbox, Ok(source::Lookup::default()));
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
    bench.pending(&sandbox(1, 1, true));
    assert!(bench.take().iter().any(|e| matches!(e, Effect::Lookup(_))));
    bench.apply(pod(1, false));
    assert_eq!(verdicts(&bench.take()), [Verdict::Pass]);
}

#[test]
fn a_lookup_that_finds_another_uid_does_not_count() {
    let mut bench = Bench::new();
    let sandbox = sandbox(1, 1, true);
    bench.pending(&sandbox);
    let mut older = pod(1, false);
    older.id.uid = uid(99);
    bench.looked_up(
        &sandbox,
        Ok(source::Lookup {
            pod: Some(Arc::new(older)),
            ..source::Lookup::default()
        }),
    );
    assert!(verdicts(&bench.take()).is_empty());
    let mut effects = Vec::new();
    while verdicts(&effects).is_empty() {
        bench.pass(Duration::from_millis(10));
        effects = bench.take();
        if effects.iter().any(|effect| matches!(effect, Effect::Lookup(_))) {
            bench.looked_up(&sandbox, Err("directory gone".into()));
        }
    }
    let refused = refusal(&effects);
    assert_eq!(refused.code, ErrorCode::PodUnknown);
    assert!(refused.cause.contains("directory gone"), "{refused}");
}

#[test]
fn an_add_before_the_source_has_told_anything_is_refused() {
    let mut bench = Bench::cold();
    bench.list(&[]);
    bench.pending(&sandbox(1, 1, true));
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
    let mut bench = Bench::selected();
    let sandbox = sandbox(1, 1, true);
    bench.pending(&sandbox);
    bench.take();
    bench.not_programmed(&sandbox, Refused::Failed(failure(ErrorCode::Rules)));
    assert_eq!(refusal(&bench.take()).code, ErrorCode::Rules);
    bench.completed(&sandbox, Ok(()));

    // Descriptor.
    let second = super::sandbox(1, 2, true);
    bench.pending(&second);
    bench.programmed(&second, ambient());
    bench.take();
    bench.not_fetched(&second, ErrorCode::SandboxGone);
    assert_eq!(programs(&bench.take()), [Desired::None]);
    bench.programmed(&second, Desired::None);
    assert_eq!(refusal(&bench.take()).code, ErrorCode::SandboxGone);
    bench.completed(&second, Ok(()));

    // ztunnel refuses: it is told to forget the pod.
    let third = super::sandbox(1, 3, true);
    let epoch = bench.add_until_offered(&third);
    bench.nacked(1, C1, epoch, "failed to start proxy : bind [::1]:15053");
    let effects = bench.take();
    assert_eq!(withdraws(&effects), 1);
    assert_eq!(programs(&effects), [Desired::None]);
    bench.withdrawn(epoch);
    bench.programmed(&third, Desired::None);
    let refused = refusal(&bench.take());
    assert_eq!(refused.code, ErrorCode::ProxyNack);
    assert!(refused.cause.contains("disable_ipv6"), "{refused}");
    bench.completed(&third, Ok(()));
    assert!(
        bench
            .take()
            .iter()
            .any(|e| matches!(e, Effect::DropDescriptor(id) if *id == third.id))
    );

    // The executor fails at the last step (probe set): it has ended the ADD, we take back the rest.
    let fourth = super::sandbox(1, 4, true);
    let epoch = bench.add_until_offered(&fourth);
    bench.acked(1, C1, epoch);
    bench.take();
    bench.completed(&fourth, Err(Refused::Failed(failure(ErrorCode::ProbeSet))));
    let effects = bench.take();
    assert_eq!(withdraws(&effects), 1);
    assert!(verdicts(&effects).is_empty());
    assert!(effects.iter().any(|e| matches!(e, Effect::DropDescriptor(_))));
    assert!(
        effects
            .iter()
            .any(|e| matches!(e, Effect::SyncProbes { remove, .. } if remove.len() == 1))
    );
    assert_eq!(bench.report(1).reason, "probe-set");
}

#[test]
fn only_the_expired_pod_fails_and_the_other_goes_with_the_next_snapshot() {
    let mut bench = Bench::selected();
    bench.apply(pod(2, true));
    let (one, two) = (sandbox(1, 1, true), sandbox(2, 1, true));
    let first = bench.add_until_offered(&one);
    bench.pending(&two);
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
fn a_late_verdict_is_taken_back() {
    let mut bench = Bench::selected();
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
fn why_an_add_was_refused_is_told_until_the_next_one() {
    for runtime_is_faster in [false, true] {
        let mut bench = Bench::selected();
        let first = super::sandbox(1, 1, true);
        let epoch = bench.add_until_offered(&first);
        bench.nacked(1, C1, epoch, "no");
        bench.withdrawn(epoch);
        bench.programmed(&first, Desired::None);
        refusal(&bench.take());
        if runtime_is_faster {
            bench.gone(&first);
            bench.completed(&first, Ok(()));
        } else {
            bench.completed(&first, Ok(()));
            bench.gone(&first);
        }
        let report = bench.report(1);
        let told = report.last_error.as_ref().map(|failure| failure.code);
        assert_eq!(
            told,
            Some(ErrorCode::ProxyNack),
            "runtime faster: {runtime_is_faster}"
        );
        assert_eq!((report.standing, report.reason), (Standing::Broken, "proxy-nack"));

        bench.pending(&super::sandbox(1, 2, true));
        assert_eq!(bench.report(1).last_error, None);
    }
}

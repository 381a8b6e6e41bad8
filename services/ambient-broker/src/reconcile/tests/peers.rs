//! ztunnel connections and executor lives that come and go.

use super::*;

/// The sandbox of a running pod with the rules of an earlier life in it.
fn redirected(n: u32) -> Sandbox {
    Sandbox {
        programmed: ambient(),
        ..sandbox(n, 1, false)
    }
}

#[test]
fn adds_go_to_the_newest_ready_connection_and_back_when_it_dies() {
    let (mut bench, _, epoch) = Bench::enrolled();
    bench.tell(Event::ZdsConnected(C2));
    bench.apply(pod(2, true));
    bench.apply(pod(3, true));
    let offer = |bench: &mut Bench, sandbox: &Sandbox| {
        bench.pending(sandbox);
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
    assert_eq!(
        to,
        Some(C1),
        "a connection without an acknowledged snapshot serves nobody"
    );
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
    let mut bench = Bench::selected();
    let sandbox = sandbox(1, 1, true);
    bench.tell(Event::ZdsConnected(C2));
    let epoch = bench.add_until_offered(&sandbox);
    bench.nacked(1, C2, epoch, "no");
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
    assert!(
        matches!(effects.as_slice(), [Effect::WriteStatus { enrolled: false, .. }]),
        "{effects:?}"
    );
    assert_eq!(bench.report(1).reason, "no-proxy");
}

#[test]
fn after_a_restart_nothing_is_programmed_and_snapshots_wait_for_every_netns() {
    let mut bench = Bench::cold();
    bench.apply(pod(1, true));
    bench.apply(pod(2, true));
    bench.tell(Event::SourceSynced);
    bench.list(&[redirected(1), redirected(2)]);
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
    bench.list(&[Sandbox {
        reachable: false,
        broken: Some(failure(ErrorCode::OpenerNetns)),
        attempts: 7,
        ..redirected(1)
    }]);
    bench.pass(Duration::from_secs(4));
    assert!(!bench.take().contains(&Effect::ZdsOpen));
    bench.pass(Duration::from_secs(2));
    assert!(bench.take().contains(&Effect::ZdsOpen));
    let report = bench.report(1);
    assert_eq!(
        (report.standing, report.reason),
        (Standing::Broken, "netns-not-found")
    );
    assert_eq!(report.retries, 7, "the executor's looks count");
}

#[test]
fn a_restarted_executor_gets_its_descriptor_back() {
    let (mut bench, enrolled, _) = Bench::enrolled();
    bench.tell(Event::ExecutorDisconnected);
    bench.list(&[Sandbox {
        pending: false,
        programmed: ambient(),
        reachable: false,
        ..enrolled.clone()
    }]);
    let effects = bench.take();
    assert!(
        effects
            .iter()
            .any(|e| matches!(e, Effect::OfferDescriptor { held, .. } if *held == enrolled.id))
    );
    assert!(
        effects
            .iter()
            .any(|e| matches!(e, Effect::SyncProbes { add, .. } if add.len() == 1))
    );
    assert!(programs(&effects).is_empty());
    assert_eq!(withdraws(&effects), 0);
}

#[test]
fn a_sandbox_that_a_restarted_executor_does_not_list_is_gone() {
    let (mut bench, _, _) = Bench::enrolled();
    bench.tell(Event::ExecutorDisconnected);
    bench.list(&[]);
    assert_eq!(withdraws(&bench.take()), 1);
}

/// The executor has restarted and cannot reach any netns yet.
fn restart_unreachable(bench: &mut Bench, enrolled: &Sandbox) -> Sandbox {
    bench.tell(Event::ExecutorDisconnected);
    let lost = Sandbox {
        pending: false,
        programmed: ambient(),
        reachable: false,
        broken: Some(failure(ErrorCode::OpenerNetns)),
        ..enrolled.clone()
    };
    bench.list(std::slice::from_ref(&lost));
    lost
}

#[test]
fn an_executor_restart_breaks_no_enrolled_pod_that_is_reachable_again_soon() {
    let (mut bench, enrolled, _) = Bench::enrolled();
    let lost = restart_unreachable(&mut bench, &enrolled);
    assert_eq!(bench.report(1).standing, Standing::Enrolled);
    bench.pass(Duration::from_secs(3));
    let status = |effects: &[Effect]| effects.iter().any(|e| matches!(e, Effect::WriteStatus { .. }));
    assert!(!status(&bench.take()));
    bench.changed(&Sandbox {
        reachable: true,
        broken: None,
        ..lost
    });
    bench.pass(Duration::from_secs(10));
    assert!(!status(&bench.take()));
    assert_eq!(bench.report(1).standing, Standing::Enrolled);
}

#[test]
fn a_netns_that_stays_unreachable_breaks_its_pod_in_the_end() {
    let (mut bench, enrolled, _) = Bench::enrolled();
    restart_unreachable(&mut bench, &enrolled);
    bench.pass(Duration::from_secs(6));
    let report = bench.report(1);
    assert_eq!(
        (report.standing, report.reason),
        (Standing::Broken, "netns-not-found")
    );
    let written = |e: &Effect| matches!(e, Effect::WriteStatus { enrolled: false, .. });
    assert!(bench.take().iter().any(written));
}

fn prunes(effects: &[Effect]) -> usize {
    let prune = |e: &&Effect| matches!(e, Effect::SyncProbes { prune: true, .. });
    effects.iter().filter(prune).count()
}

#[test]
fn a_prune_that_failed_is_made_again_with_a_new_list_and_nobody_notices() {
    let mut bench = Bench::cold();
    bench.apply(pod(1, true));
    bench.tell(Event::SourceSynced);
    let present = redirected(1);
    bench.list(std::slice::from_ref(&present));
    bench.fetched(&present);
    let effects = bench.take();
    assert_eq!(prunes(&effects), 1);
    bench.proxy(C1, &[(1, offered(&effects))]);
    bench.tell(Event::ProbesSynced(Err(failure(ErrorCode::HostUnreachable))));
    bench.pass(Duration::from_millis(10));
    bench.tell(Event::ProbesSynced(Ok(())));
    assert_eq!(bench.report(1).standing, Standing::Enrolled);
    bench.effects.clear();
    bench.pass(Duration::from_secs(1));
    let published = bench.effects.iter().any(|e| matches!(e, Effect::Publish { .. }));
    assert!(!published, "the pod's report changed");
    let effects = bench.take();
    assert!(
        effects
            .iter()
            .any(|e| matches!(e, Effect::SyncProbes { add, prune: true, .. } if add.len() == 1)),
        "{effects:?}"
    );
    bench.tell(Event::ProbesSynced(Ok(())));
    bench.pass(Duration::from_mins(1));
    assert_eq!(prunes(&bench.take()), 0, "pruned twice");
}

#[test]
fn a_prune_waits_until_it_is_certain_what_belongs_into_the_set() {
    let mut bench = Bench::cold();
    let mut running = pod(1, true);
    running.phase = Phase::Running;
    running.ips = vec![IpAddr::from([10, 0, 0, 1])];
    bench.apply(running);
    bench.tell(Event::SourceSynced);
    bench.list(&[]);
    bench.pass(Duration::from_secs(6));
    let effects = bench.take();
    assert!(effects.contains(&Effect::ZdsOpen));
    assert_eq!(prunes(&effects), 0);
    bench.adopted(Ok(sandbox(1, 1, false)));
    bench.pass(Duration::from_secs(6));
    assert_eq!(prunes(&bench.take()), 1);
}

#[test]
fn one_refused_probe_address_does_not_break_pods_that_have_theirs() {
    let (mut bench, enrolled, _) = Bench::enrolled();
    bench.tell(Event::ExecutorDisconnected);
    bench.list(&[Sandbox {
        pending: false,
        programmed: ambient(),
        ..enrolled
    }]);
    bench.tell(Event::ProbesSynced(Err(failure(ErrorCode::InvalidInput))));
    assert_eq!(bench.report(1).standing, Standing::Enrolled);
}

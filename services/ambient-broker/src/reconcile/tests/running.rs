//! Pods that run already: enrolled by their labels, found without an ADD, damaged, enrolled again.

use super::*;

#[test]
fn a_labelled_running_pod_is_enrolled_only_when_a_proxy_is_ready() {
    let mut bench = Bench::new();
    bench.apply(pod(1, false));
    let sandbox = sandbox(1, 1, false);
    bench.changed(&sandbox);
    bench.fetched(&sandbox);
    bench.take();
    bench.apply(source::Pod {
        phase: Phase::Running,
        ..pod(1, true)
    });
    bench.pass(Duration::from_mins(1));
    assert!(
        programs(&bench.take()).is_empty(),
        "a running pod is not touched without a proxy"
    );
    let report = bench.report(1);
    assert_eq!((report.standing, report.reason), (Standing::Pending, "no-proxy"));
    assert!(report.unprotected);

    bench.proxy(C1, &[]);
    let effects = bench.take();
    let epoch = offered(&effects);
    assert!(
        programs(&effects).is_empty(),
        "redirected to where nobody listens yet"
    );
    bench.acked(1, C1, epoch);
    let effects = bench.take();
    assert_eq!(programs(&effects), [ambient()]);
    assert!(
        effects.iter().any(|e| matches!(e, Effect::SyncProbes { .. })),
        "probes are captured as soon as the redirections are there: {effects:?}"
    );
    bench.tell(Event::ProbesSynced(Ok(())));
    assert!(bench.take().is_empty(), "enrolled without redirections");
    bench.programmed(&sandbox, ambient());
    assert!(matches!(
        bench.take().as_slice(),
        [Effect::WriteStatus { enrolled: true, .. }]
    ));
    assert_eq!(bench.report(1).standing, Standing::Enrolled);
    assert!(!bench.report(1).unprotected);
}

#[test]
fn a_running_pod_whose_enrolment_fails_is_as_before_and_tried_again() {
    let (mut bench, _) = Bench::running();
    let epoch = offered(&bench.take());
    bench.nacked(1, C1, epoch, "no");
    let effects = bench.take();
    assert_eq!(withdraws(&effects), 1);
    assert!(programs(&effects).is_empty(), "nothing was programmed");
    bench.withdrawn(epoch);
    bench.pass(Duration::from_secs(7));
    assert_eq!(bench.report(1).reason, "proxy-nack");
    let effects = bench.take();
    offered(&effects);
    assert!(programs(&effects).is_empty());
}

#[test]
fn a_proxy_that_goes_in_the_middle_of_a_running_pods_enrolment_leaves_it_untouched() {
    let (mut bench, sandbox) = Bench::running();
    let epoch = offered(&bench.take());
    bench.acked(1, C1, epoch);
    bench.programmed(&sandbox, ambient());
    bench.take();
    bench.tell(Event::ZdsClosed(C1));
    let effects = bench.take();
    assert_eq!(withdraws(&effects), 1);
    assert_eq!(programs(&effects), [Desired::None]);
    bench.withdrawn(epoch);
    bench.programmed(&sandbox, Desired::None);
    assert_eq!(bench.report(1).reason, "no-proxy");
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
fn a_running_pod_without_sandbox_is_looked_for_until_it_is_found() {
    let mut bench = Bench::new();
    bench.proxy(C1, &[]);
    let mut running = pod(1, true);
    running.phase = Phase::Running;
    running.ips = vec![IpAddr::from([10, 0, 0, 1])];
    bench.apply(running);
    for _ in 0..5 {
        let effects = bench.take();
        assert!(
            effects.iter().any(|e| matches!(e, Effect::Adopt { .. })),
            "{effects:?}"
        );
        bench.adopted(Err(failure(ErrorCode::OpenerNetns)));
        let report = bench.report(1);
        assert_eq!(
            (report.standing, report.reason),
            (Standing::Broken, "netns-not-found")
        );
        bench.pass(Duration::from_secs(5));
    }
    bench.adopted(Ok(sandbox(1, 1, false)));
    bench.fetched(&sandbox(1, 1, false));
    offered(&bench.take());
}

#[test]
fn a_pod_that_is_being_deleted_is_not_looked_for_once_the_runtime_has_ended_its_sandbox() {
    let (mut bench, sandbox, epoch) = Bench::enrolled();
    let mut running = pod(1, true);
    running.phase = Phase::Running;
    running.ips = vec![IpAddr::from([10, 0, 0, 1])];
    running.deletion_timestamp = Some("2026-01-01T00:00:00Z".to_owned());
    bench.apply(running.clone());
    bench.take();
    bench.gone(&sandbox);
    bench.withdrawn(epoch);
    bench.pass(Duration::from_secs(4));
    let effects = bench.take();
    let idle = |effect: &Effect| !matches!(effect, Effect::Adopt { .. } | Effect::WriteStatus { .. });
    assert!(effects.iter().all(idle), "{effects:?}");
    let report = bench.report(1);
    assert_eq!(
        (report.standing, report.reason),
        (Standing::Pending, "no-sandbox")
    );

    running.deletion_timestamp = None;
    bench.apply(running);
    let effects = bench.take();
    assert!(
        effects.iter().any(|e| matches!(e, Effect::Adopt { .. })),
        "another pod's sandbox may have died: {effects:?}"
    );
}

#[test]
fn drift_that_cannot_be_mended_withdraws_the_status_until_it_is() {
    let (mut bench, mut enrolled, _) = Bench::enrolled();
    enrolled.pending = false;
    enrolled.programmed = ambient();
    enrolled.broken = Some(failure(ErrorCode::Drift));
    bench.changed(&enrolled);
    assert!(matches!(
        bench.take().as_slice(),
        [Effect::WriteStatus { enrolled: false, .. }]
    ));
    assert_eq!(bench.report(1).reason, "drift");
    enrolled.broken = None;
    bench.changed(&enrolled);
    assert!(matches!(
        bench.take().as_slice(),
        [Effect::WriteStatus { enrolled: true, .. }]
    ));
}

#[test]
fn a_namespace_label_enrols_and_its_removal_drains() {
    let mut bench = Bench::new();
    bench.proxy(C1, &[]);
    bench.apply(pod(1, false));
    let sandbox = sandbox(1, 1, false);
    bench.changed(&sandbox);
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
    let epoch = offered(&bench.take());
    bench.acked(1, C1, epoch);
    assert_eq!(programs(&bench.take()), [ambient()]);
    bench.programmed(&sandbox, ambient());
    bench.tell(Event::ProbesSynced(Ok(())));
    bench.take();
    bench.tell(namespace(false));
    assert_eq!(programs(&bench.take()), [draining()]);
}

#[test]
fn a_pod_is_complained_about_once_in_ten_seconds() {
    let (mut bench, sandbox) = Bench::running();
    let epoch = offered(&bench.take());
    bench.acked(1, C1, epoch);
    let mut complaints = 0;
    for _ in 0..200 {
        bench.not_programmed(&sandbox, Refused::Failed(failure(ErrorCode::Rules)));
        bench.pass(Duration::from_millis(95));
        let warned = |e: &&Effect| {
            matches!(
                e,
                Effect::Log {
                    level: Level::Warn,
                    ..
                }
            )
        };
        complaints += bench.effects.iter().filter(warned).count();
        bench.effects.clear();
    }
    assert!((1..=3).contains(&complaints), "{complaints} in 19 s");
}

#[test]
fn an_add_among_hundreds_of_pods_concerns_only_its_own() {
    let mut bench = Bench::new();
    bench.proxy(C1, &[]);
    let numbered = |n: u8| {
        let mut of_n = sandbox(u32::from(n), 1, true);
        of_n.addresses = vec![IpAddr::from([10, 0, 1, n])];
        of_n
    };
    for n in 1..=250 {
        bench.apply(pod(n.into(), true));
        let sandbox = numbered(n);
        let epoch = bench.add_until_offered(&sandbox);
        bench.acked(n.into(), C1, epoch);
        bench.completed(&sandbox, Ok(()));
    }
    bench.effects.clear();
    bench.apply(pod(251, true));
    let last = numbered(251);
    let epoch = bench.add_until_offered(&last);
    bench.acked(251, C1, epoch);
    bench.completed(&last, Ok(()));
    let foreign = bench.effects.iter().filter(|e| match e {
        Effect::Publish { pod, .. } => pod.uid != uid(251),
        _ => false,
    });
    assert_eq!(foreign.count(), 0);
    assert_eq!(bench.state.wake(), None, "something wakes the loop without cause");
}

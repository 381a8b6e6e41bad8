//! Namespaces that nobody can tell of: a manifest was never readable, or is just being written.

use super::*;

/// Source synced and executor up, but no namespace told, and a file of the source unreadable.
fn undetermined(pod: source::Pod, sandboxes: &[Sandbox]) -> Bench {
    let mut bench = Bench::cold();
    bench.tell(Event::Undetermined(true));
    bench.apply(pod);
    bench.tell(Event::SourceSynced);
    bench.list(sandboxes);
    bench
}

/// Pod 1, and nobody can tell of its namespace.
fn without_namespace() -> source::Lookup {
    source::Lookup {
        pod: Some(Arc::new(pod(1, false))),
        namespace: None,
        undetermined: true,
    }
}

fn mesh_namespace() -> Event {
    Event::NamespaceApplied(Arc::new(source::Namespace {
        name: "default".parse().unwrap(),
        labels: Labels::from([("istio.io/dataplane-mode".into(), "ambient".into())]),
    }))
}

#[test]
fn a_pod_that_was_in_the_mesh_before_a_restart_stays_in_it() {
    let redirected = Sandbox {
        programmed: ambient(),
        ..sandbox(1, 1, false)
    };
    let mut bench = undetermined(pod(1, false), std::slice::from_ref(&redirected));
    bench.fetched(&redirected);
    let effects = bench.take();
    assert!(programs(&effects).is_empty(), "{effects:?}");
    let epoch = offered(&effects);
    assert!(effects.contains(&Effect::ZdsOpen));
    bench.proxy(C1, &[(1, epoch)]);
    bench.tell(Event::ProbesSynced(Ok(())));
    let report = bench.report(1);
    assert_eq!(report.standing, Standing::Enrolled);
    assert!(report.verdict.contains("namespace default"), "{}", report.verdict);
    bench.tell(mesh_namespace());
    bench.tell(Event::Undetermined(false));
    let effects = bench.take();
    assert!(
        programs(&effects).is_empty() && withdraws(&effects) == 0,
        "{effects:?}"
    );
}

#[test]
fn a_running_pod_that_was_out_stays_out_and_says_why() {
    let plain = sandbox(1, 1, false);
    let mut bench = undetermined(pod(1, false), std::slice::from_ref(&plain));
    bench.fetched(&plain);
    bench.proxy(C1, &[]);
    assert!(programs(&bench.take()).is_empty());
    let report = bench.report(1);
    assert_eq!(
        (report.standing, report.reason),
        (Standing::Pending, "namespace-undetermined")
    );
    bench.tell(mesh_namespace());
    offered(&bench.take());
}

#[test]
fn an_add_is_asked_for_again_and_then_refused_but_never_passed() {
    let mut bench = undetermined(pod(1, false), &[]);
    let adding = sandbox(1, 1, true);
    bench.pending(&adding);
    let mut asked = 0;
    for _ in 0..100 {
        let effects = bench.take();
        if effects.iter().any(|e| matches!(e, Effect::Lookup(_))) {
            asked += 1;
            bench.looked_up(&adding, Ok(without_namespace()));
        }
        if !verdicts(&effects).is_empty() {
            let refused = refusal(&effects);
            assert_eq!(refused.code, ErrorCode::PodUnknown);
            assert!(refused.cause.contains("namespace default"), "{refused}");
            assert!(asked >= 3, "asked {asked} times");
            return;
        }
        bench.pass(Duration::from_millis(20));
    }
    panic!("never refused");
}

#[test]
fn a_lookup_during_a_write_does_not_pass_the_pod() {
    let mut bench = Bench::cold();
    bench.apply(pod(1, false));
    bench.tell(Event::SourceSynced);
    bench.list(&[]);
    let adding = sandbox(1, 1, true);
    bench.pending(&adding);
    bench.take();
    bench.looked_up(&adding, Ok(without_namespace()));
    assert!(verdicts(&bench.take()).is_empty());
    bench.tell(mesh_namespace());
    assert_eq!(programs(&bench.take()), [ambient()]);
}

#[test]
fn a_pod_whose_own_labels_decide_needs_no_namespace() {
    let mut bench = undetermined(pod(1, true), &[]);
    bench.pending(&sandbox(1, 1, true));
    let effects = bench.take();
    assert_eq!(programs(&effects), [ambient()]);
    let mut out = pod(2, false);
    out.labels.insert("istio.io/dataplane-mode".into(), "none".into());
    bench.apply(out);
    bench.pending(&sandbox(2, 1, true));
    assert_eq!(verdicts(&bench.take()), [Verdict::Pass]);
}

#[test]
fn a_namespace_that_the_source_does_not_have_is_asked_for_once() {
    let mut bench = Bench::cold();
    bench.tell(Event::SourceSynced);
    bench.list(&[]);
    let looks = |effects: &[Effect]| effects.iter().filter(|e| matches!(e, Effect::Lookup(_))).count();
    for n in 1..=3 {
        bench.apply(pod(n, false));
        let adding = sandbox(n, 1, true);
        bench.pending(&adding);
        let effects = bench.take();
        if n == 1 {
            assert_eq!(looks(&effects), 1);
            bench.looked_up(
                &adding,
                Ok(source::Lookup {
                    pod: Some(Arc::new(pod(n, false))),
                    ..source::Lookup::default()
                }),
            );
            assert_eq!(verdicts(&bench.take()), [Verdict::Pass]);
        } else {
            assert_eq!(looks(&effects), 0, "the whole directory is read again");
            assert_eq!(verdicts(&effects), [Verdict::Pass]);
        }
    }
    // Something new is known of namespaces: what was not there may be there.
    bench.tell(Event::NamespaceDeleted(Arc::new(source::Namespace {
        name: "other".parse().unwrap(),
        labels: Labels::new(),
    })));
    bench.apply(pod(4, false));
    bench.pending(&sandbox(4, 1, true));
    assert_eq!(looks(&bench.take()), 1);
}

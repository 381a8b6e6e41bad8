//! When the control plane is told, and when what it was told is withdrawn.

use super::*;

fn running(n: u32, status: bool) -> source::Pod {
    let mut pod = pod(n, true);
    pod.phase = Phase::Running;
    pod.ips = vec![IpAddr::from([10, 0, 0, u8::try_from(n).unwrap()])];
    if status {
        pod.annotations
            .insert("ambient.istio.io/redirection".into(), "enabled".into());
    }
    pod
}

fn writes(effects: &[Effect]) -> Vec<bool> {
    let written = effects.iter().filter_map(|effect| match effect {
        Effect::WriteStatus { enrolled, .. } => Some(*enrolled),
        _ => None,
    });
    written.collect()
}

/// The executor lists pod 1's sandbox with its rules in place.
fn listed(bench: &mut Bench) {
    bench.list(&[Sandbox {
        programmed: ambient(),
        ..sandbox(1, 1, false)
    }]);
}

#[test]
fn a_restart_of_the_broker_writes_nothing_in_whichever_order_its_peers_come_back() {
    for (late_executor, late_probes) in [(0, false), (3, false), (3, true), (60, true)] {
        let mut bench = Bench::cold();
        bench.apply(running(1, true));
        bench.tell(Event::SourceSynced);
        bench.pass(Duration::from_secs(late_executor));
        listed(&mut bench);
        bench.fetched(&sandbox(1, 1, false));
        let epoch = offered(&bench.take());
        if !late_probes {
            bench.tell(Event::ProbesSynced(Ok(())));
        }
        bench.proxy(C1, &[(1, epoch)]);
        bench.pass(Duration::from_secs(2));
        bench.tell(Event::ProbesSynced(Ok(())));
        assert_eq!(bench.report(1).standing, Standing::Enrolled);
        bench.pass(Duration::from_secs(20));
        assert!(writes(&bench.take()).is_empty(), "{late_executor} {late_probes}");
    }
}

#[test]
fn a_restart_of_both_keeps_the_status_and_no_longer_than_it_takes() {
    let (mut bench, _, _) = Bench::enrolled();
    bench.tell(Event::ExecutorDisconnected);
    bench.pass(Duration::from_mins(1));
    assert!(writes(&bench.take()).is_empty());
    // It has come back, but no proxy ever does.
    bench.tell(Event::ZdsClosed(C1));
    listed(&mut bench);
    bench.pass(Duration::from_secs(4));
    assert!(writes(&bench.take()).is_empty());
    bench.pass(Duration::from_secs(2));
    assert_eq!(writes(&bench.take()), [false]);
}

#[test]
fn a_status_of_an_earlier_life_is_withdrawn_from_a_pod_that_is_not_in_the_mesh() {
    let mut bench = Bench::cold();
    let mut out = running(1, true);
    out.labels.clear();
    bench.apply(out);
    bench.tell(Event::SourceSynced);
    assert_eq!(writes(&bench.take()), [false]);
}

#[test]
fn a_pod_that_leaves_is_withdrawn_at_once_even_while_the_executor_is_away() {
    let (mut bench, _, _) = Bench::enrolled();
    bench.tell(Event::ExecutorDisconnected);
    bench.take();
    bench.apply(pod(1, false));
    assert_eq!(writes(&bench.take()), [false]);
}

#[test]
fn a_pod_that_waits_for_adoption_keeps_what_another_agent_wrote_until_it_is_in() {
    let mut bench = Bench::new();
    bench.proxy(C1, &[]);
    bench.apply(running(1, true));
    bench.pass(Duration::from_secs(1));
    assert!(writes(&bench.take()).is_empty());
    bench.adopted(Ok(sandbox(1, 1, false)));
    bench.fetched(&sandbox(1, 1, false));
    let epoch = offered(&bench.take());
    bench.acked(1, C1, epoch);
    bench.programmed(&sandbox(1, 1, false), draining());
    bench.programmed(&sandbox(1, 1, false), ambient());
    bench.tell(Event::ProbesSynced(Ok(())));
    assert_eq!(bench.report(1).standing, Standing::Enrolled);
    assert!(writes(&bench.take()).is_empty());
}

#[test]
fn a_pod_that_cannot_be_adopted_loses_what_another_agent_wrote() {
    let mut bench = Bench::new();
    bench.apply(running(1, true));
    bench.take();
    bench.adopted(Err(failure(ErrorCode::OpenerNetns)));
    assert_eq!(writes(&bench.take()), [false]);
}

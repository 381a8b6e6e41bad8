//! Answers of the executor that never came, and sandboxes that are not what they were.

use super::*;

fn lost() -> Refused {
    Refused::Lost(failure(ErrorCode::BrokerState))
}

/// As the executor tells of a sandbox whose ADD has been admitted.
fn admitted(sandbox: &Sandbox) -> Sandbox {
    Sandbox {
        pending: false,
        programmed: ambient(),
        ..sandbox.clone()
    }
}

#[test]
fn a_pod_whose_admission_was_not_answered_keeps_its_rules_when_the_proxy_goes() {
    let mut bench = Bench::selected();
    let sandbox = sandbox(1, 1, true);
    let epoch = bench.add_until_offered(&sandbox);
    bench.acked(1, C1, epoch);
    bench.completed(&sandbox, Err(lost()));
    bench.tell(Event::ZdsClosed(C1));
    assert!(
        programs(&bench.take()).is_empty(),
        "rules of a pod that may run were removed"
    );
}

#[test]
fn a_pod_that_a_list_shows_as_admitted_keeps_its_rules_when_the_proxy_goes() {
    let mut bench = Bench::selected();
    let sandbox = sandbox(1, 1, false);
    bench.changed(&sandbox);
    bench.tell(Event::ExecutorDisconnected);
    bench.list(&[admitted(&sandbox)]);
    bench.take();
    bench.tell(Event::ZdsClosed(C1));
    assert!(programs(&bench.take()).is_empty());
}

#[test]
fn rules_whose_programming_was_not_answered_are_known_from_the_next_event() {
    let mut bench = Bench::new();
    bench.apply(pod(1, true));
    let pending = sandbox(1, 1, true);
    bench.pending(&pending);
    bench.not_programmed(&pending, lost());
    bench.take();
    bench.changed(&Sandbox {
        pending: true,
        ..admitted(&pending)
    });
    bench.apply(pod(1, false));
    bench.pass(Duration::from_millis(100));
    let effects = bench.take();
    assert_eq!(programs(&effects), [Desired::None], "believed clean");
    assert!(
        verdicts(&effects).is_empty(),
        "passed with rules of ours in its netns"
    );
    bench.programmed(&pending, Desired::None);
    assert_eq!(verdicts(&bench.take()), [Verdict::Pass]);
}

#[test]
fn an_event_that_came_while_the_lost_answer_was_awaited_counts() {
    let mut bench = Bench::new();
    bench.apply(pod(1, true));
    let pending = sandbox(1, 1, true);
    bench.pending(&pending);
    bench.changed(&Sandbox {
        pending: true,
        ..admitted(&pending)
    });
    bench.not_programmed(&pending, lost());
    bench.take();
    bench.pass(Duration::from_secs(1));
    assert!(programs(&bench.take()).is_empty(), "programmed again");
}

#[test]
fn a_descriptor_that_does_not_come_is_asked_for_again_within_the_deadline() {
    let mut bench = Bench::selected();
    let pending = sandbox(1, 1, true);
    bench.pending(&pending);
    bench.programmed(&pending, ambient());
    bench.take();
    let fails = |bench: &mut Bench| {
        bench.not_fetched(&pending, ErrorCode::BrokerState);
    };
    fails(&mut bench);
    bench.pass(Duration::from_millis(10));
    let effects = bench.take();
    assert!(
        matches!(effects.as_slice(), [Effect::FetchDescriptor { .. }]),
        "{effects:?}"
    );
    bench.fetched(&pending);
    offered(&bench.take());

    // It never comes: the refusal says why.
    let second = sandbox(1, 2, true);
    bench.pending(&second);
    bench.programmed(&second, ambient());
    bench.not_fetched(&second, ErrorCode::BrokerState);
    bench.pass(Duration::from_secs(9));
    bench.programmed(&second, Desired::None);
    let effects = bench.take();
    let refused = effects.iter().find_map(|e| match e {
        Effect::Complete {
            id,
            verdict: Verdict::Refuse(failure),
            ..
        } if *id == second.id => Some(failure),
        _ => None,
    });
    let refused = refused.unwrap_or_else(|| panic!("not refused: {effects:?}"));
    assert!(refused.cause.contains("test: stage: cause"), "{refused}");
}

#[test]
fn the_same_sandbox_with_another_netns_starts_anew() {
    let (mut bench, old, epoch) = Bench::enrolled();
    bench.fetched(&old);
    bench.tell(Event::ExecutorDisconnected);
    let mut other = admitted(&old);
    other.netns.cookie += 1;
    bench.list(&[other]);
    let effects = bench.take();
    assert_eq!(withdraws(&effects), 1, "ztunnel keeps a dead netns: {effects:?}");
    let dropped = |e: &Effect| matches!(e, Effect::DropDescriptor(id) if *id == old.id);
    let fetched = |e: &Effect| matches!(e, Effect::FetchDescriptor { .. });
    let drop_at = effects
        .iter()
        .position(dropped)
        .expect("the descriptor is closed");
    let fetch_at = effects.iter().position(fetched).expect("a new one is fetched");
    assert!(drop_at < fetch_at, "{effects:?}");
    bench.withdrawn(epoch);
    bench.fetched(&old);
    assert_ne!(offered(&bench.take()), epoch);
}

#[test]
fn a_new_add_under_a_known_id_is_not_ended_by_the_old_one() {
    let mut bench = Bench::new();
    bench.apply(pod(1, true));
    let first = sandbox(1, 1, true);
    bench.add_until_offered(&first);
    let mut second = first;
    second.netns.cookie += 1;
    bench.pending(&second);
    assert!(verdicts(&bench.take()).is_empty());
}

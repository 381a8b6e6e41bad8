//! An ADD from beginning to end, and every way in which it can end before.

use sluice_proto::ambient::{AmbientOptions, Desired};
use sluice_proto::pb::cni::add_response::Outcome;
use sluice_proto::pb::executor::{complete_request, complete_response, descriptor_reply, program_response};
use sluice_proto::pb::types::{self, Mode};

use crate::harness::{Pod, ambient, eventually};
use crate::setup::{admitted, refused, setup};

#[tokio::test]
async fn a_mesh_pod_is_programmed_handed_over_and_admitted() {
    let mut s = setup().await;
    let pod = Pod::new(&s.executor, "c1", "u1");
    let add = s.executor.add(&pod);
    let sandbox = s.broker.pending().await;
    assert!(sandbox.pending && sandbox.reachable);
    assert_eq!(sandbox.addresses, ["10.0.0.5"]);
    let programmed = s.broker.program(&sandbox, ambient()).await.outcome.unwrap();
    assert!(matches!(programmed, program_response::Outcome::Programmed(p) if p.changed));
    let again = s.broker.program(&sandbox, ambient()).await.outcome.unwrap();
    assert!(matches!(again, program_response::Outcome::Programmed(p) if !p.changed));
    let (reply, descriptors) = s.executor.fetch(&sandbox).await;
    assert!(matches!(reply.outcome, Some(descriptor_reply::Outcome::Ok(id)) if id.inode == pod.inode()));
    assert_eq!(descriptors.len(), 1);
    assert!(!add.is_finished());
    s.broker.admit(&sandbox, Mode::Ambient).await;
    assert_eq!(admitted(add.await.unwrap()), Mode::Ambient);
    assert!(s.kernel.state().probes.contains(&"10.0.0.5".parse().unwrap()));

    s.executor.del(&pod).await;
    assert_eq!(s.broker.gone().await.0, "DEL");
    s.assert_clean(&[&pod]);
    s.assert_closed(&pod).await;
}

#[tokio::test]
async fn probe_addresses_come_with_the_rules_and_go_when_the_pod_is_not_redirected_after_all() {
    let mut s = setup().await;
    let pod = Pod::new(&s.executor, "c1", "u1");
    let add = s.executor.add(&pod);
    let sandbox = s.broker.pending().await;
    s.broker.program(&sandbox, ambient()).await;
    assert_eq!(s.kernel.state().probes.len(), 1, "they wait for the verdict");
    s.broker.program(&sandbox, (&Desired::None).into()).await;
    s.broker.admit(&sandbox, Mode::None).await;
    assert_eq!(admitted(add.await.unwrap()), Mode::None);
    assert_eq!(s.kernel.state().probes.len(), 0);
}

#[tokio::test]
async fn a_pod_outside_the_mesh_is_admitted_and_kept() {
    let mut s = setup().await;
    let pod = Pod::new(&s.executor, "c1", "u1");
    let add = s.executor.add(&pod);
    let sandbox = s.broker.pending().await;
    s.broker.admit(&sandbox, Mode::None).await;
    assert_eq!(admitted(add.await.unwrap()), Mode::None);
    assert_eq!(s.kernel.netns(pod.inode()).changes, 0);
    assert_eq!(s.executor.sandbox_files(), 1);
    let outcome = s.broker.program(&sandbox, ambient()).await.outcome.unwrap();
    assert!(
        matches!(outcome, program_response::Outcome::Programmed(_)),
        "a later label needs no scan"
    );
}

#[tokio::test]
async fn a_refusal_undoes_everything_before_the_runtime_hears_of_it() {
    let mut s = setup().await;
    let pod = Pod::new(&s.executor, "c1", "u1");
    let add = s.executor.add(&pod);
    let sandbox = s.broker.pending().await;
    s.broker.program(&sandbox, ambient()).await;
    let failure = types::Failure {
        code: "ZT-NACK".into(),
        component: "ztunnel".into(),
        stage: "add workload".into(),
        cause: "port taken".into(),
    };
    s.broker
        .complete(&sandbox, complete_request::Verdict::Refuse(failure.clone()))
        .await;
    assert_eq!(refused(add.await.unwrap()), failure);
    s.assert_clean(&[&pod]);
    assert_eq!(s.broker.gone().await.0, "cancelled");
    s.assert_closed(&pod).await;

    let other = Pod::new(&s.executor, "c2", "u2");
    let add = s.executor.add(&other);
    s.broker.enrol().await;
    assert_eq!(
        admitted(add.await.unwrap()),
        Mode::Ambient,
        "another pod with the same address"
    );
}

#[tokio::test]
async fn a_pod_that_expects_other_probes_than_the_host_sends_is_not_programmed() {
    let mut s = setup().await;
    let pod = Pod::new(&s.executor, "c1", "u1");
    let _add = s.executor.add(&pod);
    let sandbox = s.broker.pending().await;
    let options = AmbientOptions {
        probe_ipv4: "169.254.9.9".parse().unwrap(),
        ..AmbientOptions::default()
    };
    let desired = (&Desired::Ambient(options)).into();
    let outcome = s.broker.program(&sandbox, desired).await.outcome.unwrap();
    let program_response::Outcome::Failed(failure) = outcome else {
        panic!("{outcome:?}")
    };
    assert_eq!(failure.code, "EXE-INPUT");
    for address in ["169.254.9.9", "169.254.7.127"] {
        assert!(failure.cause.contains(address), "{}", failure.cause);
    }
    assert_eq!(s.kernel.netns(pod.inode()).changes, 0);
}

#[tokio::test]
async fn a_probe_set_that_fails_fails_the_add() {
    let mut s = setup().await;
    s.kernel.state().failing.insert("add");
    let pod = Pod::new(&s.executor, "c1", "u1");
    let add = s.executor.add(&pod);
    let sandbox = s.broker.pending().await;
    s.broker.program(&sandbox, ambient()).await;
    let outcome = s.broker.admit(&sandbox, Mode::Ambient).await.outcome.unwrap();
    assert!(matches!(outcome, complete_response::Outcome::Failed(f) if f.code == "EXE-PROBE"));
    assert_eq!(refused(add.await.unwrap()).code, "EXE-PROBE");
    s.assert_clean(&[&pod]);
}

#[tokio::test]
async fn rules_that_fail_are_told_to_the_broker_and_leave_nothing() {
    let mut s = setup().await;
    s.kernel.state().failing.insert("apply");
    let pod = Pod::new(&s.executor, "c1", "u1");
    let add = s.executor.add(&pod);
    let sandbox = s.broker.pending().await;
    let outcome = s.broker.program(&sandbox, ambient()).await.outcome.unwrap();
    let program_response::Outcome::Failed(failure) = outcome else {
        panic!("{outcome:?}")
    };
    assert_eq!(failure.code, "EXE-RULES");
    s.broker
        .complete(&sandbox, complete_request::Verdict::Refuse(failure))
        .await;
    assert_eq!(refused(add.await.unwrap()).code, "EXE-RULES");
    s.assert_clean(&[&pod]);
}

#[tokio::test]
async fn identical_concurrent_adds_are_one() {
    let mut s = setup().await;
    let pod = Pod::new(&s.executor, "c1", "u1");
    let first = s.executor.add(&pod);
    let sandbox = s.broker.pending().await;
    let second = s.executor.add(&pod);
    s.broker.program(&sandbox, ambient()).await;
    eventually("second ADD has arrived", || s.kernel.netns(pod.inode()).open == 1).await;
    s.broker.admit(&sandbox, Mode::Ambient).await;
    assert_eq!(admitted(first.await.unwrap()), Mode::Ambient);
    assert_eq!(admitted(second.await.unwrap()), Mode::Ambient);
    let third = s.executor.add(&pod).await.unwrap();
    assert_eq!(admitted(third), Mode::Ambient, "a later one needs no broker");
    assert_eq!(s.kernel.netns(pod.inode()).changes, 1);
    assert_eq!(s.executor.node.hub.sandboxes(), 1);
}

#[tokio::test]
async fn a_further_interface_of_the_same_pod_changes_nothing() {
    let mut s = setup().await;
    let pod = s.executor.enrolled(&mut s.broker, "c1", "u1").await;
    let second = Pod {
        ifname: "net1".into(),
        ..pod.clone()
    };
    assert_eq!(admitted(s.executor.add(&second).await.unwrap()), Mode::None);
    assert_eq!(s.executor.node.hub.sandboxes(), 1);
    s.executor.del(&second).await;
    assert_eq!(s.executor.node.hub.sandboxes(), 1, "its DEL neither");
}

#[tokio::test]
async fn del_cancels_a_pending_add_and_undoes_it_first() {
    let mut s = setup().await;
    let pod = Pod::new(&s.executor, "c1", "u1");
    let add = s.executor.add(&pod);
    let sandbox = s.broker.pending().await;
    s.broker.program(&sandbox, ambient()).await;
    s.executor.del(&pod).await;
    s.assert_clean(&[&pod]);
    assert_eq!(refused(add.await.unwrap()).code, "EXE-LATE");
    let outcome = s.broker.admit(&sandbox, Mode::Ambient).await.outcome.unwrap();
    assert!(matches!(outcome, complete_response::Outcome::TooLate(_)));
    let outcome = s.broker.program(&sandbox, ambient()).await.outcome.unwrap();
    assert!(matches!(outcome, program_response::Outcome::TooLate(_)));
    s.executor.del(&pod).await;
}

#[tokio::test]
async fn a_caller_that_goes_away_takes_its_add_along() {
    let mut s = setup().await;
    let pod = Pod::new(&s.executor, "c1", "u1");
    let add = s.executor.add(&pod);
    let sandbox = s.broker.pending().await;
    s.broker.program(&sandbox, ambient()).await;
    add.abort();
    assert_eq!(s.broker.gone().await.0, "cancelled");
    s.assert_clean(&[&pod]);
    s.assert_closed(&pod).await;
}

#[tokio::test]
async fn of_two_callers_one_may_go_away() {
    let mut s = setup().await;
    let pod = Pod::new(&s.executor, "c1", "u1");
    let first = s.executor.add(&pod);
    let sandbox = s.broker.pending().await;
    let mut plugin = s.executor.plugin(pod.descriptors()).await;
    let request = pod.request();
    let second = tokio::spawn(async move { plugin.add(request).await });
    // A call on the same thread that is answered after the second ADD has been taken.
    s.executor
        .plugin(Vec::new())
        .await
        .status(sluice_proto::pb::cni::StatusRequest {})
        .await
        .unwrap();
    first.abort();
    s.broker.program(&sandbox, ambient()).await;
    s.broker.admit(&sandbox, Mode::Ambient).await;
    let outcome = second.await.unwrap().unwrap().into_inner().outcome.unwrap();
    assert_eq!(admitted(outcome), Mode::Ambient);
}

#[tokio::test]
async fn without_a_broker_the_caller_decides_and_the_sandbox_is_kept() {
    let s = setup().await;
    drop(s.broker);
    eventually("watcher gone", || !s.executor.node.hub.is_watched()).await;
    let pod = Pod::new(&s.executor, "c1", "u1");
    let outcome = s.executor.add(&pod).await.unwrap();
    assert!(
        matches!(outcome, Outcome::NoBroker(no) if no.waited_ms >= 300),
        "{outcome:?}"
    );
    let mut broker = s.executor.broker().await;
    let snapshot = broker.snapshot().await;
    assert_eq!(snapshot.len(), 1);
    assert!(!snapshot[0].pending && snapshot[0].reachable);
}

#[tokio::test]
async fn a_broker_that_dies_in_the_middle_leaves_nothing_programmed() {
    let mut s = setup().await;
    let pod = Pod::new(&s.executor, "c1", "u1");
    let add = s.executor.add(&pod);
    let sandbox = s.broker.pending().await;
    s.broker.program(&sandbox, ambient()).await;
    drop(s.broker);
    assert!(matches!(add.await.unwrap(), Outcome::NoBroker(_)));
    assert_eq!(s.kernel.netns(pod.inode()).programmed, Desired::None);
}

#[tokio::test]
async fn a_broker_that_comes_late_finds_the_pending_add() {
    let s = setup().await;
    drop(s.broker);
    eventually("watcher gone", || !s.executor.node.hub.is_watched()).await;
    let pod = Pod::new(&s.executor, "c1", "u1");
    let add = s.executor.add(&pod);
    eventually("sandbox known", || s.executor.node.hub.sandboxes() == 1).await;
    let mut broker = s.executor.broker().await;
    assert!(broker.snapshot().await[0].pending);
    broker.enrol().await;
    assert_eq!(admitted(add.await.unwrap()), Mode::Ambient);
}

#[tokio::test]
async fn an_add_that_nobody_completes_says_what_it_waited_for() {
    let mut s = setup().await;
    let pod = Pod::new(&s.executor, "c1", "u1");
    let add = s.executor.add(&pod);
    let sandbox = s.broker.pending().await;
    s.broker.program(&sandbox, ambient()).await;
    let failure = refused(add.await.unwrap());
    assert_eq!(failure.code, "BRK-TIME");
    assert!(
        failure.cause.contains("hand-over to the proxy") && failure.cause.contains("u1"),
        "{}",
        failure.cause
    );
    s.assert_clean(&[&pod]);
    assert_eq!(s.broker.gone().await.0, "cancelled");
}

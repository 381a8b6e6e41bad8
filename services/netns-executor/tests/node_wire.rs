//! The life of sandboxes, seen through the executor's real sockets with a kernel that only remembers.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed step is a failed test"
)]

#[path = "node_harness/harness.rs"]
mod harness;

use std::sync::Arc;
use std::time::Duration;

use harness::{Broker, Executor, Pod, ambient, eventually};
use sluice_netns_executor::kernel::fake::FakeKernel;
use sluice_proto::ambient::{AmbientOptions, Desired};
use sluice_proto::pb::cni::add_response::Outcome;
use sluice_proto::pb::executor::sandbox_event::Event;
use sluice_proto::pb::executor::{
    NodeStatusRequest, RetireRequest, RetireResponse, complete_request, complete_response, descriptor_reply,
    program_response,
};
use sluice_proto::pb::types::{self, Mode};

struct Setup {
    kernel: FakeKernel,
    executor: Arc<Executor>,
    broker: Broker,
}

/// An executor with host and broker.
async fn setup() -> Setup {
    let kernel = FakeKernel::default();
    let executor = Arc::new(Executor::start(Arc::new(kernel.clone())).await);
    let host = sluice_netns_executor::kernel::Kernel::open_host(&kernel, Vec::new()).unwrap();
    executor.node.probes.attach(host).await.unwrap();
    let mut broker = executor.broker().await;
    assert!(broker.snapshot().await.is_empty());
    Setup {
        kernel,
        executor,
        broker,
    }
}

impl Setup {
    /// Nothing of any sandbox is left.
    fn assert_clean(&self, pods: &[&Pod]) {
        for pod in pods {
            assert_eq!(
                self.kernel.netns(pod.inode()).programmed,
                Desired::None,
                "{}",
                pod.container
            );
        }
        assert_eq!(self.kernel.state().probes.len(), 0);
        assert_eq!(self.executor.sandbox_files(), 0);
        assert_eq!(self.executor.node.hub.sandboxes(), 0);
    }

    async fn assert_closed(&self, pod: &Pod) {
        eventually("descriptors closed", || self.kernel.netns(pod.inode()).open == 0).await;
    }
}

fn refused(outcome: Outcome) -> types::Failure {
    match outcome {
        Outcome::Refused(failure) => failure,
        other => panic!("not refused: {other:?}"),
    }
}

fn admitted(outcome: Outcome) -> Mode {
    match outcome {
        Outcome::Admitted(admitted) => admitted.mode(),
        other => panic!("not admitted: {other:?}"),
    }
}

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
    let pod = Pod::new(&s.executor, "c1", "u1");
    let add = s.executor.add(&pod);
    s.broker.enrol().await;
    add.await.unwrap();
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

#[tokio::test]
async fn a_retry_with_another_netns_replaces_the_sandboxes_before_it() {
    let mut s = setup().await;
    let first = Pod::new(&s.executor, "c1", "u1");
    let add = s.executor.add(&first);
    s.broker.enrol().await;
    add.await.unwrap();
    let second = Pod::new(&s.executor, "c2", "u1");
    let add = s.executor.add(&second);
    assert_eq!(s.broker.gone().await.0, "replaced");
    s.broker.enrol().await;
    assert_eq!(admitted(add.await.unwrap()), Mode::Ambient);
    assert_eq!(s.kernel.netns(first.inode()).programmed, Desired::None);
    s.assert_closed(&first).await;
    assert_eq!(s.executor.sandbox_files(), 1);
    assert_eq!(s.kernel.state().probes.len(), 1, "same address, same owner");
}

#[tokio::test]
async fn another_netns_under_the_same_key_ends_the_old_generation() {
    let mut s = setup().await;
    let old = Pod::new(&s.executor, "c1", "u1");
    let first = s.executor.add(&old);
    let sandbox = s.broker.pending().await;
    let other_path = Pod::new(&s.executor, "other", "u1").path;
    let new = Pod {
        path: other_path,
        ..old.clone()
    };
    let second = s.executor.add(&new);
    assert_eq!(refused(first.await.unwrap()).code, "EXE-LATE");
    assert_eq!(s.broker.gone().await, ("replaced".to_owned(), sandbox.generation));
    let next = s.broker.pending().await;
    assert!(next.generation > sandbox.generation);
    let outcome = s.broker.program(&sandbox, ambient()).await.outcome.unwrap();
    assert!(matches!(outcome, program_response::Outcome::TooLate(_)));
    s.broker.program(&next, ambient()).await;
    s.broker.admit(&next, Mode::Ambient).await;
    assert_eq!(admitted(second.await.unwrap()), Mode::Ambient);
}

#[tokio::test]
async fn descriptors_of_another_sandbox_of_the_host_or_none_are_refused_and_counted() {
    let mut s = setup().await;
    let pod = Pod::new(&s.executor, "c1", "u1");
    let add = s.executor.add(&pod);
    s.broker.enrol().await;
    add.await.unwrap();
    let thief = Pod {
        container: "c2".into(),
        uid: "u2".into(),
        ..pod.clone()
    };
    let failure = refused(s.executor.add(&thief).await.unwrap());
    assert_eq!(failure.code, "EXE-FD");
    assert!(failure.cause.contains("net/c1/eth0"), "{}", failure.cause);
    let host = Pod::new(&s.executor, "host", "u3");
    s.kernel.state().host = Some(host.inode());
    let failure = refused(s.executor.add(&host).await.unwrap());
    assert!(
        failure.cause.contains("host's network namespace"),
        "{}",
        failure.cause
    );
    let nothing = Pod {
        handed_over: Some(Arc::new(Vec::new())),
        ..Pod::new(&s.executor, "c4", "u4")
    };
    assert_eq!(refused(s.executor.add(&nothing).await.unwrap()).code, "EXE-FD");
    let status = s
        .broker
        .client
        .node_status(NodeStatusRequest {})
        .await
        .unwrap()
        .into_inner();
    let counted: Vec<_> = status
        .refused_descriptors
        .iter()
        .map(|c| (c.label.as_str(), c.value))
        .collect();
    assert_eq!(counted, [("host-netns", 1), ("none", 1), ("other-sandbox", 1)]);
    assert_eq!(status.sandboxes, 1);
}

#[tokio::test]
async fn drift_is_shown_repaired_and_told() {
    let mut s = setup().await;
    let pod = Pod::new(&s.executor, "c1", "u1");
    let add = s.executor.add(&pod);
    s.broker.enrol().await;
    add.await.unwrap();
    s.kernel.state().netns.get_mut(&pod.inode()).unwrap().damaged = true;
    let broken = s
        .broker
        .until(|event| match event {
            Event::Changed(sandbox) => sandbox.broken,
            _ => None,
        })
        .await;
    assert_eq!(broken.code, "EXE-DRIFT");
    let differences = s
        .broker
        .until(|event| match event {
            Event::Repaired(repaired) => Some(repaired.differences),
            _ => None,
        })
        .await;
    assert_eq!(differences, ["rule is missing"]);
    s.broker
        .until(|event| matches!(event, Event::Changed(sandbox) if sandbox.broken.is_none()).then_some(()))
        .await;
    assert!(!s.kernel.netns(pod.inode()).damaged);
    s.kernel.state().host_damaged = true;
    let host = s
        .broker
        .until(|event| match event {
            Event::Repaired(repaired) if repaired.attachment.is_none() => Some(repaired.differences),
            _ => None,
        })
        .await;
    assert_eq!(host, ["table is missing"]);
}

#[tokio::test]
async fn a_vanished_interface_ends_the_sandbox() {
    let mut s = setup().await;
    let pod = Pod::new(&s.executor, "c1", "u1");
    let add = s.executor.add(&pod);
    s.broker.enrol().await;
    add.await.unwrap();
    s.kernel
        .state()
        .netns
        .get_mut(&pod.inode())
        .unwrap()
        .interfaces
        .clear();
    assert_eq!(s.broker.gone().await.0, "interface-gone");
    s.assert_closed(&pod).await;
    assert_eq!(s.executor.sandbox_files(), 0);
}

#[tokio::test]
async fn gc_removes_what_is_not_listed_in_its_own_network() {
    let mut s = setup().await;
    let pods = [
        Pod::new(&s.executor, "c1", "u1"),
        Pod::new(&s.executor, "c2", "u2"),
    ];
    for pod in &pods {
        let add = s.executor.add(pod);
        s.broker.enrol().await;
        add.await.unwrap();
    }
    let mut plugin = s.executor.plugin(Vec::new()).await;
    let gc = |network: &str| sluice_proto::pb::cni::GcRequest {
        network_name: network.into(),
        valid: vec![pods[0].attachment()],
    };
    assert_eq!(plugin.gc(gc("other")).await.unwrap().into_inner().removed, 0);
    assert_eq!(plugin.gc(gc("net")).await.unwrap().into_inner().removed, 1);
    assert_eq!(s.broker.gone().await.0, "GC");
    assert_eq!(s.executor.sandbox_files(), 1);
}

#[tokio::test]
async fn a_stuck_kernel_call_does_not_keep_del_or_other_pods_waiting() {
    let mut s = setup().await;
    let pod = Pod::new(&s.executor, "c1", "u1");
    let add = s.executor.add(&pod);
    let sandbox = s.broker.pending().await;
    s.kernel.hold(true);
    let mut client = s.broker.client.clone();
    let request = sluice_proto::pb::executor::ProgramRequest {
        attachment: sandbox.attachment.clone(),
        generation: sandbox.generation,
        pod_uid: "u1".into(),
        desired: Some(ambient()),
    };
    let program = tokio::spawn(async move { client.program(request).await });
    let other = Pod::new(&s.executor, "c2", "u2");
    let other_add = s.executor.add(&other);
    let second = s.broker.pending().await;
    s.broker.admit(&second, Mode::None).await;
    assert_eq!(admitted(other_add.await.unwrap()), Mode::None);
    let begun = std::time::Instant::now();
    s.executor.del(&pod).await;
    assert!(
        begun.elapsed() < Duration::from_millis(1500),
        "{:?}",
        begun.elapsed()
    );
    s.kernel.hold(false);
    program.await.unwrap().unwrap();
    assert_eq!(refused(add.await.unwrap()).code, "EXE-LATE");
    eventually("rules removed", || {
        s.kernel.netns(pod.inode()).programmed == Desired::None
    })
    .await;
}

#[tokio::test]
async fn after_a_restart_everything_is_listed_and_a_tombstone_is_honoured() {
    let mut s = setup().await;
    let pods = [
        Pod::new(&s.executor, "c1", "u1"),
        Pod::new(&s.executor, "c2", "u2"),
    ];
    for (i, pod) in pods.iter().enumerate() {
        let pod = Pod {
            address: format!("10.0.0.{i}"),
            ..pod.clone()
        };
        let add = s.executor.add(&pod);
        s.broker.enrol().await;
        add.await.unwrap();
    }
    drop(s.broker);
    let tombstone = sluice_proto::tombstone::Tombstone {
        attachment: pods[1].attachment().try_into().unwrap(),
        deleted_unix_ms: u64::MAX,
    };
    tombstone.write(&s.executor.run.tombstones()).unwrap();
    let executor = Arc::into_inner(s.executor)
        .expect("no more users")
        .restart()
        .await;
    let mut broker = executor.broker().await;
    let snapshot = broker.snapshot().await;
    assert_eq!(snapshot.len(), 1);
    assert_eq!(snapshot[0].attachment, Some(pods[0].attachment()));
    assert!(!snapshot[0].reachable && snapshot[0].broken.is_some());
    assert_eq!(snapshot[0].programmed, Some(ambient()));
    assert_eq!(std::fs::read_dir(executor.run.tombstones()).unwrap().count(), 0);
    let status = broker
        .client
        .node_status(NodeStatusRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(status.probe_set.len(), 1);

    let executor = Arc::new(executor);
    let again = executor.add(&pods[0]).await.unwrap();
    assert_eq!(
        admitted(again),
        Mode::Ambient,
        "the same ADD again gives the namespace back"
    );
    assert!(
        executor
            .node
            .hub
            .view(&pods[0].attachment().try_into().unwrap())
            .unwrap()
            .reachable
    );
    assert_eq!(s.kernel.netns(pods[0].inode()).changes, 1, "no rule was changed");
}

#[tokio::test]
async fn an_agent_that_leaves_the_node_undoes_everything_and_begins_nothing() {
    let mut setup = setup().await;
    let (first, second) = (
        Pod::new(&setup.executor, "one", "uid-1"),
        Pod::new(&setup.executor, "two", "uid-2"),
    );
    let mut adds = Vec::new();
    for pod in [&first, &second] {
        adds.push(setup.executor.add(pod));
        setup.broker.enrol().await;
    }
    for add in adds {
        assert_eq!(admitted(add.await.unwrap()), Mode::Ambient);
    }
    assert!(!setup.kernel.state().host_damaged);

    let response = setup
        .broker
        .client
        .retire(RetireRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(response, RetireResponse::default());
    setup.assert_clean(&[&first, &second]);
    assert!(setup.kernel.state().host_damaged, "the host's rules are gone");
    for _ in 0..2 {
        assert_eq!(setup.broker.gone().await.0, "retired");
    }
    // Nobody puts the host's rules back, and no sandbox begins.
    setup.executor.node.probes.examine(true).await.unwrap();
    assert!(setup.kernel.state().host_damaged);
    let third = Pod::new(&setup.executor, "three", "uid-3");
    let failure = refused(setup.executor.add(&third).await.unwrap());
    assert!(
        failure.cause.contains("being removed from this node"),
        "{failure:?}"
    );
    // DEL works to the end.
    setup.executor.del(&first).await;
}

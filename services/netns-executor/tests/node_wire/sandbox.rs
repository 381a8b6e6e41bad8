//! What becomes of a sandbox after its ADD.

use std::sync::Arc;
use std::time::Duration;

use sluice_proto::ambient::Desired;
use sluice_proto::pb::executor::sandbox_event::Event;
use sluice_proto::pb::executor::{RetireRequest, RetireResponse, program_response};
use sluice_proto::pb::types::Mode;

use crate::harness::{Pod, ambient, eventually};
use crate::setup::{admitted, refused, setup};

#[tokio::test]
async fn a_retry_with_another_netns_replaces_the_sandboxes_before_it() {
    let mut s = setup().await;
    let first = s.executor.enrolled(&mut s.broker, "c1", "u1").await;
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
    let pod = s.executor.enrolled(&mut s.broker, "c1", "u1").await;
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
    let status = s.broker.status().await;
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
    let pod = s.executor.enrolled(&mut s.broker, "c1", "u1").await;
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
    let pod = s.executor.enrolled(&mut s.broker, "c1", "u1").await;
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
        s.executor.enrol(&mut s.broker, pod).await;
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
        s.executor.enrol(&mut s.broker, &pod).await;
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
    let status = broker.status().await;
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

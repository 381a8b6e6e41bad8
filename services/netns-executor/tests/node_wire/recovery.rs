//! Namespaces that come from the opener: adoption, restarts, the host's.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sluice_netns_executor::kernel::fake::FakeKernel;
use sluice_proto::ambient::Desired;
use sluice_proto::opener::OpenerRequest;
use sluice_proto::pb::cni::add_response::Outcome;
use sluice_proto::pb::executor::{
    AdoptRequest, ProbeAddress, Sandbox, SyncProbeSetRequest, adopt_response, complete_response,
    program_response,
};
use sluice_proto::pb::types::{self, Mode};
use sluice_proto::tombstone::Tombstone;

use crate::harness::{Broker, Executor, Pod, ambient, eventually};
use crate::opener::FakeOpener;
use crate::setup::{WithOpener as Setup, connect, outside, setup_with_opener as setup};

impl Broker {
    async fn adopt(
        &mut self,
        pod: &Pod,
        addresses: &[&str],
        path: Option<&Path>,
    ) -> Result<Sandbox, types::Failure> {
        let request = AdoptRequest {
            pod: pod.request().pod,
            addresses: addresses.iter().map(ToString::to_string).collect(),
            netns_path: path.map_or_else(String::new, |path| path.to_str().unwrap().into()),
        };
        match self
            .client
            .adopt(request)
            .await
            .unwrap()
            .into_inner()
            .outcome
            .unwrap()
        {
            adopt_response::Outcome::Sandbox(sandbox) => Ok(sandbox),
            adopt_response::Outcome::Failed(failure) => Err(failure),
        }
    }
}

#[tokio::test]
async fn a_path_names_the_namespace_and_an_older_sandbox_of_the_pod_makes_way() {
    let mut s = setup().await;
    let first = s.executor.enrolled(&mut s.broker, "c1", "u1").await;
    let same = s
        .broker
        .adopt(&first, &["10.0.0.5"], Some(&first.path))
        .await
        .unwrap();
    assert_eq!(
        same.attachment,
        Some(first.attachment()),
        "the same namespace, the same sandbox"
    );
    let second = Pod::new(&s.executor, "c2", "u1");
    let taken = s
        .broker
        .adopt(&second, &["10.0.0.5"], Some(&second.path))
        .await
        .unwrap();
    assert_eq!(taken.netns.as_ref().unwrap().inode, second.inode());
    assert_eq!(s.broker.gone().await.0, "replaced");
    s.broker.program(&taken, ambient()).await;
    eventually("two steps", || s.kernel.netns(second.inode()).changes == 2).await;
    eventually("the older namespace is closed", || {
        s.kernel.netns(first.inode()).open == 0
    })
    .await;
}

#[tokio::test]
async fn only_addresses_that_are_there_are_recorded() {
    let mut s = setup().await;
    let pod = Pod::new(&s.executor, "c1", "u1");
    let addresses = ["10.0.0.9", "10.0.0.5"];
    let adopted = s.broker.adopt(&pod, &addresses, Some(&pod.path)).await.unwrap();
    assert_eq!(adopted.addresses, ["10.0.0.5"]);
    let none = Pod::new(&s.executor, "c2", "u2");
    let refused = s
        .broker
        .adopt(&none, &["10.0.0.9"], Some(&none.path))
        .await
        .unwrap_err();
    assert!(
        refused.cause.contains("none of the addresses"),
        "{}",
        refused.cause
    );
}

fn entry(address: &str, owner: &str) -> ProbeAddress {
    ProbeAddress {
        address: address.into(),
        owner_uid: owner.into(),
    }
}

#[tokio::test]
async fn the_probe_set_takes_only_addresses_of_its_owners_sandbox() {
    let mut s = setup().await;
    s.executor.enrolled(&mut s.broker, "c1", "u1").await;
    let request = SyncProbeSetRequest {
        addresses: vec![
            entry("10.0.0.5", "u1"),
            entry("192.0.2.7", "u1"),
            entry("10.0.0.5", "u2"),
        ],
        remove: Vec::new(),
        prune: true,
    };
    let response = s
        .broker
        .client
        .sync_probe_set(request)
        .await
        .unwrap()
        .into_inner();
    let failure = response.failed.unwrap();
    assert!(
        failure.cause.contains("192.0.2.7 of pod uid u1"),
        "{}",
        failure.cause
    );
    assert!(
        failure.cause.contains("10.0.0.5 of pod uid u2"),
        "{}",
        failure.cause
    );
    let kept: Vec<_> = s.kernel.state().probes.iter().copied().collect();
    assert_eq!(kept, ["10.0.0.5".parse::<IpAddr>().unwrap()]);
}

#[tokio::test]
async fn an_opener_that_does_not_show_the_host_or_another_one_is_not_used() {
    let kernel = FakeKernel::default();
    let executor = Executor::start(Arc::new(kernel.clone())).await;
    let blind = connect(&executor, None).await;
    eventually("blind opener is sent away", || blind.is_over()).await;
    assert!(!executor.node.opener.is_connected());
    let host = executor.run.root().join("host");
    std::fs::write(&host, "").unwrap();
    let opener = connect(&executor, Some(&host)).await;
    assert!(!opener.is_over());
    let other = executor.run.root().join("other");
    std::fs::write(&other, "").unwrap();
    let liar = FakeOpener::connect(&executor.run.opener_socket(), Some(&other));
    eventually("opener of another host is sent away", || liar.is_over()).await;
    assert!(executor.node.opener.is_connected() && !opener.is_over());
    // The host's namespace is never a pod's.
    let mut broker = executor.broker().await;
    let pod = Pod::new(&executor, "c1", "u1");
    let refused = broker.adopt(&pod, &["10.0.0.5"], Some(&host)).await.unwrap_err();
    assert!(
        refused.cause.contains("host's network namespace"),
        "{}",
        refused.cause
    );
}

#[tokio::test]
async fn an_add_waits_for_an_opener_that_is_on_its_way() {
    let kernel = FakeKernel::default();
    let executor = Executor::start(Arc::new(kernel.clone())).await;
    let mut broker = executor.broker().await;
    let pod = Pod::new(&executor, "c1", "u1");
    let add = executor.add(&pod);
    let sandbox = broker.pending().await;
    broker.program(&sandbox, ambient()).await;
    let admitting = tokio::spawn(async move { broker.admit(&sandbox, Mode::Ambient).await.outcome.unwrap() });
    let host = executor.run.root().join("host");
    std::fs::write(&host, "").unwrap();
    let _opener = connect(&executor, Some(&host)).await;
    let outcome = admitting.await.unwrap();
    assert!(
        matches!(outcome, complete_response::Outcome::Accepted(_)),
        "{outcome:?}"
    );
    assert!(matches!(add.await.unwrap(), Outcome::Admitted(_)));
    assert_eq!(kernel.state().probes.len(), 1);
}

/// Stops the executor with one admitted mesh pod and starts another; no opener is connected.
async fn restarted(mut s: Setup, pod: &Pod) -> (Executor, Broker, FakeKernel, PathBuf) {
    s.executor.enrol(&mut s.broker, pod).await;
    drop((s.broker, s.opener));
    let executor = s.executor.restart().await;
    let broker = executor.broker().await;
    (executor, broker, s.kernel, s.host)
}

#[tokio::test]
async fn a_namespace_that_is_nowhere_is_given_up() {
    let s = setup().await;
    let pod = Pod::new(&s.executor, "c1", "u1");
    let (executor, mut broker, _kernel, host) = restarted(s, &pod).await;
    std::fs::remove_file(&pod.path).unwrap();
    let began = std::time::Instant::now();
    let opener = connect(&executor, Some(&host)).await;
    assert_eq!(broker.gone().await.0, "netns-gone");
    assert_eq!(executor.sandbox_files(), 0);
    let scans = opener.asked(|request| *request == OpenerRequest::Scan);
    // A round each 100 ms; the first is made when the opener connects.
    let rounds = usize::try_from(began.elapsed().as_millis() / 100).unwrap() + 2;
    assert!((4..=rounds).contains(&scans), "{scans} scans in {rounds} rounds");
}

#[tokio::test]
async fn a_namespace_is_not_given_up_while_a_process_of_the_pod_or_its_path_is_there() {
    let s = setup().await;
    let pod = Pod::new(&s.executor, "c1", "u1");
    let (executor, mut broker, kernel, host) = restarted(s, &pod).await;
    // Another namespace is at the path now, and the pod's process is in one without its address.
    let elsewhere = Pod::new(&executor, "c2", "u1");
    std::fs::remove_file(&pod.path).unwrap();
    kernel
        .state()
        .netns
        .entry(elsewhere.inode())
        .or_default()
        .interfaces
        .clear();
    let opener = FakeOpener::connect(&executor.run.opener_socket(), Some(&host));
    opener.finds("u1", &elsewhere.path);
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    assert_eq!(executor.node.hub.sandboxes(), 1);
    // Now it has it.
    kernel.state().netns.remove(&elsewhere.inode());
    let taken = broker.adopt(&pod, &["10.0.0.5"], None).await.unwrap();
    assert_eq!(taken.netns.unwrap().inode, elsewhere.inode());
}

#[tokio::test]
async fn a_tombstone_written_while_the_sockets_are_bound_is_honoured() {
    let mut s = setup().await;
    let pod = s.executor.enrolled(&mut s.broker, "c1", "u1").await;
    let tombstone = |deleted_unix_ms| Tombstone {
        attachment: pod.attachment().try_into().unwrap(),
        deleted_unix_ms,
    };
    let tombstones = s.executor.run.tombstones();
    tombstone(1).write(&tombstones).unwrap();
    let none_left = || std::fs::read_dir(&tombstones).unwrap().count() == 0;
    eventually("an older one is dropped", none_left).await;
    assert_eq!(s.executor.sandbox_files(), 1);
    tombstone(u64::MAX).write(&tombstones).unwrap();
    assert_eq!(s.broker.gone().await.0, "DEL");
    eventually("it is dropped, too", none_left).await;
}

#[tokio::test]
async fn rules_that_were_recorded_and_never_programmed_are_programmed_before_the_pod_starts() {
    let mut s = setup().await;
    let pod = Pod::new(&s.executor, "c1", "u1");
    let add = s.executor.add(&pod);
    let sandbox = s.broker.pending().await;
    s.broker.program(&sandbox, ambient()).await;
    drop((s.broker, s.opener));
    // The plugin stays, as one does whose executor was killed.
    let executor = s.executor.restart().await;
    add.abort();
    let _ = add.await;
    // As if the crash had come between the record and the kernel.
    s.kernel.state().netns.get_mut(&pod.inode()).unwrap().programmed = Desired::None;
    let mut broker = executor.broker().await;
    let again = executor.add(&pod);
    let sandbox = broker.pending().await;
    let outcome = broker.admit(&sandbox, Mode::Ambient).await.outcome.unwrap();
    let redirected = matches!(s.kernel.netns(pod.inode()).programmed, Desired::Ambient(_));
    let accepted = matches!(outcome, complete_response::Outcome::Accepted(_));
    assert!(redirected || !accepted, "admitted without rules: {outcome:?}");
    drop(again);
}

#[tokio::test]
async fn the_same_add_again_mends_what_is_not_as_recorded() {
    let s = setup().await;
    let pod = Pod::new(&s.executor, "c1", "u1");
    let (executor, _broker, kernel, _) = restarted(s, &pod).await;
    kernel.state().netns.get_mut(&pod.inode()).unwrap().programmed = Desired::None;
    assert!(matches!(executor.add(&pod).await.unwrap(), Outcome::Admitted(a) if a.mode() == Mode::Ambient));
    assert!(matches!(
        kernel.netns(pod.inode()).programmed,
        Desired::Ambient(_)
    ));
}

#[tokio::test]
async fn rules_whose_programming_fails_after_the_commit_are_taken_back_or_watched() {
    let mut s = setup().await;
    let (pod, sandbox) = outside(&s.executor, &mut s.broker).await;
    s.kernel.state().failing.insert("apply-late");
    let outcome = s.broker.program(&sandbox, ambient()).await.outcome.unwrap();
    assert!(
        matches!(outcome, program_response::Outcome::Failed(_)),
        "{outcome:?}"
    );
    assert_eq!(s.kernel.netns(pod.inode()).programmed, Desired::None);
    s.kernel.state().failing.insert("take-back");
    s.broker.program(&sandbox, ambient()).await;
    assert!(matches!(
        s.kernel.netns(pod.inode()).programmed,
        Desired::Joining(_)
    ));
    s.kernel.state().failing.clear();
    s.executor.del(&pod).await;
    assert_eq!(
        s.kernel.netns(pod.inode()).programmed,
        Desired::None,
        "somebody owned them"
    );
}

#[tokio::test]
async fn what_cannot_be_programmed_now_is_not_programmed_later() {
    let mut s = setup().await;
    let (pod, sandbox) = outside(&s.executor, &mut s.broker).await;
    drop((s.broker, s.opener));
    let executor = s.executor.restart().await;
    let mut broker = executor.broker().await;
    let outcome = broker.program(&sandbox, ambient()).await.outcome.unwrap();
    assert!(
        matches!(outcome, program_response::Outcome::Failed(_)),
        "{outcome:?}"
    );
    let _opener = connect(&executor, Some(&s.host)).await;
    let key = pod.attachment().try_into().unwrap();
    let view = || executor.node.hub.view(&key).unwrap();
    eventually("namespace is back", || view().reachable).await;
    assert_eq!(view().programmed, None);
    assert_eq!(s.kernel.netns(pod.inode()).changes, 0);
}

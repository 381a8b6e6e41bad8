//! A running pod is enrolled in steps, so that its connections are known to conntrack before more than new ones are
//! redirected.

use sluice_netns_executor::kernel::fake::FakeKernel;
use sluice_proto::ambient::{AmbientOptions, Desired};
use sluice_proto::opener::OpenerRequest;
use sluice_proto::pb::executor::{Programmed, Sandbox, program_response};
use sluice_proto::pb::types;

use crate::harness::{Broker, Pod, ambient, eventually};
use crate::opener::FakeOpener;
use crate::setup::{WithOpener, connect, outside, setup, setup_with_opener};

fn draining() -> types::Desired {
    (&Desired::Draining(AmbientOptions::default())).into()
}

/// What must be programmed while connections are made known.
fn under() -> Desired {
    Desired::Joining(AmbientOptions::default())
}

fn is_enrolled(kernel: &FakeKernel, pod: &Pod) -> bool {
    matches!(kernel.netns(pod.inode()).programmed, Desired::Ambient(_))
}

fn asked(opener: &FakeOpener) -> usize {
    opener.asked(|request| *request == OpenerRequest::Diagnostics)
}

impl Broker {
    async fn programmed(&mut self, sandbox: &Sandbox, desired: types::Desired) -> Programmed {
        match self.program(sandbox, desired).await.outcome.unwrap() {
            program_response::Outcome::Programmed(programmed) => programmed,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn new_connections_are_redirected_and_the_others_made_known_before_every_first_packet_is() {
    let mut s = setup_with_opener().await;
    let (pod, sandbox) = outside(&s.executor, &mut s.broker).await;
    assert!(s.broker.programmed(&sandbox, ambient()).await.changed);
    eventually("enrolled", || is_enrolled(&s.kernel, &pod)).await;
    let netns = s.kernel.netns(pod.inode());
    assert_eq!(netns.tracked_under, [under()]);
    assert_eq!((netns.changes, asked(&s.opener)), (2, 1));
    let status = s.broker.status().await;
    let made: Vec<_> = status
        .tracked_connections
        .iter()
        .map(|c| (c.label.as_str(), c.value))
        .collect();
    assert_eq!(made, [("known", 0), ("made", 1), ("refused", 0)]);
    assert_eq!(status.unlisted_enrolments, 0);
}

#[tokio::test]
async fn they_are_listed_once_unless_conntrack_stopped_looking() {
    let mut s = setup_with_opener().await;
    let (pod, sandbox) = outside(&s.executor, &mut s.broker).await;
    let listed = |s: &WithOpener| s.kernel.netns(pod.inode()).tracked_under.len();
    // The pod leaves, and comes back before it has left.
    for desired in [ambient(), draining(), ambient()] {
        s.broker.programmed(&sandbox, desired).await;
        eventually("listed", || (listed(&s), asked(&s.opener)) == (1, 1)).await;
    }
    for desired in [draining(), (&Desired::None).into(), ambient()] {
        s.broker.programmed(&sandbox, desired).await;
    }
    eventually("listed again", || listed(&s) == 2).await;
    s.broker.programmed(&sandbox, draining()).await;
    // Somebody takes the rules away for a while.
    s.kernel.state().netns.get_mut(&pod.inode()).unwrap().damaged = true;
    eventually("repaired", || !s.kernel.netns(pod.inode()).damaged).await;
    s.broker.programmed(&sandbox, ambient()).await;
    eventually("listed once more", || listed(&s) == 3).await;
    eventually("enrolled", || is_enrolled(&s.kernel, &pod)).await;
}

#[tokio::test]
async fn the_answer_does_not_wait_for_the_list() {
    let mut s = setup_with_opener().await;
    let (pod, sandbox) = outside(&s.executor, &mut s.broker).await;
    let held = s.opener.hold_diagnostics().await;
    s.broker.programmed(&sandbox, ambient()).await;
    let netns = s.kernel.netns(pod.inode());
    assert_eq!((netns.tracked_under, netns.programmed), (vec![], under()));
    drop(held);
    eventually("enrolled", || is_enrolled(&s.kernel, &pod)).await;
    assert_eq!(s.kernel.netns(pod.inode()).tracked_under, [under()]);
    assert_eq!(asked(&s.opener), 1);
}

#[tokio::test]
async fn nothing_is_listed_in_a_pod_that_is_being_added() {
    let mut s = setup_with_opener().await;
    let pod = Pod::new(&s.executor, "c1", "u1");
    let add = s.executor.add(&pod);
    s.broker.enrol().await;
    add.await.unwrap();
    let netns = s.kernel.netns(pod.inode());
    assert_eq!(
        (netns.tracked_under.len(), netns.changes, asked(&s.opener)),
        (0, 1, 0)
    );
}

#[tokio::test]
async fn a_pod_whose_connections_cannot_be_listed_is_enrolled_and_counted() {
    let mut s = setup().await;
    let (pod, sandbox) = outside(&s.executor, &mut s.broker).await;
    s.broker.programmed(&sandbox, ambient()).await;
    eventually("enrolled", || is_enrolled(&s.kernel, &pod)).await;
    assert_eq!(
        s.kernel.netns(pod.inode()).tracked_under.len(),
        0,
        "there is no opener"
    );
    assert_eq!(s.broker.status().await.unlisted_enrolments, 1);

    let mut s = setup_with_opener().await;
    let (pod, sandbox) = outside(&s.executor, &mut s.broker).await;
    s.kernel.state().failing.insert("track");
    s.broker.programmed(&sandbox, ambient()).await;
    eventually("enrolled", || is_enrolled(&s.kernel, &pod)).await;
    assert_eq!(s.broker.status().await.unlisted_enrolments, 1);
}

#[tokio::test]
async fn an_enrolment_whose_first_step_fails_leaves_nothing() {
    let mut s = setup_with_opener().await;
    let (pod, sandbox) = outside(&s.executor, &mut s.broker).await;
    s.kernel.state().failing.insert("apply");
    let outcome = s.broker.program(&sandbox, ambient()).await.outcome.unwrap();
    assert!(
        matches!(outcome, program_response::Outcome::Failed(_)),
        "{outcome:?}"
    );
    assert_eq!(s.kernel.netns(pod.inode()).programmed, Desired::None);
    s.kernel.state().failing.clear();
    s.broker.programmed(&sandbox, ambient()).await;
    eventually("enrolled", || is_enrolled(&s.kernel, &pod)).await;
    assert_eq!(s.kernel.netns(pod.inode()).tracked_under, [under()]);
}

#[tokio::test]
async fn an_enrolment_whose_last_step_fails_is_told_and_finished_later() {
    let mut s = setup_with_opener().await;
    let (pod, sandbox) = outside(&s.executor, &mut s.broker).await;
    let key = pod.attachment().try_into().unwrap();
    let is_broken = || s.executor.node.hub.view(&key).unwrap().broken.is_some();
    s.kernel.state().failing.insert("redirect");
    s.broker.programmed(&sandbox, ambient()).await;
    eventually("told", is_broken).await;
    assert_eq!(s.kernel.netns(pod.inode()).programmed, under());
    s.kernel.state().failing.clear();
    eventually("finished", || is_enrolled(&s.kernel, &pod) && !is_broken()).await;
}

/// The executor dies after the first step; `kernel_has` is what it has done until then.
async fn killed_after_the_first_step(kernel_has: Desired) {
    let mut s = setup_with_opener().await;
    let (pod, sandbox) = outside(&s.executor, &mut s.broker).await;
    s.kernel.state().failing.insert("redirect");
    s.broker.programmed(&sandbox, ambient()).await;
    let key = pod.attachment().try_into().unwrap();
    let has_failed = || s.executor.node.hub.view(&key).unwrap().broken.is_some();
    eventually("the last step is not made", has_failed).await;
    drop((s.broker, s.opener));
    let executor = s.executor.restart().await;
    {
        let mut state = s.kernel.state();
        state.failing.clear();
        let netns = state.netns.get_mut(&pod.inode()).unwrap();
        netns.programmed = kernel_has;
        netns.tracked_under.clear();
    }
    let opener = connect(&executor, Some(&s.host)).await;
    let is_mended = || {
        let view = executor.node.hub.view(&key).unwrap();
        view.reachable && view.broken.is_none() && is_enrolled(&s.kernel, &pod)
    };
    eventually("the steps are made again", is_mended).await;
    assert_eq!(asked(&opener), 1);
    assert_eq!(s.kernel.netns(pod.inode()).tracked_under, [under()]);
    let told = executor.broker().await.snapshot().await;
    assert_eq!(told[0].programmed, Some(ambient()));
}

#[tokio::test]
async fn an_executor_that_was_killed_before_the_first_step_reached_the_kernel_makes_it_again() {
    killed_after_the_first_step(Desired::None).await;
}

#[tokio::test]
async fn an_executor_that_was_killed_before_connections_were_known_lists_them_again() {
    killed_after_the_first_step(under()).await;
}

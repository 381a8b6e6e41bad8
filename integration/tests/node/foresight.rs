//! What the executor does without asking: it is done faster, while the broker hangs, and never wrongly.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use sluice_integration::adds::{mesh_with, refused};
use sluice_integration::cni_error::CniError;
use sluice_integration::kernel_state::{NetnsState, assert_netns_is};
use sluice_integration::manifests::PodOptions;
use sluice_integration::mesh::{Mesh, MeshOptions, SOON};
use sluice_integration::netns_state::redirects;
use sluice_proto::pb::workload::PodState;
use sluice_testkit::pod::Pod;
use sluice_testkit::wait::poll_true;

/// A node with one pod outside the mesh that waits for its ADD, of which the executor knows.
fn foreseen(name: &str) -> (Mesh, Pod) {
    let mesh = mesh_with(MeshOptions::default()).unwrap();
    let pod = mesh.node().pod(name).create().unwrap();
    mesh.manifests.pod(&pod, &PodOptions::mode("none")).unwrap();
    wait_foreseen(&mesh, 1, 0);
    (mesh, pod)
}

fn wait_foreseen(mesh: &Mesh, passing: u32, programmed: u32) {
    poll_true("the executor knows what is decided", SOON, || {
        let executor = mesh.node_status().ok().and_then(|status| status.executor);
        executor.is_some_and(|status| {
            status.foreseen_passing == passing && status.foreseen_programmed == programmed
        })
    })
    .unwrap();
}

#[test]
fn a_pod_outside_the_mesh_passes_while_the_broker_hangs_and_can_be_enrolled_later() {
    let (mesh, pod) = foreseen("plain");
    let before = NetnsState::of(pod.netns()).unwrap();
    mesh.broker.signal(Signal::SIGSTOP).unwrap();
    let begun = Instant::now();
    let outcome = mesh.add(&pod);
    let took = begun.elapsed();
    mesh.broker.signal(Signal::SIGCONT).unwrap();
    outcome.unwrap().ok().unwrap();
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert_eq!(
        NetnsState::of(pod.netns()).unwrap(),
        before,
        "nothing of ours is in the pod"
    );
    mesh.manifests.pod(&pod, &PodOptions::default()).unwrap();
    mesh.wait_state(&pod, PodState::Enrolled, SOON).unwrap();
}

#[test]
fn a_pod_that_comes_into_the_mesh_before_its_add_is_enrolled_by_it() {
    let (mesh, pod) = foreseen("late");
    mesh.manifests.pod(&pod, &PodOptions::default()).unwrap();
    wait_foreseen(&mesh, 0, 1);
    mesh.add(&pod).unwrap().ok().unwrap();
    assert!(redirects(pod.netns()).unwrap(), "before the runtime was answered");
    mesh.wait_state(&pod, PodState::Enrolled, SOON).unwrap();
}

#[test]
fn rules_that_were_made_ahead_are_gone_again_if_the_add_fails() {
    let mesh = mesh_with(MeshOptions::default()).unwrap();
    let pod = mesh.node().pod("ahead").create().unwrap();
    mesh.manifests.pod(&pod, &PodOptions::default()).unwrap();
    wait_foreseen(&mesh, 0, 1);
    let before = NetnsState::of(pod.netns()).unwrap();
    mesh.broker.signal(Signal::SIGSTOP).unwrap();
    let adding = mesh.start_add(&pod).unwrap();
    poll_true("the rules are made while the broker hangs", SOON, || {
        NetnsState::of(pod.netns()).is_ok_and(|now| now != before)
    })
    .unwrap();
    let done = adding.wait().unwrap();
    mesh.broker.signal(Signal::SIGCONT).unwrap();
    let error = CniError::of(&done).unwrap();
    error.assert("BRK-TIME", "netns-executor", "default/ahead");
    assert_netns_is(&pod, &before);
    mesh.add(&pod).unwrap().ok().unwrap();
    mesh.wait_state(&pod, PodState::Enrolled, SOON).unwrap();
}

#[test]
fn a_decision_is_used_up_by_one_sandbox() {
    let (mesh, pod) = foreseen("again");
    mesh.add(&pod).unwrap().ok().unwrap();
    wait_foreseen(&mesh, 0, 0);
    // Its label changes while it runs; the sandbox of its next life has to be asked about.
    mesh.manifests.pod(&pod, &PodOptions::default()).unwrap();
    mesh.wait_state(&pod, PodState::Enrolled, SOON).unwrap();
    mesh.del(&pod).unwrap().ok().unwrap();
    wait_foreseen(&mesh, 0, 1);
    mesh.manifests.pod(&pod, &PodOptions::mode("none")).unwrap();
    wait_foreseen(&mesh, 1, 0);
}

#[test]
fn nothing_is_foreseen_once_the_broker_is_gone() {
    let (mesh, pod) = foreseen("alone");
    mesh.broker.kill().unwrap();
    let outcome = mesh.add(&pod).unwrap();
    refused(&outcome, "BRK-NONE", "netns-executor", &pod);
    mesh.broker.start_again().unwrap();
    mesh.wait_serving().unwrap();
    // The refused pod has kept its sandbox, so that only another one can be foreseen.
    let other = mesh.node().pod("other").create().unwrap();
    mesh.manifests.pod(&other, &PodOptions::mode("none")).unwrap();
    wait_foreseen(&mesh, 1, 0);
}

//! The executor is killed while it enrols a running pod: whatever it had done, the pod is enrolled in the end, and keeps its
//! connections.

use std::time::{Duration, Instant};

use sluice_integration::netns_state::{joins, redirects};
use sluice_integration::scene::{PATIENCE, turn};
use sluice_proto::pb::workload::PodState;
use sluice_testkit::netns::Place;
use sluice_testkit::process::text;
use sluice_testkit::standin::Behaviour;
use sluice_testkit::wait::poll_true;

use crate::add_kills::{goes_on, stopped};
use crate::keep::Running;

/// How often it is killed at any moment.
const RANDOM_KILLS: u32 = 20;

/// Long enough to be killed in, shorter than the broker waits.
const PROXY_THINKS_MS: u64 = 3_000;

/// Labels the pod and kills the executor once `reached` holds; `meanwhile` undoes what made it stay there.
fn killed_when(running: &Running, reached: impl Fn() -> bool, meanwhile: impl FnOnce()) {
    let _turn = turn();
    let mut silent = running.open();
    running.label("ambient");
    poll_true("the stage is reached", PATIENCE, reached).unwrap();
    running.mesh.executor.kill().unwrap();
    meanwhile();
    running.mesh.executor.start_again().unwrap();
    running.wait_state(PodState::Enrolled);
    assert!(redirects(running.pod.netns()).unwrap());
    let entries = running.entries();
    let unknown = silent.unknown_to(&entries);
    assert!(unknown.is_empty(), "{unknown:#?} not in {entries:#?}");
    silent.assert_kept("enrolled");
    assert_eq!(running.captured(), 0, "kept connections are direct");
    running.assert_new_ones_are_captured();
}

#[test]
fn before_it_knows_the_connections() {
    let running = Running::added();
    let opener = running.mesh.opener.as_ref().unwrap();
    stopped(opener);
    let begun = || joins(running.pod.netns()).unwrap();
    killed_when(&running, begun, || {
        assert_eq!(running.entries(), [""; 0]);
        goes_on(opener);
    });
}

#[test]
fn before_it_redirects() {
    let running = Running::added();
    let thinks = Behaviour::default().delay_ms("add:default/runner", PROXY_THINKS_MS);
    running.mesh.control().behave(thinks).unwrap();
    let pending = || running.mesh.pod_state(&running.pod).unwrap().state() == PodState::Pending;
    killed_when(&running, pending, || {
        assert!(!redirects(running.pod.netns()).unwrap(), "killed too late");
    });
}

#[test]
fn at_any_moment() {
    let _turn = turn();
    let running = Running::added();
    let mut silent = running.open();
    let enrol = |kill_after: Option<Duration>| {
        let begun = Instant::now();
        running.label("ambient");
        if let Some(after) = kill_after {
            std::thread::sleep(after);
            running.mesh.executor.restart().unwrap();
        }
        running.wait_state(PodState::Enrolled);
        begun.elapsed()
    };
    let leave = || {
        running.label("none");
        running.wait_state(PodState::Out);
        // What was learnt about the connections is forgotten.
        text(&Place::from(running.pod.netns()), "conntrack", &["-F"], b"").unwrap();
    };
    // How long it takes here and now; the first one warms up.
    let whole = (0..4)
        .map(|_| {
            let took = enrol(None);
            leave();
            took
        })
        .min()
        .unwrap();
    for i in 0..RANDOM_KILLS {
        enrol(Some(whole * 2 * i / RANDOM_KILLS));
        silent.assert_kept(&format!("killed at {i}/{RANDOM_KILLS} of twice {whole:?}"));
        running.assert_new_ones_are_captured();
        leave();
    }
}

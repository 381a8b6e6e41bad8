//! A node that grows to 500 pods: restart at 100, ADD beside a node with 10, snapshot and live handoff at 500.

use std::time::{Duration, Instant};

use anyhow::Context;
use sluice_testkit::netns::Netns;
use sluice_testkit::wait::poll_until;

use super::Subject;
use super::floor;
use super::report::Report;
use super::rig::{IN_MESH, Rig};
use super::stats::{Samples, number};

const RESTARTS: usize = 5;
const SNAPSHOTS: usize = 25;
const LIVE: usize = 100;
const FLAT: usize = 80;
const PODS: usize = 500;

/// All of it.
pub(super) fn large_node(report: &mut Report, wanted: &dyn Fn(&[Subject]) -> bool) -> anyhow::Result<()> {
    let mut rig = Rig::start(&[])?;
    if wanted(&[Subject::Restart]) {
        rig.grow_to(100)?;
        restart(report, &mut rig)?;
    }
    if wanted(&[Subject::Handoff, Subject::Flat]) {
        rig.grow_to(PODS)?;
    }
    if wanted(&[Subject::Handoff]) {
        snapshots(report, &mut rig)?;
        live(report, &mut rig)?;
    }
    if wanted(&[Subject::Flat]) {
        flat(report, &mut rig)?;
    }
    Ok(())
}

/// `kill -9` of both, then both are started at once.
fn restart(report: &mut Report, rig: &mut Rig) -> anyhow::Result<()> {
    let (mut ready, mut snapshot, mut both) = (Samples::default(), Samples::default(), Samples::default());
    for _ in 0..RESTARTS {
        rig.mesh.executor.kill()?;
        rig.mesh.broker.kill()?;
        rig.peer = None;
        let began = Instant::now();
        rig.mesh.executor.start_again()?;
        rig.mesh.broker.start_again()?;
        poll_until("the broker is ready", Duration::from_secs(20), || {
            rig.mesh
                .node_status()
                .ok()
                .filter(|node| node.ready && node.executor.is_some())
        })?;
        let serving = began.elapsed();
        let (took, pods) = rig.connect_peer()?;
        anyhow::ensure!(
            pods == rig.pods.len(),
            "{pods} of {} pods in the snapshot after a restart",
            rig.pods.len()
        );
        ready.push(serving);
        snapshot.push(took);
        both.push(serving + took);
    }
    report.inform("restart with 100 pods until ready, p50", ready.median(), "ms");
    report.inform(
        "then proxy's connect until the snapshot is acked, p50",
        snapshot.median(),
        "ms",
    );
    report.bound(
        "restart of executor and broker, together, p50",
        both.median(),
        "ms",
        150.0,
    );
    Ok(())
}

/// Snapshots of all pods, each beside as many messages over a bare pair.
fn snapshots(report: &mut Report, rig: &mut Rig) -> anyhow::Result<()> {
    let netns = Netns::new()?;
    let bare = floor::BarePair::start()?;
    let (mut pair, mut whole) = (Samples::default(), Samples::default());
    for _ in 0..SNAPSHOTS {
        pair.push(bare.pass(&netns, u32::try_from(PODS)?)?);
        let (took, pods) = rig.connect_peer()?;
        anyhow::ensure!(
            pods == rig.pods.len(),
            "{pods} of {} pods in the snapshot",
            rig.pods.len()
        );
        whole.push(took);
    }
    let each = whole.median() / number(PODS) * 1000.0;
    report.inform(&format!("snapshot of {PODS} pods, p50"), whole.median(), "ms");
    report.against(
        "snapshot, for each pod",
        each,
        (floor::PAIR, pair.median() * 1000.0),
        0.7,
        "us",
    );
    Ok(())
}

/// Handoff of pods that are added while the proxy is connected, as the broker times it: from the message to its answer.
/// Beside each, one message over a bare pair whose other end slept as the proxy does between two pods.
fn live(report: &mut Report, rig: &mut Rig) -> anyhow::Result<()> {
    let netns = Netns::new()?;
    let bare = floor::BarePair::start()?;
    let pods = rig.make(LIVE, IN_MESH)?;
    rig.wait_quiet()?;
    let (mut pair, mut acked) = (Samples::default(), Samples::default());
    for pod in &pods {
        pair.push(bare.pass(&netns, 1)?);
        rig.add(pod)?;
        let status = rig.mesh.describe(pod)?.pod.context("an added pod is not known")?;
        let ack = status
            .timings
            .iter()
            .find(|timing| timing.stage == "ack")
            .context("no time of the handoff")?;
        acked.push(Duration::from_micros(ack.microseconds));
    }
    report.against(
        "handoff of a live ADD, p50",
        acked.median() * 1000.0,
        (floor::ONE, pair.median() * 1000.0),
        1.5,
        "us",
    );
    rig.remove(pods)
}

/// ADD on a node with 10 and on one with 500 pods, in turns: an ADD right after another one is slower than one after a DEL, so
/// each node is the first in every other round. Namespaces are removed only afterwards, for the same reason.
fn flat(report: &mut Report, full: &mut Rig) -> anyhow::Result<()> {
    let mut small = Rig::start(&[])?;
    small.grow_to(10)?;
    let (few, many) = (small.make(FLAT, IN_MESH)?, full.make(FLAT, IN_MESH)?);
    let (mut with_few, mut with_many) = (Samples::default(), Samples::default());
    small.wait_quiet()?;
    full.wait_quiet()?;
    for (round, (few, many)) in few.iter().zip(&many).enumerate() {
        if round % 2 == 0 {
            with_few.push(small.add(few)?.elapsed);
            with_many.push(full.add(many)?.elapsed);
        } else {
            with_many.push(full.add(many)?.elapsed);
            with_few.push(small.add(few)?.elapsed);
        }
        small.del(few)?;
        full.del(many)?;
    }
    small.remove(few)?;
    full.remove(many)?;
    report.against(
        "ADD with 500 pods on the node, p50",
        with_many.median(),
        ("ADD with 10", with_few.median()),
        1.1,
        "ms",
    );
    Ok(())
}

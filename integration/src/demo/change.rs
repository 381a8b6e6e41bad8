//! A label change puts a running pod into the mesh and takes it out again, under load.

use std::time::{Duration, Instant};

use sluice_proto::pb::workload::PodState;
use sluice_testkit::pod::Pod;
use sluice_testkit::traffic::client::{Load, LoadOptions, LoadReport};

use super::kernel::{Snapshot, View};
use super::narrator::{Narrator, Step, ms};
use super::stage::{Stage, steady};
use super::start::add;
use crate::manifests::PodOptions;
use crate::mesh::SOON;

/// Both ways.
pub(super) fn label(narrator: &mut Narrator, stage: &Stage) {
    narrator.step(
        "A label takes a running pod into the mesh and out again",
        "Pod mover makes 200 requests a second over new connections while its label changes. 20 connections are kept from \
         before the label, 20 more from while the pod is in the mesh. When the rules change is read from the kernel; what goes \
         through the proxy, from the proxy's counters.",
        |step| {
            let mover = add(step, &stage.mesh, "mover", false)?;
            let plain = View::of(mover.netns())?.snapshot()?;
            let load = Load::start(mover.netns(), steady(&stage.plain).only_new(200))?;
            let kept = || LoadOptions { new_per_second: 0, ..steady(&stage.plain) };
            let direct = Load::start(mover.netns(), kept())?;
            load.wait_answered(100, SOON)?;
            direct.wait_answered(40, SOON)?;
            join(step, stage, &mover, &load)?;
            direct.wait_answered(40, SOON)?;
            let broken = direct.report().failures.len();
            step.saw(
                broken == 0,
                format!("connections opened before the label that broke when it came: {broken} of 20"),
            );
            let relayed = Load::start(mover.netns(), kept())?;
            relayed.wait_answered(40, SOON)?;
            leave(step, stage, &mover, &load)?;
            for kept in [&direct, &relayed] {
                kept.wait_answered(40, SOON)?;
            }
            let loads = [load.stop(), direct.stop(), relayed.stop()];
            lost_nothing(step, &loads);
            emptied(step, stage, &mover, &plain)?;
            stage.mesh.del(&mover)?.ok()?;
            stage.mesh.manifests.delete_pod(&mover)?;
            Ok(())
        },
    );
}

/// What failed while the label came and went: requests over new connections, over those kept from before it, and over those
/// kept from after it.
fn lost_nothing(step: &mut Step, [new, direct, relayed]: &[LoadReport; 3]) {
    let (lost, failed) = (direct.failures.len() + relayed.failures.len(), new.failures.len());
    step.saw(
        failed + lost == 0,
        format!(
            "requests over new connections: {} answered, {failed} failed {}; over the connections from before the label: {} \
             answered, {} failed {}; over those from after it: {} answered, {} failed {}",
            new.answered(),
            said(new.failures.first()),
            direct.answered(),
            direct.failures.len(),
            said(direct.failures.first()),
            relayed.answered(),
            relayed.failures.len(),
            said(relayed.failures.first()),
        ),
    );
    step.sums_up(format!(
        "{} requests, {failed} failed; {lost} kept connections lost",
        new.answered()
    ));
}

/// A first failure in words, or nothing.
pub(super) fn said(failure: Option<&impl std::fmt::Debug>) -> String {
    failure.map_or_else(String::new, |failure| format!("(first: {failure:?})"))
}

/// Renames the manifest with another label into place, and waits until the kernel has other rules; gives when.
fn relabel(stage: &Stage, mover: &Pod, mode: &str) -> anyhow::Result<(Instant, Duration)> {
    let view = View::of(mover.netns())?;
    let before = view.generation()?;
    let began = Instant::now();
    stage.mesh.manifests.pod(mover, &PodOptions::mode(mode))?;
    let changed = || view.generation().ok().filter(|now| *now != before);
    let (took, _) = Stage::timed("the rules of the pod change", SOON, changed)?;
    Ok((began, took))
}

fn join(step: &mut Step, stage: &Stage, mover: &Pod, load: &Load) -> anyhow::Result<()> {
    step.does("label ambient");
    let (began, took) = relabel(stage, mover, "ambient")?;
    stage.mesh.wait_state(mover, PodState::Enrolled, SOON)?;
    let enrolled = began.elapsed();
    let (_, relayed) = Stage::timed("a connection goes through the proxy", SOON, || {
        stage
            .relayed(mover)
            .ok()
            .map(|counts| counts.outbound)
            .filter(|outbound| *outbound > 0)
    })?;
    let first = began.elapsed();
    load.wait_answered(100, SOON)?;
    let later = stage.relayed(mover)?.outbound;
    step.saw(
        later > relayed,
        format!(
            "rules in the pod after {:.1} ms, told as enrolled after {:.1} ms, first connection seen relayed after {:.1} ms; \
             {later} relayed by now",
            ms(took),
            ms(enrolled),
            ms(first),
        ),
    );
    step.sums_up(format!(
        "in: rules after {:.1} ms, enrolled after {:.1} ms",
        ms(took),
        ms(enrolled)
    ));
    Ok(())
}

fn leave(step: &mut Step, stage: &Stage, mover: &Pod, load: &Load) -> anyhow::Result<()> {
    step.does("label none");
    let (_, took) = relabel(stage, mover, "none")?;
    // What was accepted before the change may be counted a moment after it.
    load.wait_answered(20, SOON)?;
    let before = stage.relayed(mover)?;
    load.wait_answered(200, SOON)?;
    let after = stage.relayed(mover)?;
    let new = after.outbound - before.outbound;
    step.saw(
        new == 0 && after.open >= 20,
        format!(
            "rules in the pod changed after {:.1} ms; of the next 200 requests {new} went over a new connection through the \
             proxy; {} kept connections still go through it",
            ms(took),
            after.open,
        ),
    );
    step.sums_up(format!("out: after {:.1} ms", ms(took)));
    Ok(())
}

fn emptied(step: &mut Step, stage: &Stage, mover: &Pod, plain: &Snapshot) -> anyhow::Result<()> {
    let view = View::of(mover.netns())?;
    let last = || view.snapshot().ok().filter(|now| now == plain);
    let (took, _) = Stage::timed("the pod is as it was before", Duration::from_secs(20), last)?;
    let status = stage.mesh.wait_state(mover, PodState::Out, SOON)?;
    step.saw(
        true,
        format!(
            "rules, sets, policy routing and routes of the pod equal to before {:.1} ms after the last kept connection ended; \
             the broker says out: {}",
            ms(took),
            status.verdict
        ),
    );
    Ok(())
}

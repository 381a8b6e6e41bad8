//! Processes are killed under load, and rules are damaged by hand.

use std::time::{Duration, Instant};

use anyhow::Context;
use sluice_proto::pb::workload::PodState;
use sluice_testkit::process::Process;
use sluice_testkit::traffic::client::{Load, fetch};

use super::change::said;
use super::kernel::View;
use super::narrator::{Narrator, Step, ms};
use super::stage::{ANSWER, Stage, steady};
use super::traffic;
use crate::mesh::SOON;

/// Longest wait for a repair: a drift pass every few seconds.
const REPAIR: Duration = Duration::from_secs(40);

/// `kill -9` of each process.
pub(super) fn kills(narrator: &mut Narrator, stage: &Stage) {
    narrator.step(
        "kill -9 of every process",
        "200 requests a second over new connections and 20 kept ones go on from pod client to pod server while each \
         process is killed and started again. The kernel's generation number moves with every change of a rule.",
        |step| {
            let mesh = &stage.mesh;
            let opener = mesh.opener.as_ref().context("no opener")?;
            let load = Load::start(stage.client.netns(), steady(&stage.server))?;
            load.wait_answered(50, SOON)?;
            let before = generations(stage)?;
            kill(step, stage, &load, &[&mesh.executor])?;
            kill(step, stage, &load, &[&mesh.broker])?;
            kill(step, stage, &load, &[&mesh.executor, &mesh.broker])?;
            kill(step, stage, &load, &[opener])?;
            let after = generations(stage)?;
            let report = load.stop();
            step.saw(
                report.failures.is_empty(),
                format!(
                    "requests: {} answered, {} failed, slowest {:.0} ms {}",
                    report.answered(),
                    report.failures.len(),
                    ms(report.slowest),
                    said(report.failures.first())
                ),
            );
            step.saw(before == after, format!("generation of the rules in client, server, plain: {before:?}, now {after:?}"));
            step.sums_up(format!("{} requests, {} failed", report.answered(), report.failures.len()));
            step.sums_up(format!("rules changed: {}", before != after));
            Ok(())
        },
    );
}

fn generations(stage: &Stage) -> anyhow::Result<[u32; 3]> {
    Ok([
        Stage::generation(&stage.client)?,
        Stage::generation(&stage.server)?,
        Stage::generation(&stage.plain)?,
    ])
}

fn kill(step: &mut Step, stage: &Stage, load: &Load, processes: &[&Process]) -> anyhow::Result<()> {
    let names: Vec<_> = processes.iter().map(|process| process.name()).collect();
    let names = names.join(" and ");
    let failed = load.report().failures.len();
    for process in processes {
        process.kill()?;
    }
    load.wait_answered(50, SOON)?;
    let began = Instant::now();
    for process in processes {
        process.start_again()?;
    }
    stage.mesh.wait_serving()?;
    let serving = began.elapsed();
    for pod in [&stage.client, &stage.server] {
        stage.mesh.wait_state(pod, PodState::Enrolled, SOON)?;
    }
    let enrolled = began.elapsed();
    load.wait_answered(50, SOON)?;
    let failures = load.report().failures.len() - failed;
    step.saw(
        failures == 0,
        format!(
            "{names} killed; requests failed while away and after: {failures}; started again: serving after {:.0} ms, both pods \
             known as enrolled after {:.0} ms",
            ms(serving),
            ms(enrolled)
        ),
    );
    Ok(())
}

/// Rules removed behind the executor's back.
pub(super) fn damage(narrator: &mut Narrator, stage: &Stage) {
    narrator.step(
        "Damage is found and repaired",
        "All rules of a pod are flushed by hand, then the table with the host's probe rules is deleted, both over \
         netlink.",
        |step| {
            flushed(step, stage)?;
            host_table(step, stage)
        },
    );
}

fn flushed(step: &mut Step, stage: &Stage) -> anyhow::Result<()> {
    let view = View::of(stage.client.netns())?;
    let (sound, repaired) = (view.snapshot()?, stage.executor()?.repaired_pods);
    view.flush_table("sluice")?;
    let began = Instant::now();
    step.does(format!(
        "rules of pod client flushed: {} before, {} now",
        sound.rules(),
        view.rules()?
    ));
    let rules = || view.rules().ok().filter(|rules| *rules == sound.rules());
    Stage::timed("the rules are back", REPAIR, rules)?;
    let took = began.elapsed();
    let counted = || Some(stage.executor().ok()?.repaired_pods).filter(|now| *now > repaired);
    let (_, counted) = Stage::timed("the repair is counted", SOON, counted)?;
    let before = stage.relayed(&stage.client)?.outbound;
    let seen = fetch(stage.client.netns(), Stage::app(&stage.server, false), ANSWER)?;
    let relayed = stage.relayed(&stage.client)?.outbound - before;
    step.saw(
        relayed == 1 && seen.peer.ip() == stage.client.address(false),
        format!(
            "{} rules again after {:.1} s; repairs counted by the executor {repaired}, now {counted}; the next request was \
             relayed {relayed} time",
            view.rules()?,
            took.as_secs_f64(),
        ),
    );
    step.sums_up(format!("pod rules back after {:.1} s", took.as_secs_f64()));
    Ok(())
}

fn host_table(step: &mut Step, stage: &Stage) -> anyhow::Result<()> {
    let view = View::of(stage.mesh.node().netns())?;
    let (rules, repaired) = (view.rules()?, stage.executor()?.repaired_host);
    view.delete_table("sluice-host")?;
    let began = Instant::now();
    step.does(format!(
        "the host's table deleted: {rules} rules before, {} now",
        view.rules()?
    ));
    let back = || view.rules().ok().filter(|now| *now == rules);
    Stage::timed("the host's rules are back", REPAIR, back)?;
    let counted = || Some(stage.executor().ok()?.repaired_host).filter(|now| *now > repaired);
    let (_, counted) = Stage::timed("the repair is counted", SOON, counted)?;
    let took = began.elapsed();
    step.saw(
        true,
        format!(
            "{} rules again after {:.1} s; repairs counted by the executor {repaired}, now {counted}",
            view.rules()?,
            took.as_secs_f64()
        ),
    );
    step.sums_up(format!("host rules back after {:.1} s", took.as_secs_f64()));
    traffic::probe(step, stage, false)
}

//! Size of the plugin, memory of everything, and what a node with 250 pods costs while nothing happens.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use nix::sys::resource::{UsageWho, getrusage};
use nix::time::{ClockId, clock_getcpuclockid};
use nix::unistd::Pid;
use sluice_testkit::cni::{Attachment, start_program};
use sluice_testkit::process::status::ProcStatus;
use sluice_testkit::process::{Process, binary};

use super::Subject;
use super::adds;
use super::report::Report;
use super::rig::{IN_MESH, Rig};
use crate::kernel_state::family;

/// Milliseconds between two looks in the drift measurement; the share of full comparisons is that of the defaults.
const DRIFT: u32 = 500;
const FULL_DRIFT: u32 = 3000;
/// Passes measured: two rounds of full comparisons, of which a pod that tells of changes is in every tenth.
const PASSES: u32 = 12;

fn mib(bytes: u64) -> f64 {
    f64::from(u32::try_from(bytes / 1024).unwrap_or(u32::MAX)) / 1024.0
}

/// The plugin's file and its memory.
pub(super) fn plugin(report: &mut Report) -> anyhow::Result<()> {
    let path = binary("sluice-cni")?;
    let megabytes = f64::from(u32::try_from(std::fs::metadata(&path)?.len())?) / 1e6;
    report.bound("plugin, size of the file", megabytes, "MB", 3.5);
    let mut rig = Rig::start(&[])?;
    let pods = rig.make(1, IN_MESH)?;
    let pod = pods.first().context("no pod")?;
    let chain = rig.mesh.chain()?;
    let plugin = chain.plugins.first().context("empty chain")?;
    let running = start_program(
        rig.mesh.node().place(),
        "peak-memory",
        &binary("peak-memory")?,
        vec![path.to_string_lossy().into_owned()],
        chain.env_of("ADD", Some(&Attachment::from(pod))),
        chain
            .stdin_of(plugin, Some(&pod.prev_result("1.0.0")))
            .to_string()
            .into_bytes(),
    )?;
    let execution = running.wait()?;
    anyhow::ensure!(
        execution.status.success(),
        "ADD: {} {}",
        execution.stdout,
        execution.stderr
    );
    let kib: u32 = execution
        .stderr
        .trim()
        .parse()
        .with_context(|| format!("peak memory {:?}", execution.stderr))?;
    report.bound(
        "plugin, peak memory of ADD of a mesh pod",
        f64::from(kib) / 1024.0,
        "MiB",
        3.0,
    );
    rig.remove(pods)
}

/// Executes `program` with stdin and environment of this process and tells its peak resident memory. A small process of
/// its own, because at exec the kernel counts the memory of whoever forked as the child's (getrusage(2)).
pub fn peak_of(program: &Path) -> anyhow::Result<bool> {
    let environment: Vec<_> = std::env::vars().collect();
    let mut stdin = Vec::new();
    std::io::Read::read_to_end(&mut std::io::stdin(), &mut stdin)?;
    let place = sluice_testkit::netns::Place::default();
    let execution = start_program(&place, "program", program, Vec::new(), environment, stdin)?.wait()?;
    eprintln!("{}", getrusage(UsageWho::RUSAGE_CHILDREN)?.max_rss());
    Ok(execution.status.success())
}

/// Concurrency, memory and drift on a node that ends with 250 pods.
pub(super) fn full_node(report: &mut Report, wanted: &dyn Fn(&[Subject]) -> bool) -> anyhow::Result<()> {
    let intervals = [
        format!("--drift-interval-ms={DRIFT}"),
        format!("--full-drift-interval-ms={FULL_DRIFT}"),
    ];
    if wanted(&[Subject::Concurrent]) {
        let mut rig = Rig::start(&[])?;
        for count in [50, 100, 250] {
            adds::concurrent(report, &mut rig, count, count == 250)?;
        }
        memory(report, &rig, "after a burst of 250 ADDs", false)?;
    }
    if wanted(&[Subject::Size, Subject::Drift]) {
        let mut rig = Rig::start(&intervals.each_ref().map(String::as_str))?;
        rig.grow_to(250)?;
        if wanted(&[Subject::Size]) {
            memory(report, &rig, "with 250 enrolled pods", true)?;
        }
        if wanted(&[Subject::Drift]) {
            rig.wait_quiet()?;
            drift(report, &rig.mesh.executor)?;
        }
    }
    Ok(())
}

fn memory(report: &mut Report, rig: &Rig, when: &str, targets: bool) -> anyhow::Result<()> {
    let opener = rig.mesh.opener.as_ref().context("no opener")?;
    let limits = [(&rig.mesh.executor, 8.0), (opener, 2.0), (&rig.mesh.broker, 14.0)];
    for (process, limit) in limits {
        let mut bytes = 0;
        for pid in family(process.pid())? {
            bytes += ProcStatus::read(pid)?.rss();
        }
        let subject = format!("{}, memory {when}", process.name());
        if targets {
            report.bound(&subject, mib(bytes), "MiB", limit);
        } else {
            report.inform(&subject, mib(bytes), "MiB");
        }
    }
    Ok(())
}

/// CPU time of a process so far, threads that ended included.
fn cpu(process: &Process) -> anyhow::Result<Duration> {
    let clock = clock_getcpuclockid(Pid::from_raw(i32::try_from(process.pid())?))?;
    Ok(ClockId::now(clock)?.into())
}

fn drift(report: &mut Report, executor: &Process) -> anyhow::Result<()> {
    let before = cpu(executor)?;
    // Time itself is measured: so many passes are made meanwhile.
    std::thread::sleep(Duration::from_millis((DRIFT * PASSES).into()));
    let milliseconds = cpu(executor)?.saturating_sub(before).as_secs_f64() * 1000.0;
    report.bound(
        "drift check of 250 healthy pods, CPU",
        milliseconds / f64::from(PASSES),
        "ms",
        5.0,
    );
    Ok(())
}

//! What Sluice refuses, and what it waits for.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::Context;
use sluice_proto::pb::cni::add_response;
use sluice_proto::pb::workload::PodState;
use sluice_testkit::cni::Attachment;
use sluice_testkit::netns::Netns;
use sluice_testkit::pod::Pod;

use super::kernel::View;
use super::narrator::{Narrator, Step, ms};
use super::stage::Stage;
use crate::add_client::{AddClient, attachment, descriptors};
use crate::manifests::PodOptions;
use crate::mesh::SOON;

/// Descriptors that are not a new pod's.
pub(super) fn forged(narrator: &mut Narrator, stage: &Stage) {
    narrator.step(
        "A forged descriptor is refused",
        "A caller on the plugin's socket hands over network namespaces that are not its pod's. The executor must name \
         what is wrong, count it, and touch nothing.",
        |step| {
            let pod = stage.mesh.node().pod("forger").create()?;
            let host = stage.mesh.node().netns().clone();
            let own = File::open(format!("/proc/{}/ns/net", stage.mesh.executor.pid()))?;
            let own = Netns::from_fd(own.into());
            let host_view = View::of(&host)?;
            let generation = host_view.generation()?;
            let mut refusals = 0;
            for (what, netns) in [
                ("the host's network namespace", &host),
                ("the executor's own", &own),
                ("one that another pod has", stage.client.netns()),
            ] {
                refusals += u32::from(refused(step, stage, &pod, what, descriptors(netns)?)?);
            }
            let mut sockets = descriptors(pod.netns())?;
            sockets[0] = File::open("/proc/version")?.into();
            refusals += u32::from(refused(step, stage, &pod, "a regular file", sockets)?);
            refusals += u32::from(refused(step, stage, &pod, "nothing", Vec::new())?);
            let now = host_view.generation()?;
            step.saw(now == generation, format!("generation of the host's rules: {generation}, now {now}"));
            step.sums_up(format!("{refusals} of 5 refused and counted"));
            Ok(())
        },
    );
}

fn refused(
    step: &mut Step,
    stage: &Stage,
    pod: &Pod,
    what: &str,
    descriptors: Vec<OwnedFd>,
) -> anyhow::Result<bool> {
    let counted = |stage: &Stage| -> anyhow::Result<u64> {
        Ok(stage
            .executor()?
            .refused_descriptors
            .iter()
            .map(|counter| counter.value)
            .sum())
    };
    let before = counted(stage)?;
    let answer = ask(stage, pod, descriptors)?;
    let count = counted(stage)? - before;
    let held = answer.is_err() && count == 1;
    let text = answer.err().unwrap_or_else(|| "admitted".to_owned());
    step.saw(held, format!("{what}: {text}; counted {count}"));
    Ok(held)
}

/// ADD with these descriptors; `Err` says why it was refused.
fn ask(stage: &Stage, pod: &Pod, descriptors: Vec<OwnedFd>) -> anyhow::Result<Result<(), String>> {
    let client = AddClient::new(&stage.mesh.run)?;
    Ok(match client.add_with(pod, attachment(pod), descriptors) {
        Ok(answer) => match answer.outcome {
            Some(add_response::Outcome::Admitted(_)) => Ok(()),
            Some(add_response::Outcome::Refused(failure)) => {
                Err(format!("{}: {}", failure.code, failure.cause))
            }
            other => Err(format!("{other:?}")),
        },
        Err(error) => Err(format!("{error:#}")),
    })
}

/// The agent is not there.
pub(super) fn agent_down(narrator: &mut Narrator, stage: &Stage) {
    narrator.step(
        "Without the agent the plugin refuses",
        "A pod that cannot be classified must not start outside of the mesh by accident: the plugin answers with CNI \
         error 11 (try again later), and the runtime tries again.",
        |step| {
            let pod = stage.mesh.node().pod("early").dual_stack().create()?;
            stage.mesh.manifests.pod(&pod, &PodOptions::default())?;
            stage.mesh.executor.kill()?;
            let outcome = stage.mesh.add(&pod)?;
            let execution = outcome.last();
            let error: serde_json::Value = serde_json::from_str(&execution.stdout).context("CNI error document")?;
            step.saw(
                !execution.status.success() && error["code"] == 11 && Stage::rules(&pod)? == 0,
                format!("executor killed; ADD: {} after {:.0} ms, and printed:", execution.status, ms(execution.elapsed)),
            );
            step.notes(execution.stdout.trim());
            step.sums_up(format!("code {} after {:.0} ms", error["code"], ms(execution.elapsed)));
            stage.mesh.executor.start_again()?;
            stage.mesh.wait_serving()?;
            let again = stage.mesh.add(&pod)?.ok()?.last().elapsed;
            let status = stage.mesh.wait_state(&pod, PodState::Enrolled, SOON)?;
            let rules = Stage::rules(&pod)?;
            step.saw(
                rules > 0,
                format!("executor started again; ADD again: {:.1} ms, {rules} rules, {}", ms(again), status.verdict),
            );
            step.sums_up("then admitted");
            stage.mesh.del(&pod)?.ok()?;
            stage.mesh.manifests.delete_pod(&pod)?;
            Ok(())
        },
    );
}

/// The proxy is not there.
pub(super) fn proxy_away(narrator: &mut Narrator, stage: &Stage) {
    narrator.step(
        "Without the proxy ADD waits",
        "The proxy is killed before a mesh pod is added. Failing at once would cost the kubelet's back-off of more than \
         ten seconds; ADD waits within its deadline.",
        |step| {
            let proxy = stage.mesh.proxy.as_ref().context("no stand-in")?;
            proxy.kill()?;
            let pod = stage.mesh.node().pod("patient").dual_stack().create()?;
            stage.mesh.manifests.pod(&pod, &PodOptions::default())?;
            let chain = stage.mesh.chain()?;
            let plugin = chain.plugins.first().context("empty chain")?;
            let attachment = Attachment::from(&pod);
            let began = Instant::now();
            let running = chain.start(plugin, "ADD", Some(&attachment), Some(&pod.prev_result("1.0.0")))?;
            let status = stage.mesh.wait_state(&pod, PodState::Pending, SOON)?;
            let enough = || (began.elapsed() > Duration::from_millis(1500)).then_some(());
            Stage::timed("a while goes by", SOON, enough)?;
            let waits = std::path::Path::new(&format!("/proc/{}", running.pid())).exists();
            step.saw(
                waits,
                format!("ADD still runs after {:.0} ms: {waits}; the broker says pending: {}", ms(began.elapsed()), status.reason),
            );
            let returned = Instant::now();
            proxy.start_again()?;
            let execution = running.wait()?;
            let since = returned.elapsed();
            let rules = Stage::rules(&pod)?;
            step.saw(
                execution.status.success() && rules > 0,
                format!(
                    "proxy started; ADD: {} {:.0} ms later, {:.0} ms in all, {rules} rules in the pod {}",
                    execution.status,
                    ms(since),
                    ms(execution.elapsed),
                    if execution.status.success() { "" } else { &execution.stdout },
                ),
            );
            step.sums_up(format!("waited, then admitted {:.0} ms after the proxy's start", ms(since)));
            stage.mesh.control().wait_ready(SOON)?;
            stage.mesh.del(&pod)?.ok()?;
            stage.mesh.manifests.delete_pod(&pod)?;
            Ok(())
        },
    );
}

/// DEL.
pub(super) fn leaving(narrator: &mut Narrator, stage: &Stage) {
    narrator.step(
        "DEL leaves nothing behind",
        "What the kernel has in a pod is dumped before ADD and after DEL; then the sandbox is deleted, and nobody may \
         hold on to its network namespace.",
        |step| {
            let pod = stage.mesh.node().pod("brief").dual_stack().create()?;
            let view = View::of(pod.netns())?;
            let before = view.snapshot()?;
            stage.mesh.manifests.pod(&pod, &PodOptions::default())?;
            stage.mesh.add(&pod)?.ok()?;
            stage.mesh.wait_state(&pod, PodState::Enrolled, SOON)?;
            let during = view.snapshot()?;
            let addresses = pod.addresses();
            let probed = View::of(stage.mesh.node().netns())?.probed(addresses)?;
            step.saw(
                during != before && during.rules() > 0 && probed == addresses.len(),
                format!(
                    "after ADD: {} rules, {} further routes, {probed} of {} addresses in the host's probe sets",
                    during.rules(),
                    during.routes.len(),
                    addresses.len()
                ),
            );
            let took = stage.mesh.del(&pod)?.ok()?.last().elapsed;
            let same = view.snapshot()? == before;
            step.saw(same, format!("DEL: {:.1} ms; rules, sets, policy rules and routes equal to before ADD: {same}", ms(took)));
            drop(view);
            gone(step, stage, pod)?;
            step.sums_up(format!("DEL {:.1} ms, equal to before: {same}", ms(took)));
            Ok(())
        },
    );
}

fn gone(step: &mut Step, stage: &Stage, pod: Pod) -> anyhow::Result<()> {
    let (inode, interface) = (pod.netns().inode(), pod.host_ifname().to_owned());
    let (uid, addresses) = (pod.uid().to_owned(), pod.addresses().to_vec());
    stage.mesh.manifests.delete_pod(&pod)?;
    pod.delete()?;
    let began = Instant::now();
    crate::descriptors::wait_let_go(&stage.mesh, inode, &interface, Duration::from_secs(2))?;
    let took = began.elapsed();
    let proxy = stage.mesh.control().counts()?.workloads.contains_key(&uid);
    let set = View::of(stage.mesh.node().netns())?.probed(&addresses)?;
    step.saw(
        !proxy && set == 0,
        format!(
            "sandbox deleted: interface {interface} gone and no descriptor of it in any process after {:.1} ms; held by the \
             proxy: {proxy}; addresses of it in the probe sets: {set}",
            ms(took)
        ),
    );
    step.sums_up(format!("veth gone after {:.1} ms", ms(took)));
    Ok(())
}

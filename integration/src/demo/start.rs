//! The node comes up, and pods are added through the plugin.

use std::time::Instant;

use anyhow::Context;
use sluice_proto::paths::BROKER_UID;
use sluice_proto::pb::workload::PodState;
use sluice_testkit::netns::Place;
use sluice_testkit::pod::Pod;
use sluice_testkit::process::Capability;
use sluice_testkit::process::status::ProcStatus;
use sluice_testkit::traffic::server::EchoServer;

use super::narrator::{Narrator, Step, ms};
use super::stage::{PORT, Stage};
use crate::kernel_state::family;
use crate::manifests::PodOptions;
use crate::mesh::{Mesh, SOON};

/// Starts the processes.
pub(super) fn node(narrator: &mut Narrator) -> Option<Mesh> {
    narrator.step(
        "The node starts",
        "Each process is started apart, as in its container: own network namespace, own user, only its capabilities. \
         What they hold is read from /proc.",
        |step| {
            let began = Instant::now();
            let mesh = Mesh::start()?;
            let took = began.elapsed();
            step.notes(format!("all processes answer, the stand-in proxy took its snapshot: {:.0} ms", ms(took)));
            privileges(step, &mesh)?;
            host_sockets(step, &mesh)?;
            Ok(mesh)
        },
    )
}

fn privileges(step: &mut Step, mesh: &Mesh) -> anyhow::Result<()> {
    let opener = mesh.opener.as_ref().context("no opener")?;
    let admin = [Capability::CAP_NET_ADMIN].as_slice();
    let enter = [Capability::CAP_SYS_ADMIN, Capability::CAP_SYS_PTRACE].as_slice();
    let node_netns = mesh.node().netns().inode();
    let (mut processes, mut held_all) = (0, true);
    for (process, uid, allowed) in [
        (&mesh.executor, 0, admin),
        (opener, 0, enter),
        (&mesh.broker, BROKER_UID, [].as_slice()),
    ] {
        for pid in family(process.pid())? {
            let status = ProcStatus::read(pid)?;
            let uids = status.uids();
            let foreign = status
                .thread_netns()?
                .into_values()
                .all(|netns| netns != node_netns);
            let fits = uids.iter().all(|found| *found == uid)
                && status.permitted().iter().all(|found| allowed.contains(found))
                && status.no_new_privs()
                && status.has_seccomp_filter()
                && foreign;
            held_all &= fits;
            processes += 1;
            step.saw(
                fits,
                format!(
                    "{:<15} pid {pid}, uid {}, capabilities {:?}, NoNewPrivs {}, seccomp filter {}, in the host's \
                     network namespace {}, {:.1} MiB",
                    process.name(),
                    uids.first().copied().unwrap_or_default(),
                    status.effective(),
                    status.no_new_privs(),
                    status.has_seccomp_filter(),
                    !foreign,
                    mib(status.rss()),
                ),
            );
        }
    }
    step.sums_up(format!(
        "{processes} processes, none with more than its capabilities: {held_all}"
    ));
    Ok(())
}

fn mib(bytes: u64) -> f64 {
    f64::from(u32::try_from(bytes / 1024).unwrap_or(u32::MAX)) / 1024.0
}

/// TCP and UDP sockets in the netns that plays the host's, from `/proc/net`.
fn host_sockets(step: &mut Step, mesh: &Mesh) -> anyhow::Result<()> {
    let place: &Place = mesh.node().place();
    let lines = place.run(|| {
        let mut lines = 0;
        for file in ["tcp", "tcp6", "udp", "udp6"] {
            let text = std::fs::read_to_string(format!("/proc/thread-self/net/{file}"))?;
            lines += text.lines().skip(1).count();
        }
        std::io::Result::Ok(lines)
    })?;
    step.saw(
        lines == 0,
        format!("TCP and UDP sockets open in the host's network namespace: {lines}"),
    );
    step.sums_up(format!("{lines} sockets on the host"));
    Ok(())
}

/// Makes the pods and adds them.
pub(super) fn pods(narrator: &mut Narrator, mesh: Mesh) -> Option<Stage> {
    narrator.step(
        "Pods are added",
        "Four pods: network namespace, veth and addresses as the primary CNI plugin leaves them, then ADD through \
         sluice-cni. The Kubernetes namespace is labelled ambient; two pods are labelled none.",
        |step| {
            mesh.manifests.namespace("default", "ambient")?;
            let client = add(step, &mesh, "client", true)?;
            let server = add(step, &mesh, "server", true)?;
            let plain = add(step, &mesh, "plain", false)?;
            let outsider = add(step, &mesh, "outsider", false)?;
            let held = mesh.control().counts()?.workloads;
            let right = [&client, &server].iter().all(|pod| held.contains_key(pod.uid())) && held.len() == 2;
            step.saw(right, format!("the proxy was handed the network namespaces of {} pods", held.len()));
            let apps = [&client, &server, &plain, &outsider].map(|pod| EchoServer::start(pod.netns(), PORT));
            let apps = apps.into_iter().collect::<Result<_, _>>()?;
            Ok(Stage { client, server, plain, outsider, _apps: apps, mesh })
        },
    )
}

/// Makes one pod, declares it and adds it; tells the time of ADD, its result and the rules that the kernel then has.
pub(super) fn add(step: &mut Step, mesh: &Mesh, name: &str, in_mesh: bool) -> anyhow::Result<Pod> {
    let pod = mesh.node().pod(name).dual_stack().create()?;
    let options = if in_mesh {
        PodOptions::default()
    } else {
        PodOptions::mode("none")
    };
    mesh.manifests.pod(&pod, &options)?;
    let outcome = mesh.add(&pod)?.ok()?;
    let elapsed = outcome.last().elapsed;
    let unchanged = outcome.result.as_ref() == Some(&pod.prev_result("1.0.0"));
    let state = if in_mesh {
        PodState::Enrolled
    } else {
        PodState::Out
    };
    let status = mesh.wait_state(&pod, state, SOON)?;
    let rules = Stage::rules(&pod)?;
    step.saw(
        unchanged && (rules > 0) == in_mesh,
        format!(
            "ADD of {name}: {:.1} ms, result passed through unchanged: {unchanged}; {rules} rules in the pod; the broker \
             says {}: {}",
            ms(elapsed),
            state.as_str_name().trim_start_matches("POD_STATE_").to_lowercase(),
            status.verdict,
        ),
    );
    step.sums_up(format!("{name} {:.1} ms", ms(elapsed)));
    Ok(pod)
}

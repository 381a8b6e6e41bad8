//! The plugin is killed in the middle of each stage of ADD, as a runtime does after its time-out: nothing is left.
//!

use std::cell::Cell;
use std::time::Duration;

use nix::sys::signal::Signal;
use sluice_integration::adds::{declared, mesh_with};
use sluice_integration::descriptors::{LET_GO, holders, wait_let_go};
use sluice_integration::kernel_state::{NetnsState, Traces, assert_netns_is, sandbox_files};
use sluice_integration::manifests::PodOptions;
use sluice_integration::mesh::{Mesh, MeshOptions};
use sluice_integration::scene::{PATIENCE, mesh_pod};
use sluice_proto::pb::workload::PodState;
use sluice_testkit::pod::Pod;
use sluice_testkit::process::Process;
use sluice_testkit::standin::Behaviour;
use sluice_testkit::wait::poll_true;

/// How many ADDs are killed at any moment.
const RANDOM_KILLS: u32 = 40;

fn start() -> (Mesh, Pod) {
    let mesh = mesh_with(MeshOptions::default()).unwrap();
    let bystander = mesh_pod(&mesh, "bystander").unwrap();
    (mesh, bystander)
}

/// Adds a pod whose plugin is killed once `reached` holds; `meanwhile` undoes what made the ADD stay there. Nothing may
/// be left, although nobody calls DEL; then another pod gets the address.
fn killed_when(mesh: &Mesh, reached: impl Fn(&Pod) -> bool, meanwhile: impl FnOnce()) {
    let traces = Traces::of(mesh).unwrap();
    let pod = declared(mesh, "victim").unwrap();
    let before = NetnsState::of(pod.netns()).unwrap();
    let plugin = mesh.start_add(&pod).unwrap();
    poll_true("the stage is reached", PATIENCE, || reached(&pod)).unwrap();
    plugin.kill();
    assert!(!plugin.wait().unwrap().status.success());
    meanwhile();
    traces.wait_restored(mesh, PATIENCE).unwrap();
    traces.snapshot_is_restored(mesh, "after").unwrap();
    assert_netns_is(&pod, &before);
    gone_without_del(mesh, pod);
}

fn gone_without_del(mesh: &Mesh, pod: Pod) {
    let (addresses, inode, interface) = (
        pod.addresses().to_vec(),
        pod.netns().inode(),
        pod.host_ifname().to_owned(),
    );
    mesh.manifests.delete_pod(&pod).unwrap();
    pod.delete().unwrap();
    wait_let_go(mesh, inode, &interface, LET_GO).unwrap();
    let heir = mesh.node().pod("heir").addresses(&addresses).create().unwrap();
    mesh.manifests.pod(&heir, &PodOptions::default()).unwrap();
    mesh.add(&heir).unwrap().ok().unwrap();
    mesh.wait_state(&heir, PodState::Enrolled, PATIENCE).unwrap();
    mesh.del(&heir).unwrap().ok().unwrap();
    mesh.manifests.delete_pod(&heir).unwrap();
}

pub(crate) fn stopped(process: &Process) {
    process.signal(Signal::SIGSTOP).unwrap();
    poll_true("stopped", PATIENCE, || {
        process.status().unwrap().field("State").starts_with('T')
    })
    .unwrap();
}

pub(crate) fn goes_on(process: &Process) {
    process.signal(Signal::SIGCONT).unwrap();
}

/// The proxy has received the netns; it may not have answered yet.
fn held_by_proxy(mesh: &Mesh, pod: &Pod) -> bool {
    let holders = holders(mesh, pod.netns().inode()).unwrap();
    holders.iter().any(|holder| holder.starts_with("standin-proxy"))
}

#[test]
fn while_the_executor_has_not_accepted_yet() {
    let (mesh, _bystander) = start();
    stopped(&mesh.executor);
    // The plugin has entered the pod's netns by then, where nobody else has Unix sockets.
    let connected = |pod: &Pod| {
        let sockets = pod
            .netns()
            .run(|| std::fs::read_to_string("/proc/thread-self/net/unix"))
            .unwrap();
        // `St` 03 is SS_CONNECTED (linux/net.h).
        sockets
            .lines()
            .any(|line| line.split_whitespace().nth(5) == Some("03"))
    };
    killed_when(&mesh, connected, || goes_on(&mesh.executor));
}

#[test]
fn while_the_broker_decides() {
    let (mesh, _bystander) = start();
    let files = sandbox_files(&mesh).unwrap().len();
    stopped(&mesh.broker);
    killed_when(
        &mesh,
        |_| sandbox_files(&mesh).unwrap().len() > files,
        || goes_on(&mesh.broker),
    );
}

#[test]
fn while_the_proxy_is_asked() {
    let (mesh, _bystander) = start();
    mesh.control()
        .behave(Behaviour::default().delay_ms("add:default/victim", 1_500))
        .unwrap();
    let asked = |pod: &Pod| held_by_proxy(&mesh, pod);
    killed_when(&mesh, asked, || {});
}

#[test]
fn while_the_proxy_is_awaited() {
    let (mesh, _bystander) = start();
    let proxy = mesh.proxy.as_ref().unwrap();
    proxy.kill().unwrap();
    poll_true("the broker has noticed", PATIENCE, || {
        mesh.node_status().unwrap().zds.is_empty()
    })
    .unwrap();
    let traces = Traces::of(&mesh).unwrap();
    let pod = declared(&mesh, "victim").unwrap();
    let before = NetnsState::of(pod.netns()).unwrap();
    let plugin = mesh.start_add(&pod).unwrap();
    poll_true("waits for a proxy", PATIENCE, || {
        mesh.pod_state(&pod)
            .is_some_and(|status| status.state() == PodState::Pending && status.netns.is_some())
    })
    .unwrap();
    plugin.kill();
    assert!(!plugin.wait().unwrap().status.success());
    traces.wait_restored(&mesh, PATIENCE).unwrap();
    assert_netns_is(&pod, &before);
    proxy.start_again().unwrap();
    mesh.control().wait_ready(PATIENCE).unwrap();
    assert!(!mesh.control().counts().unwrap().workloads.contains_key(pod.uid()));
    gone_without_del(&mesh, pod);
}

#[test]
fn while_the_broker_completes() {
    let (mesh, _bystander) = start();
    mesh.control()
        .behave(Behaviour::default().delay_ms("add:default/victim", 2_000))
        .unwrap();
    // The proxy's answer waits in a broker that was stopped while the proxy thought.
    let broker_stopped = Cell::new(false);
    let answered = |pod: &Pod| {
        if !broker_stopped.get() && held_by_proxy(&mesh, pod) {
            stopped(&mesh.broker);
            broker_stopped.set(true);
        }
        mesh.control().counts().unwrap().workloads.contains_key(pod.uid())
    };
    killed_when(&mesh, answered, || goes_on(&mesh.broker));
}

/// How long an ADD takes that nobody disturbs.
fn undisturbed(mesh: &Mesh, name: &str) -> Duration {
    let pod = declared(mesh, name).unwrap();
    let elapsed = mesh.add(&pod).unwrap().ok().unwrap().last().elapsed;
    mesh.del(&pod).unwrap().ok().unwrap();
    mesh.manifests.delete_pod(&pod).unwrap();
    pod.delete().unwrap();
    elapsed
}

#[test]
fn at_any_moment() {
    let (mesh, bystander) = start();
    let traces = Traces::of(&mesh).unwrap();
    // How long an ADD takes here and now; the first one warms up.
    let whole = (0..4)
        .map(|i| undisturbed(&mesh, &format!("measure-{i}")))
        .min()
        .unwrap();
    let mut cut_short = 0;
    for i in 0..RANDOM_KILLS {
        let pod = declared(&mesh, &format!("victim-{i}")).unwrap();
        let before = NetnsState::of(pod.netns()).unwrap();
        let (inode, interface) = (pod.netns().inode(), pod.host_ifname().to_owned());
        let plugin = mesh.start_add(&pod).unwrap();
        // Beyond the end, too: the machine may have become slower meanwhile.
        std::thread::sleep(whole * 3 * i / RANDOM_KILLS);
        plugin.kill();
        let passed = plugin.wait().unwrap().status.success();
        cut_short += u32::from(!passed);
        // The answer may have been on its way: the runtime deletes what it does not know to have succeeded.
        mesh.del(&pod).unwrap().ok().unwrap();
        poll_true("the netns is as before", LET_GO, || {
            NetnsState::of(pod.netns()).unwrap() == before
        })
        .unwrap_or_else(|late| panic!("{late}, killed at {i}/{RANDOM_KILLS} of {whole:?}"));
        mesh.manifests.delete_pod(&pod).unwrap();
        pod.delete().unwrap();
        wait_let_go(&mesh, inode, &interface, LET_GO + Duration::from_secs(1)).unwrap();
    }
    println!("{cut_short} of {RANDOM_KILLS} ADDs of about {whole:?} were cut short");
    assert!(cut_short >= RANDOM_KILLS / 8, "{cut_short}");
    traces.wait_restored(&mesh, PATIENCE).unwrap();
    mesh.wait_state(&bystander, PodState::Enrolled, PATIENCE).unwrap();
}

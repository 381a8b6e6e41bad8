//! A failed ADD leaves nothing: each of its stages fails in turn, and afterwards everything is as before and another
//! pod with the same address can be added.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use sluice_integration::adds::{declared, mesh_with, refused};
use sluice_integration::cni_error::CniError;
use sluice_integration::descriptors::{LET_GO, holders, wait_let_go};
use sluice_integration::kernel_state::{NetnsState, Traces, assert_netns_is, probe_addresses};
use sluice_integration::manifests::PodOptions;
use sluice_integration::mesh::{Mesh, MeshOptions};
use sluice_integration::scene::PATIENCE;
use sluice_integration::table_owner::OwnedTable;
use sluice_proto::pb::workload::PodState;
use sluice_testkit::cni::{Attachment, Outcome};
use sluice_testkit::pod::Pod;
use sluice_testkit::standin::Behaviour;
use sluice_testkit::wait::poll_true;

/// A node with one bystander in the mesh, so that "as before" is not "empty".
struct Stage {
    #[expect(dead_code, reason = "it is there")]
    bystander: Pod,
    mesh: Mesh,
}

impl Stage {
    fn start() -> Self {
        let mesh = mesh_with(MeshOptions::default()).unwrap();
        let bystander = sluice_integration::scene::mesh_pod(&mesh, "bystander").unwrap();
        Self { bystander, mesh }
    }

    /// Runs an ADD that must fail with `code` from `component`; nothing of it may be left anywhere, before any DEL.
    fn fails(
        &self,
        name: &str,
        code: &str,
        component: &str,
        add: impl FnOnce(&Mesh, &Pod) -> Outcome,
    ) -> CniError {
        let traces = Traces::of(&self.mesh).unwrap();
        let pod = declared(&self.mesh, name).unwrap();
        let before = NetnsState::of(pod.netns()).unwrap();
        let outcome = add(&self.mesh, &pod);
        let error = refused(&outcome, code, component, &pod);
        assert_netns_is(&pod, &before);
        self.is_restored(&traces, name);
        self.another_with_the_address_of(pod);
        error
    }

    /// Everything is as before, and what the next proxy will be told is, too.
    fn is_restored(&self, traces: &Traces, name: &str) {
        traces.wait_restored(&self.mesh, PATIENCE).unwrap();
        traces
            .snapshot_is_restored(&self.mesh, &format!("after-{name}"))
            .unwrap();
    }

    /// The pod goes without a DEL; another gets its address, is added, and goes.
    fn another_with_the_address_of(&self, pod: Pod) {
        let (addresses, inode) = (pod.addresses().to_vec(), pod.netns().inode());
        let interface = pod.host_ifname().to_owned();
        self.mesh.manifests.delete_pod(&pod).unwrap();
        pod.delete().unwrap();
        wait_let_go(&self.mesh, inode, &interface, LET_GO).unwrap();
        let heir = self
            .mesh
            .node()
            .pod("heir")
            .addresses(&addresses)
            .create()
            .unwrap();
        self.mesh.manifests.pod(&heir, &PodOptions::default()).unwrap();
        self.mesh.add(&heir).unwrap().ok().unwrap();
        self.mesh.wait_state(&heir, PodState::Enrolled, PATIENCE).unwrap();
        assert!(probe_addresses(&self.mesh).unwrap().contains(&addresses[0]));
        self.mesh.del(&heir).unwrap().ok().unwrap();
        self.mesh.manifests.delete_pod(&heir).unwrap();
    }

    fn behave(&self, behaviour: Behaviour) {
        self.mesh.control().behave(behaviour).unwrap();
    }
}

fn plain_add(mesh: &Mesh, pod: &Pod) -> Outcome {
    mesh.add(pod).unwrap()
}

#[test]
fn a_netns_that_is_none() {
    let stage = Stage::start();
    let at = |path: String| {
        move |mesh: &Mesh, pod: &Pod| {
            let attachment = Attachment {
                netns: path,
                ..Attachment::from(pod)
            };
            mesh.chain()
                .unwrap()
                .add(&attachment, Some(&pod.prev_result("1.0.0")))
                .unwrap()
        }
    };
    let missing = stage
        .mesh
        .node()
        .netns_dir()
        .join("no-such-netns")
        .display()
        .to_string();
    let error = stage.fails("missing", "PLG-NETNS", "plugin", at(missing));
    assert!(error.msg.contains("ENOENT"), "{}", error.msg);
    let file = stage
        .mesh
        .node()
        .dir()
        .join("netns-executor.log")
        .display()
        .to_string();
    let error = stage.fails("file", "PLG-NETNS", "plugin", at(file));
    assert!(error.msg.contains("EINVAL"), "{}", error.msg);
}

#[test]
fn the_hosts_own_netns() {
    let stage = Stage::start();
    let host = stage.mesh.node().netns_path().display().to_string();
    let error = stage.fails("host-network", "EXE-FD", "plugin", |mesh, pod| {
        let attachment = Attachment {
            netns: host,
            ..Attachment::from(pod)
        };
        mesh.chain()
            .unwrap()
            .add(&attachment, Some(&pod.prev_result("1.0.0")))
            .unwrap()
    });
    let inode = stage.mesh.node().netns().inode().to_string();
    assert_eq!(
        error.msg.matches(&inode).count(),
        2,
        "both inodes in {}",
        error.msg
    );
}

#[test]
fn rules_that_the_kernel_refuses() {
    let stage = Stage::start();
    let mut owned = None;
    let traces = Traces::of(&stage.mesh).unwrap();
    let pod = declared(&stage.mesh, "owned").unwrap();
    owned.replace(OwnedTable::take(pod.netns(), "inet", "sluice", stage.mesh.node().dir()).unwrap());
    let before = NetnsState::of(pod.netns()).unwrap();
    let error = refused(
        &stage.mesh.add(&pod).unwrap(),
        "EXE-RULES",
        "netns-executor",
        &pod,
    );
    assert!(error.msg.contains("EPERM"), "{}", error.msg);
    assert_netns_is(&pod, &before);
    stage.is_restored(&traces, "owned");
    drop(owned);
    stage.another_with_the_address_of(pod);
}

#[test]
fn a_proxy_that_refuses() {
    let stage = Stage::start();
    let error = stage.fails("nack", "ZT-NACK", "ztunnel", |mesh, pod| {
        mesh.control()
            .behave(Behaviour::default().nack(&format!("add:{}", pod.uid()), "cannot bind [::1]:15053"))
            .unwrap();
        let outcome = plain_add(mesh, pod);
        mesh.control().behave(Behaviour::default()).unwrap();
        outcome
    });
    for part in ["cannot bind [::1]:15053", "net.ipv6.conf.all.disable_ipv6"] {
        assert!(error.msg.contains(part), "{part} is not in {}", error.msg);
    }
}

#[test]
fn a_proxy_that_does_not_answer() {
    let stage = Stage::start();
    stage.fails("silent", "ZT-TIME", "ambient-broker", |mesh, pod| {
        stage.behave(Behaviour::default().silent(&format!("add:{}", pod.uid())));
        let begun = Instant::now();
        let outcome = plain_add(mesh, pod);
        assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
        stage.behave(Behaviour::default());
        stage.mesh.control().wait_ready(PATIENCE).unwrap();
        outcome
    });
}

#[test]
fn a_proxy_that_never_comes_back() {
    let stage = Stage::start();
    let error = stage.fails("alone", "ZT-NONE", "ambient-broker", |mesh, pod| {
        let proxy = mesh.proxy.as_ref().unwrap();
        proxy.kill().unwrap();
        let begun = Instant::now();
        let outcome = plain_add(mesh, pod);
        assert!(begun.elapsed() < Duration::from_secs(11), "{:?}", begun.elapsed());
        proxy.start_again().unwrap();
        proxy
            .wait_ready(PATIENCE, || {
                mesh.control().counts().is_ok_and(|report| report.ready)
            })
            .unwrap();
        outcome
    });
    assert_eq!(error.code, 11);
}

#[test]
fn a_probe_set_that_cannot_be_changed() {
    let stage = Stage::start();
    let traces = Traces::of(&stage.mesh).unwrap();
    let host = stage.mesh.node().netns().clone();
    let pod = declared(&stage.mesh, "unprobed").unwrap();
    let before = NetnsState::of(pod.netns()).unwrap();
    let owned = OwnedTable::take(&host, "inet", "sluice-host", stage.mesh.node().dir()).unwrap();
    refused(
        &stage.mesh.add(&pod).unwrap(),
        "EXE-PROBE",
        "netns-executor",
        &pod,
    );
    assert_netns_is(&pod, &before);
    drop(owned);
    // The host's rules come back by themselves.
    stage.is_restored(&traces, "unprobed");
    stage.another_with_the_address_of(pod);
}

/// Starts an ADD whose answer the proxy holds back, and lets `strike` happen when its namespace is programmed.
fn in_the_middle(mesh: &Mesh, pod: &Pod, strike: impl FnOnce()) -> Outcome {
    mesh.control()
        .behave(Behaviour::default().silent(&format!("add:{}", pod.uid())))
        .unwrap();
    let plugin = mesh.start_add(pod).unwrap();
    poll_true("the proxy was told", PATIENCE, || {
        let holders = holders(mesh, pod.netns().inode()).unwrap();
        holders.iter().any(|holder| holder.starts_with("standin-proxy"))
    })
    .unwrap();
    strike();
    let execution = plugin.wait().unwrap();
    mesh.control().behave(Behaviour::default()).unwrap();
    Outcome {
        executions: vec![execution],
        result: None,
    }
}

/// What the runtime does after a failed ADD; what processes that were restarted have open is not comparable.
fn cleaned_up(stage: &Stage, pod: Pod, before: &NetnsState, traces: &Traces) {
    stage.mesh.del(&pod).unwrap().ok().unwrap();
    poll_true("the netns is as before", LET_GO, || {
        NetnsState::of(pod.netns()).unwrap() == *before
    })
    .unwrap();
    // A restarted broker has the proxy's connection a moment later.
    poll_true("the proxy is connected", PATIENCE, || {
        let node = stage.mesh.node_status();
        node.is_ok_and(|node| node.zds.iter().any(|connection| connection.state == "ready"))
    })
    .unwrap();
    let unbound = Traces {
        descriptors: Traces::of(&stage.mesh).unwrap().descriptors,
        ..traces.clone()
    };
    stage.is_restored(&unbound, "orphan");
    stage.another_with_the_address_of(pod);
}

#[test]
fn a_broker_that_dies_in_the_middle() {
    let stage = Stage::start();
    let traces = Traces::of(&stage.mesh).unwrap();
    let pod = declared(&stage.mesh, "orphan").unwrap();
    let before = NetnsState::of(pod.netns()).unwrap();
    let outcome = in_the_middle(&stage.mesh, &pod, || stage.mesh.broker.kill().unwrap());
    refused(&outcome, "BRK-NONE", "netns-executor", &pod);
    assert_netns_is(&pod, &before);
    stage.mesh.broker.start_again().unwrap();
    stage.mesh.wait_serving().unwrap();
    cleaned_up(&stage, pod, &before, &traces);
}

#[test]
fn an_executor_that_dies_in_the_middle() {
    let stage = Stage::start();
    let traces = Traces::of(&stage.mesh).unwrap();
    let pod = declared(&stage.mesh, "orphan").unwrap();
    let before = NetnsState::of(pod.netns()).unwrap();
    let outcome = in_the_middle(&stage.mesh, &pod, || stage.mesh.executor.kill().unwrap());
    refused(&outcome, "PLG-CONN", "plugin", &pod);
    stage.mesh.executor.start_again().unwrap();
    stage.mesh.wait_serving().unwrap();
    cleaned_up(&stage, pod, &before, &traces);
}

#[test]
fn a_broker_that_hangs() {
    let stage = Stage::start();
    let error = stage.fails("hung", "BRK-TIME", "netns-executor", |mesh, pod| {
        mesh.broker.signal(Signal::SIGSTOP).unwrap();
        let outcome = plain_add(mesh, pod);
        mesh.broker.signal(Signal::SIGCONT).unwrap();
        outcome
    });
    assert!(error.msg.contains("default/hung"), "{}", error.msg);
}

#[test]
fn an_executor_that_hangs() {
    let stage = Stage::start();
    stage.fails("hung", "PLG-TIME", "plugin", |mesh, pod| {
        mesh.executor.signal(Signal::SIGSTOP).unwrap();
        let begun = Instant::now();
        let outcome = plain_add(mesh, pod);
        assert!(begun.elapsed() < Duration::from_secs(11), "{:?}", begun.elapsed());
        mesh.executor.signal(Signal::SIGCONT).unwrap();
        outcome
    });
}

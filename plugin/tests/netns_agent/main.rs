//! The plugin against a stand-in for the executor, with real network namespaces. Needs root.
#![cfg(test)]

#[path = "../support/executor.rs"]
#[expect(dead_code, reason = "another test binary uses the rest")]
mod executor;
#[path = "../support/run.rs"]
#[expect(dead_code, reason = "the other test binary uses the rest")]
mod run;

mod handover;

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use executor::{Behaviour, FakeExecutor};
use run::{Run, config, prev_result};
use serde_json::json;
use sluice_proto::pb::types::Failure;
use tempfile::TempDir;

/// A pod's network namespace, removed at the end.
struct PodNetns(String);

impl PodNetns {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let netns = Self(format!("sluice-plugin-{}-{number}", std::process::id()));
        netns.tool("ip", &["netns", "add", &netns.0]);
        netns
    }

    fn path(&self) -> String {
        format!("/run/netns/{}", self.0)
    }

    /// Runs a program inside.
    fn exec(&self, arguments: &[&str]) -> String {
        self.tool("ip", &[&["netns", "exec", &self.0], arguments].concat())
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "independent tools make and look at namespaces"
    )]
    fn tool(&self, program: &str, arguments: &[&str]) -> String {
        let output = std::process::Command::new(program)
            .args(arguments)
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "{} {arguments:?}: {error} (root is needed)",
            self.0
        );
        String::from_utf8(output.stdout).unwrap()
    }
}

impl Drop for PodNetns {
    fn drop(&mut self) {
        self.tool("ip", &["netns", "del", &self.0]);
    }
}

fn node(behaviour: Behaviour) -> (TempDir, FakeExecutor, PodNetns) {
    let run_dir = tempfile::tempdir().unwrap();
    let executor = FakeExecutor::start(run_dir.path(), behaviour);
    (run_dir, executor, PodNetns::new())
}

fn add(run_dir: &Path, netns: &PodNetns) -> Run {
    Run::new("ADD", &config("1.0.0", run_dir)).env("CNI_NETNS", &netns.path())
}

fn failure() -> Failure {
    Failure {
        code: "ZT-NACK".into(),
        component: "ztunnel".into(),
        stage: "add workload".into(),
        cause: "bind 15001: EADDRINUSE".into(),
    }
}

#[test]
fn an_admitted_pod_gets_the_result_before_it_byte_for_byte() {
    let (run_dir, executor, netns) = node(Behaviour::Well);
    for version in ["0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
        let run = add(run_dir.path(), &netns).stdin(config(version, run_dir.path()).to_string());
        let done = run.go();
        assert_eq!(
            (done.status, done.stdout.trim_end()),
            (0, &*prev_result(version).to_string()),
            "{done:?}"
        );
        assert!(done.stderr.is_empty(), "{done:?}");
    }
    assert_eq!(executor.calls().add.len(), 4);
}

#[test]
fn a_refusal_names_the_component_that_refused_and_prints_no_result() {
    let (run_dir, _executor, netns) = node(Behaviour::Fail(failure()));
    let error = add(run_dir.path(), &netns).go().error();
    assert_eq!(
        error["msg"],
        "sluice: ztunnel: add workload: bind 15001: EADDRINUSE (pod team-a/web-0)"
    );
    assert_eq!(error["code"], 110);
    assert!(
        error["details"].as_str().unwrap().starts_with("ZT-NACK: "),
        "{error}"
    );
    assert!(error.get("ips").is_none());
}

#[test]
fn the_hosts_own_namespace_is_refused_before_anything_is_asked() {
    let (run_dir, executor, _netns) = node(Behaviour::Well);
    let own = format!("/proc/{}/ns/net", std::process::id());
    let error = Run::new("ADD", &config("1.0.0", run_dir.path()))
        .env("CNI_NETNS", &own)
        .go()
        .error();
    let msg = error["msg"].as_str().unwrap();
    assert!(msg.contains("the host's own network namespace"), "{msg}");
    assert!(executor.calls().add.is_empty());
}

#[test]
fn without_a_broker_the_pod_is_to_be_tried_again() {
    let (run_dir, _executor, netns) = node(Behaviour::NoBroker);
    let error = add(run_dir.path(), &netns).go().error();
    assert_eq!(error["code"], 11);
    assert!(
        error["details"].as_str().unwrap().starts_with("BRK-NONE: "),
        "{error}"
    );
}

#[test]
fn an_executor_that_hangs_is_given_up_after_ten_seconds() {
    let (run_dir, executor, netns) = node(Behaviour::Hang);
    let done = add(run_dir.path(), &netns).go();
    let error = done.error();
    assert_eq!(error["code"], 11);
    assert!(
        error["details"].as_str().unwrap().starts_with("PLG-TIME: "),
        "{error}"
    );
    assert!((9.5..11.0).contains(&done.elapsed.as_secs_f64()), "{done:?}");
    assert_eq!(executor.calls().add.len(), 1, "an ADD is never sent twice");
}

#[test]
fn an_executor_that_vanishes_is_noticed_at_once() {
    let (run_dir, executor, netns) = node(Behaviour::Vanish);
    let done = add(run_dir.path(), &netns).go();
    let error = done.error();
    assert_eq!(error["code"], 11);
    assert!(
        error["msg"]
            .as_str()
            .unwrap()
            .contains("the connection ended before the answer"),
        "{error}"
    );
    assert!(
        error["details"].as_str().unwrap().starts_with("PLG-CONN: "),
        "{error}"
    );
    assert!(done.elapsed < Duration::from_secs(2), "{done:?}");
    assert_eq!(executor.calls().add.len(), 1, "an ADD is never sent twice");
}

#[test]
fn an_executor_that_is_just_restarting_is_waited_for() {
    let run_dir = tempfile::tempdir().unwrap();
    let netns = PodNetns::new();
    let plugin = std::thread::spawn({
        let run = add(run_dir.path(), &netns);
        move || run.go()
    });
    std::thread::sleep(Duration::from_millis(300)); // the restart, not a wait for something
    let _executor = FakeExecutor::start(run_dir.path(), Behaviour::Well);
    let done = plugin.join().unwrap();
    assert_eq!(done.status, 0, "{done:?}");
}

#[test]
fn a_panic_while_the_call_runs_is_one_cni_error() {
    let (run_dir, _executor, netns) = node(Behaviour::Well);
    let error = add(run_dir.path(), &netns)
        .env("SLUICE_CNI_TEST_PANIC", "call")
        .go()
        .error();
    assert_eq!(error["code"], 113);
}

#[test]
fn the_same_add_twice_and_at_once_gives_the_same_answer_and_the_same_request() {
    let (run_dir, executor, netns) = node(Behaviour::Well);
    let run = add(run_dir.path(), &netns);
    let first = run.go();
    std::thread::scope(|scope| {
        let others = [scope.spawn(|| run.go()), scope.spawn(|| run.go())];
        for other in others {
            let other = other.join().unwrap();
            assert_eq!((other.status, &other.stdout), (0, &first.stdout));
        }
    });
    let second_interface = run.clone().env("CNI_IFNAME", "net1").go();
    assert_eq!(
        (second_interface.status, &second_interface.stdout),
        (0, &first.stdout)
    );
    let calls = executor.calls();
    assert_eq!(calls.add.len(), 3, "another interface reaches nobody");
    assert!(calls.add.iter().all(|seen| seen.message == calls.add[0].message));
}

#[test]
fn del_reaches_the_executor_and_leaves_nothing_behind() {
    let (run_dir, executor, _netns) = node(Behaviour::Well);
    let run = Run::new("DEL", &config("1.0.0", run_dir.path())).env("CNI_NETNS", "");
    run.go().succeeded_silently();
    let calls = executor.calls();
    let attachment = calls.del[0].attachment.as_ref().unwrap();
    assert_eq!(
        (
            &*attachment.network_name,
            &*attachment.container_id,
            &*attachment.ifname
        ),
        ("k8s-pod-network", "c0ffee", "eth0")
    );
    assert!(!run_dir.path().join("cni/tombstones").exists());
}

#[test]
fn del_that_gets_no_answer_leaves_a_tombstone() {
    for behaviour in [Behaviour::Hang, Behaviour::Vanish] {
        let (run_dir, _executor, _netns) = node(behaviour);
        let started = Instant::now();
        let done = Run::new("DEL", &config("1.0.0", run_dir.path())).go();
        done.succeeded_silently();
        assert!(done.stderr.contains("left a tombstone"), "{done:?}");
        assert!(started.elapsed() < Duration::from_secs(5), "{done:?}");
        assert_eq!(
            std::fs::read_dir(run_dir.path().join("cni/tombstones"))
                .unwrap()
                .count(),
            1
        );
    }
}

#[test]
fn check_is_silent_when_all_is_well_and_names_what_is_not() {
    let (run_dir, executor, netns) = node(Behaviour::Well);
    let check = |run_dir: &Path| Run::new("CHECK", &config("1.0.0", run_dir)).env("CNI_NETNS", &netns.path());
    check(run_dir.path()).go().succeeded_silently();
    check(run_dir.path())
        .pod("kube-system", "x")
        .go()
        .succeeded_silently();
    assert_eq!(executor.calls().check.len(), 1);

    let (run_dir, _executor, _netns) = node(Behaviour::Fail(failure()));
    let error = check(run_dir.path()).go().error();
    assert_eq!(error["code"], 110);

    let gone = Failure {
        code: "EXE-GONE".into(),
        ..failure()
    };
    let (run_dir, _executor, _netns) = node(Behaviour::Fail(gone));
    assert_eq!(check(run_dir.path()).go().error()["code"], 3);
    assert_eq!(add(run_dir.path(), &netns).go().error()["code"], 106);
}

#[test]
fn gc_names_the_network_and_what_still_exists() {
    let (run_dir, executor, _netns) = node(Behaviour::Well);
    let mut config = config("1.1.0", run_dir.path());
    config["cni.dev/valid-attachments"] = json!([
        { "containerID": "c1", "ifname": "eth0" },
        { "containerID": "../not-ours", "ifname": "eth0" },
    ]);
    Run::new("GC", &config).go().succeeded_silently();
    // Go writes an empty list as null.
    config["cni.dev/valid-attachments"] = json!(null);
    Run::new("GC", &config).go().succeeded_silently();
    let calls = executor.calls();
    assert_eq!(calls.gc[0].network_name, "k8s-pod-network");
    let valid: Vec<_> = calls.gc[0]
        .valid
        .iter()
        .map(|a| (&*a.network_name, &*a.container_id))
        .collect();
    assert_eq!(valid, [("k8s-pod-network", "c1")]);
    assert!(calls.gc[1].valid.is_empty());
}

#[test]
fn a_network_of_its_own_is_about_the_pods_first_interface_whatever_its_own_is_called() {
    let (run_dir, executor, netns) = node(Behaviour::Well);
    let mut own = json!({
        "cniVersion": "1.1.0", "name": "sluice-cni", "type": "sluice-cni", "standAlone": true, "runDir": run_dir.path(),
    });
    let go = |command: &str, config: &serde_json::Value| {
        let run = Run::new(command, config).env("CNI_NETNS", &netns.path());
        run.env("CNI_IFNAME", "net1").go()
    };
    let done = go("ADD", &own);
    assert_eq!(
        (done.status, done.stdout.trim_end()),
        (0, r#"{"cniVersion":"1.1.0"}"#),
        "{done:?}"
    );
    go("DEL", &own).succeeded_silently();
    // What another network said of its interfaces is passed on; the addresses are those of the pod's first.
    own["prevResult"] = json!({ "cniVersion": "1.1.0", "ips": [{ "address": "10.66.0.9/24" }] });
    let done = go("ADD", &own);
    assert_eq!(
        (done.status, done.stdout.trim_end()),
        (0, &*own["prevResult"].to_string()),
        "{done:?}"
    );
    go("CHECK", &own).succeeded_silently();
    own["cni.dev/valid-attachments"] = json!([{ "containerID": "c0ffee", "ifname": "net1" }]);
    go("GC", &own).succeeded_silently();

    let calls = executor.calls();
    assert_eq!(
        (
            calls.add.len(),
            calls.del.len(),
            calls.check.len(),
            calls.gc.len()
        ),
        (2, 1, 1, 1)
    );
    assert!(
        calls.add.iter().all(|seen| seen.message.addresses.is_empty()),
        "{:?}",
        calls.add
    );
    let added = calls.add.iter().map(|seen| seen.message.attachment.clone());
    let others = [calls.del[0].attachment.clone(), calls.check[0].attachment.clone()];
    for attachment in added.chain(others).chain([calls.gc[0].valid.first().cloned()]) {
        let attachment = attachment.unwrap();
        assert_eq!(
            (
                &*attachment.network_name,
                &*attachment.container_id,
                &*attachment.ifname
            ),
            ("sluice-cni", "c0ffee", "eth0")
        );
    }
}

#[test]
fn status_where_it_was_opted_in_says_whether_the_node_can_take_pods() {
    for (behaviour, ready) in [
        (Behaviour::Well, true),
        (Behaviour::NoBroker, false),
        (Behaviour::Hang, false),
    ] {
        let (run_dir, _executor, _netns) = node(behaviour);
        let mut config = config("1.1.0", run_dir.path());
        config["status"] = json!({ "gateNode": true });
        let done = Run::new("STATUS", &config).go();
        if ready {
            done.succeeded_silently();
        } else {
            assert_eq!(done.error()["code"], 50);
        }
        assert!(done.elapsed < Duration::from_millis(250), "{done:?}");
    }
}

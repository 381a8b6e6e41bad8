//! A node after a reboot: configuration and plugin are on the disk, the run directory is empty or not there, nothing of
//! the agent runs. What the agent needs in order to come back must start.

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::json;

use crate::api_server::{ApiServer, write_kubeconfig};
use crate::executor::{Behaviour, FakeExecutor};
use crate::run::{Run, config};
use crate::{add, in_mesh, passed, refused};

/// The states of a run directory in which nobody can be asked.
fn useless(root: &Path) -> Vec<std::path::PathBuf> {
    let api = ApiServer::start(in_mesh());
    let mut expired = api.kubeconfig();
    expired["users"][0]["user"]["token"] = json!("expired");
    let made = |name: &str, kubeconfig: Option<&str>| {
        let run_dir = root.join(name);
        fs::create_dir(&run_dir).unwrap();
        if let Some(text) = kubeconfig {
            write_kubeconfig(&run_dir, text);
        }
        run_dir
    };
    vec![
        root.join("missing"),
        made("empty", None),
        made("expired", Some(&expired.to_string())),
        made("malformed", Some("token: x")),
    ]
}

#[test]
fn the_agents_own_pods_and_excluded_namespaces_start_whatever_the_run_directory_holds() {
    let root = tempfile::tempdir().unwrap();
    for run_dir in useless(root.path()) {
        for (namespace, name) in [
            ("sluice-system", "sluice-abc12"),
            ("sluice-system", "sluice-00000"),
            ("kube-system", "coredns-1"),
        ] {
            let done = add(&run_dir).pod(namespace, name).go();
            passed(&done);
            assert!(done.elapsed < Duration::from_secs(1), "{done:?}");
        }
    }
}

#[test]
fn any_other_pod_waits_whatever_the_run_directory_holds() {
    let root = tempfile::tempdir().unwrap();
    let codes = ["PLG-CONN", "PLG-CONN", "PLG-AUTH", "PLG-KUBECONFIG"];
    for (run_dir, code) in useless(root.path()).iter().zip(codes) {
        let done = add(run_dir).go();
        let msg = refused(&done, code);
        assert!(
            code != "PLG-CONN" || msg.contains("there is no kubeconfig"),
            "{msg}"
        );
        assert!(done.elapsed < Duration::from_secs(5), "{done:?}");
    }
    assert!(
        !root.path().join("missing").exists(),
        "the plugin makes no run directory"
    );
}

#[test]
fn a_pod_that_only_looks_like_the_agents_is_not_exempt() {
    let root = tempfile::tempdir().unwrap();
    for (namespace, name) in [("team-a", "sluice-abc12"), ("sluice-system", "sluice-abc123")] {
        let done = add(root.path()).pod(namespace, name).go();
        assert_eq!(done.error()["code"], 11, "{namespace}/{name}");
    }
}

#[test]
fn the_refused_pod_starts_once_the_agent_is_back() {
    let root = tempfile::tempdir().unwrap();
    refused(&add(root.path()).go(), "PLG-CONN");
    let _executor = FakeExecutor::start(root.path(), Behaviour::Well);
    passed(&add(root.path()).go());
}

#[test]
fn without_a_selection_nobody_is_placed() {
    let root = tempfile::tempdir().unwrap();
    let api = ApiServer::start(in_mesh());
    api.write_kubeconfig(root.path());
    let mut config = config("1.0.0", root.path());
    config.as_object_mut().unwrap().remove("selection");
    let msg = refused(&Run::new("ADD", &config).go(), "PLG-CONN");
    assert!(msg.contains("no selection to decide by"), "{msg}");
    assert!(api.asked().is_empty());
}

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "strace tells independently what the plugin does"
)]
fn an_exempt_pod_costs_no_socket() {
    let root = tempfile::tempdir().unwrap();
    let trace = root.path().join("trace");
    let run = add(root.path()).pod("sluice-system", "sluice-abc12");
    let mut child = std::process::Command::new("strace")
        .args(["-f", "-qq", "-e", "trace=%network,setns", "-o"])
        .arg(&trace)
        .arg(env!("CARGO_BIN_EXE_sluice-cni"))
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .envs(run.env.iter().map(|(key, value)| (key, value)))
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("strace is needed (make setup)");
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), &run.stdin).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(fs::read_to_string(trace).unwrap(), "");
}

//! What becomes of a pod while the agent is away: the real plugin, a real TLS server in the API server's place, and the
//! pod's own network namespace, from which that server cannot be reached. Needs root.
#![cfg(test)]

#[path = "../support/api_server.rs"]
mod api_server;
#[path = "../support/executor.rs"]
#[expect(dead_code, reason = "the other test binaries use the rest")]
mod executor;
#[path = "../support/run.rs"]
#[expect(dead_code, reason = "the other test binaries use the rest")]
mod run;

mod answers;
mod exempt;
mod log;
mod static_pods;

use std::path::Path;
use std::time::{Duration, Instant};

use api_server::{Answer, ApiServer, TOKEN, namespace, pod};
use executor::{Behaviour, FakeExecutor};
use run::{Done, Run, config, prev_result};
use serde_json::{Value, json};
use tempfile::TempDir;

fn add(run_dir: &Path) -> Run {
    Run::new("ADD", &config("1.0.0", run_dir))
}

/// A run directory with the kubeconfig of an API server that answers so.
fn node(answer: Answer) -> (TempDir, ApiServer) {
    let run_dir = tempfile::tempdir().unwrap();
    let api = ApiServer::start(answer);
    api.write_kubeconfig(run_dir.path());
    (run_dir, api)
}

fn objects(pod_labels: &Value, namespace_labels: &Value) -> Answer {
    Answer::Objects {
        pod: pod(pod_labels, &json!({})),
        namespace: namespace(namespace_labels),
    }
}

fn ambient() -> Value {
    json!({ "istio.io/dataplane-mode": "ambient" })
}

fn in_mesh() -> Answer {
    objects(&json!({ "app": "web" }), &ambient())
}

fn outside() -> Answer {
    objects(&json!({ "app": "web" }), &json!({}))
}

/// The pod starts, with the result before ours byte for byte.
fn passed(done: &Done) {
    let expected = prev_result("1.0.0").to_string();
    assert_eq!((done.status, done.stdout.trim_end()), (0, &*expected), "{done:?}");
    no_token(done);
}

/// The pod is to be tried again, for the reason of this code; gives the message.
fn refused(done: &Done, code: &str) -> String {
    let error = done.error();
    assert_eq!(error["code"], 11, "{error}");
    let details = error["details"].as_str().unwrap();
    assert!(details.starts_with(&format!("{code}: ")), "{code}: {error}");
    let msg = error["msg"].as_str().unwrap();
    assert!(msg.ends_with("(pod team-a/web-0)"), "{msg}");
    assert!(error.get("ips").is_none(), "{error}");
    no_token(done);
    msg.to_owned()
}

/// Does the same for each case, at once: most of it is waiting.
fn each<T: Send>(cases: impl IntoIterator<Item = T>, test: impl Fn(T) + Sync) {
    let test = &test;
    std::thread::scope(|scope| {
        for case in cases {
            scope.spawn(move || test(case));
        }
    });
}

fn no_token(done: &Done) {
    assert!(
        !done.stdout.contains(TOKEN) && !done.stderr.contains(TOKEN),
        "{done:?}"
    );
}

#[test]
fn a_pod_outside_the_mesh_starts_without_the_agent() {
    let injected = json!({ "sidecar.istio.io/status": "{}" });
    for answer in [
        outside(),
        objects(&json!({ "istio.io/dataplane-mode": "none" }), &ambient()),
        Answer::Objects {
            pod: pod(&json!(null), &injected),
            namespace: namespace(&ambient()),
        },
    ] {
        let (run_dir, api) = node(answer);
        let done = add(run_dir.path()).go();
        passed(&done);
        assert!(done.elapsed < Duration::from_secs(3), "{done:?}");
        assert!(
            done.stderr.contains("agent away, the API server decided"),
            "{done:?}"
        );
        let asked: Vec<_> = api.asked().into_iter().map(|asked| asked.path).collect();
        assert_eq!(
            asked,
            [
                "/api/v1/namespaces/team-a/pods/web-0",
                "/api/v1/namespaces/team-a"
            ],
            "each is asked for once"
        );
    }
}

#[test]
fn a_pod_of_the_mesh_waits_for_the_agent_and_then_is_tried_again() {
    each([in_mesh(), objects(&ambient(), &json!(null))], |answer| {
        let (run_dir, api) = node(answer);
        let done = add(run_dir.path()).go();
        let msg = refused(&done, "PLG-CONN");
        assert!(
            msg.contains("connect to the executor") && msg.contains("in the mesh"),
            "{msg}"
        );
        assert!((5.0..10.5).contains(&done.elapsed.as_secs_f64()), "{done:?}");
        assert_eq!(
            api.asked().len(),
            2,
            "the API server is asked once however long it takes"
        );
    });
}

#[test]
fn a_pod_of_the_mesh_is_enrolled_by_an_agent_that_comes_back_meanwhile() {
    let (run_dir, api) = node(in_mesh());
    let run = add(run_dir.path());
    let done = std::thread::scope(|scope| {
        let plugin = scope.spawn(|| run.go());
        let started = Instant::now();
        while api.asked().len() < 2 {
            assert!(started.elapsed() < Duration::from_secs(5));
            std::thread::yield_now();
        }
        let executor = FakeExecutor::start(run_dir.path(), Behaviour::Well);
        let done = plugin.join().unwrap();
        assert_eq!(executor.calls().add.len(), 1);
        assert_eq!(executor.calls().add[0].descriptors.len(), 4);
        done
    });
    passed(&done);
}

#[test]
fn a_broker_that_is_away_or_knows_nothing_yet_is_no_reason_to_wait_for_outside_pods() {
    let (run_dir, _api) = node(outside());
    let executor = FakeExecutor::start(run_dir.path(), Behaviour::NoBroker);
    passed(&add(run_dir.path()).go());
    assert_eq!(executor.calls().add.len(), 1);
}

#[test]
fn a_pod_of_the_mesh_is_handed_over_again_and_again_until_there_is_a_broker() {
    let (run_dir, _api) = node(in_mesh());
    let executor = FakeExecutor::start(run_dir.path(), Behaviour::NoBroker);
    let done = add(run_dir.path()).go();
    let msg = refused(&done, "BRK-NONE");
    assert!(
        msg.contains("netns-executor: wait for the broker") && msg.contains("in the mesh"),
        "{msg}"
    );
    assert!(done.elapsed < Duration::from_millis(10_500), "{done:?}");
    let calls = executor.calls();
    assert!(calls.add.len() > 1);
    assert!(
        calls
            .add
            .iter()
            .all(|seen| seen.descriptors.len() == 4 && seen.message == calls.add[0].message)
    );
}

#[test]
fn an_executor_that_vanishes_in_the_middle_is_no_decision() {
    let (run_dir, _api) = node(outside());
    let _executor = FakeExecutor::start(run_dir.path(), Behaviour::Vanish);
    passed(&add(run_dir.path()).go());
}

#[test]
fn an_agent_that_answers_is_never_overruled() {
    let (run_dir, api) = node(outside());
    let failure = sluice_proto::pb::types::Failure {
        code: "BRK-POD".into(),
        ..Default::default()
    };
    let _executor = FakeExecutor::start(run_dir.path(), Behaviour::Fail(failure));
    refused(&add(run_dir.path()).go(), "BRK-POD");
    assert!(api.asked().is_empty());
}

#[test]
fn the_kubeconfig_may_be_elsewhere() {
    let (run_dir, api) = node(outside());
    let elsewhere = tempfile::tempdir().unwrap();
    let path = elsewhere.path().join("plugin.kubeconfig");
    std::fs::rename(run_dir.path().join("plugin/kubeconfig"), &path).unwrap();
    let mut config = config("1.0.0", run_dir.path());
    config["kubeconfig"] = json!(path);
    passed(&Run::new("ADD", &config).go());
    assert_eq!(api.asked().len(), 2);
}

//! What the health probe says of an executor that works, fails or hangs: the built program asks one that is served
//! here. One test, because the verdict is the whole process's.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed step is a failed test"
)]

#[path = "node_harness/harness.rs"]
mod harness;
#[path = "node_harness/opener.rs"]
mod opener;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use harness::{Executor, eventually};
use opener::FakeOpener;
use sluice_netns_executor::kernel::fake::FakeKernel;
use sluice_proto::opener::OpenerRequest;
use sluice_proto::paths::RunDir;

/// Exit status and error text of `netns-executor healthcheck`.
async fn healthcheck(run_dir: &Path) -> (bool, String) {
    healthcheck_by(&[], run_dir).await
}

/// The same, executed by another program.
async fn healthcheck_by(by: &[&str], run_dir: &Path) -> (bool, String) {
    let words = [by, &[env!("CARGO_BIN_EXE_netns-executor")]].concat();
    let words: Vec<String> = words.into_iter().map(str::to_owned).collect();
    let run_dir = run_dir.to_owned();
    let output = tokio::task::spawn_blocking(move || {
        #[expect(clippy::disallowed_methods, reason = "the program under test")]
        let mut program = std::process::Command::new(&words[0]);
        program
            .args(&words[1..])
            .arg("--run-dir")
            .arg(run_dir)
            .arg("healthcheck")
            .output()
    });
    let output = output.await.unwrap().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    (output.status.success(), errors)
}

/// Asks until the answer is `healthy` and names `text`.
async fn until(executor: &Executor, healthy: bool, text: &str) {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let (is_healthy, errors) = healthcheck(executor.run.root()).await;
        if is_healthy == healthy && errors.contains(text) {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "healthy {is_healthy}, wanted {healthy} for {text}: {errors}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_health_probe_tells_a_working_executor_from_a_failing_and_a_hanging_one() {
    let kernel = FakeKernel::default();
    let executor = Executor::start_with(Arc::new(kernel.clone()), |settings| {
        settings.self_test = Duration::from_millis(50);
        settings.stuck = Duration::from_millis(400);
    })
    .await;
    until(&executor, true, "").await;

    let file = |name: &str| {
        let path = executor.run.root().join(name);
        std::fs::write(&path, "").unwrap();
        path
    };
    let opener = FakeOpener::connect(&executor.run.opener_socket(), Some(&file("host")));
    let tests = || opener.asked(|request| *request == OpenerRequest::Scratch);
    eventually("tested without a scratch namespace", || tests() > 2).await;
    // The opener's health is not the executor's.
    until(&executor, true, "").await;

    let scratch = file("scratch");
    opener.makes(&scratch);
    let before = tests();
    eventually("tested", || tests() > before + 2).await;
    until(&executor, true, "").await;
    kernel.state().failing.insert("apply");
    until(&executor, false, "made to fail").await;
    kernel.state().failing.remove("apply");
    until(&executor, true, "").await;

    // The self-test itself hangs.
    kernel.hold(true);
    until(&executor, false, "a kernel call has been running").await;
    kernel.hold(false);
    until(&executor, true, "").await;

    // Nobody is there; and somebody accepts and says nothing.
    let nobody = tempfile::tempdir().unwrap();
    assert!(!healthcheck(nobody.path()).await.0);
    let run = RunDir::new(nobody.path());
    std::fs::create_dir_all(run.cni_socket().parent().unwrap()).unwrap();
    let _listener = std::os::unix::net::UnixListener::bind(run.cni_socket()).unwrap();
    let begun = Instant::now();
    let (is_healthy, errors) = healthcheck(nobody.path()).await;
    assert!(!is_healthy && errors.contains("no answer within"), "{errors}");
    // In another container it stands by: what the other one's executor lacks is not its own fault.
    let another = ["unshare", "--pid", "--fork"];
    let (is_healthy, errors) = healthcheck_by(&another, nobody.path()).await;
    assert!(is_healthy, "{errors}");
    assert!(begun.elapsed() < Duration::from_secs(10));

    // Nothing of the tests is left open.
    let scratch = std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(scratch).unwrap());
    drop(opener);
    eventually("scratch namespaces closed", || kernel.netns(scratch).open == 0).await;
}

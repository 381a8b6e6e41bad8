//! Any process of ours may die at any moment and come back: traffic goes on, and no rule is touched.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sluice_integration::mesh::{Mesh, MeshOptions};
use sluice_integration::rule_monitor::RuleMonitor;
use sluice_integration::scene::{Scene, turn};
use sluice_testkit::netns::Netns;
use sluice_testkit::process::Process;
use sluice_testkit::traffic::dns::query;

/// How often each process is killed.
const TIMES: usize = 50;
/// Requests over new connections, and DNS queries, a second.
const REQUESTS: u32 = 200;
const QUERIES: u32 = 50;

/// [`QUERIES`]; counts what was not answered.
struct DnsLoad {
    started: Instant,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(u32, Vec<String>)>,
}

impl DnsLoad {
    fn start(netns: &Netns) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, netns) = (stop.clone(), netns.clone());
        let thread = std::thread::spawn(move || {
            let resolver = SocketAddr::from(([10, 244, 0, 1], 53));
            let (mut answered, mut failures) = (0, Vec::new());
            let mut next = Instant::now();
            while !stopped.load(Ordering::Relaxed) {
                match query(
                    &netns,
                    resolver,
                    "app.default.svc",
                    false,
                    false,
                    Duration::from_secs(5),
                ) {
                    Ok(_) => answered += 1,
                    Err(error) => failures.push(error.to_string()),
                }
                next += Duration::from_secs(1) / QUERIES;
                std::thread::sleep(next.saturating_duration_since(Instant::now()));
            }
            (answered, failures)
        });
        Self {
            started: Instant::now(),
            stop,
            thread,
        }
    }

    fn nothing_failed(self) {
        let ran = self.started.elapsed();
        self.stop.store(true, Ordering::Relaxed);
        let (answered, failures) = self.thread.join().unwrap();
        let least = ran.as_secs_f64() * f64::from(QUERIES) * 0.75;
        assert!(
            f64::from(answered) >= least && failures.is_empty(),
            "{answered} answered in {ran:?}, failures: {failures:?}"
        );
    }
}

/// Restarts what `restart` names, so many times under load, and asserts that nobody noticed.
fn survives(times: usize, restart: impl Fn(&Mesh)) {
    survives_with(MeshOptions::default(), times, restart);
}

/// As [`survives`], on a node with options.
pub(crate) fn survives_with(options: MeshOptions, times: usize, restart: impl Fn(&Mesh)) {
    let _turn = turn();
    let scene = Scene::start_with(options).unwrap();
    let dir = scene.mesh.node().dir();
    let monitors =
        [&scene.client, &scene.server].map(|pod| RuleMonitor::start(pod.netns(), dir, pod.name()).unwrap());
    let load = scene.load(scene.steady()).unwrap();
    let dns = DnsLoad::start(scene.client.netns());
    for _ in 0..times {
        restart(&scene.mesh);
        scene.mesh.wait_serving().unwrap();
        scene.wait_enrolled().unwrap();
    }
    load.wait_answered(20, Duration::from_secs(10)).unwrap();
    let report = load.stop();
    report.nothing_failed().unwrap();
    report.kept_pace(REQUESTS).unwrap();
    dns.nothing_failed();
    for monitor in monitors {
        monitor.silent().unwrap();
    }
    let held = scene.mesh.control().counts().unwrap();
    let captured = held.workloads[scene.client.uid()].counts.outbound;
    assert!(
        captured >= report.new_answered,
        "of {} requests {captured} went through the proxy",
        report.new_answered
    );
}

#[test]
fn killing_the_executor_fails_no_request_and_changes_no_rule() {
    survives(TIMES, |mesh| mesh.executor.restart().unwrap());
}

#[test]
fn killing_the_broker_fails_no_request_and_changes_no_rule() {
    survives(TIMES, |mesh| mesh.broker.restart().unwrap());
}

#[test]
fn killing_executor_and_broker_together_fails_no_request_and_changes_no_rule() {
    survives(TIMES, |mesh| {
        mesh.executor.kill().unwrap();
        mesh.broker.restart().unwrap();
        mesh.executor.start_again().unwrap();
    });
}

#[test]
fn killing_the_opener_fails_no_request_and_changes_no_rule() {
    survives(TIMES, |mesh| mesh.opener.as_ref().unwrap().restart().unwrap());
}

/// Asks a process to end, as a rollout does; it must be done before a runtime would lose patience.
pub(crate) fn ends(process: &Process) {
    let status = process.terminate(Duration::from_secs(10)).unwrap();
    assert!(status.success(), "{}: {status}", process.name());
}

#[test]
fn a_rollout_fails_no_request_and_changes_no_rule() {
    const ROLLOUTS: usize = 5;
    survives(ROLLOUTS, |mesh| {
        let all = [&mesh.executor, &mesh.broker, mesh.opener.as_ref().unwrap()];
        // The runtime asks all containers of a pod at one time.
        std::thread::scope(|scope| {
            for process in all {
                scope.spawn(|| ends(process));
            }
        });
        for process in all {
            process.start_again().unwrap();
        }
    });
}

#[test]
fn requests_fail_only_while_the_proxy_is_away() {
    let _turn = turn();
    let mut scene = Scene::start_with(MeshOptions {
        proxy: vec!["--grace-ms".into(), "0".into()],
        ..MeshOptions::default()
    })
    .unwrap();
    let load = scene.load(scene.steady()).unwrap();
    let mut away = Vec::new();
    for _ in 0..TIMES {
        let from = load.started().elapsed();
        scene.mesh.proxy.take().unwrap().kill().unwrap();
        scene.mesh.start_proxy().unwrap();
        scene.wait_enrolled().unwrap();
        away.push((from, load.started().elapsed()));
        // Both pods work, one after the other: none is left half-working.
        load.wait_answered(20, Duration::from_secs(10)).unwrap();
        both_listen(&scene);
    }
    let report = load.stop();
    let outside: Vec<_> = report
        .failures
        .iter()
        .filter(|failure| {
            !away
                .iter()
                .any(|(from, to)| failure.failed_at >= *from && failure.sent_at <= *to)
        })
        .collect();
    assert!(
        outside.is_empty(),
        "{} failures while the proxy was there, first: {:?}",
        outside.len(),
        outside.first()
    );
}

fn both_listen(scene: &Scene) {
    let held = scene.mesh.control().counts().unwrap();
    for pod in [&scene.client, &scene.server] {
        assert!(
            held.workloads[pod.uid()].listening,
            "{} is half-working",
            pod.name()
        );
    }
}

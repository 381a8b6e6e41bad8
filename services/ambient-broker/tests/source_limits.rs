//! The manifest directory without room for inotify. Alone in its process: it lowers the process's limits.

#![allow(clippy::expect_used, reason = "a failed step is a failed test")]

use std::fs;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use sluice_ambient_broker::source::{ManifestDirectory, PodSource, SourceEvent, WatchMode};

const LONG: Duration = Duration::from_secs(10);

fn open_descriptors() -> Vec<String> {
    fs::read_dir("/proc/self/fd")
        .expect("proc")
        .filter_map(|fd| fs::read_link(fd.ok()?.path()).ok())
        .map(|target| target.display().to_string())
        .collect()
}

fn watching_threads() -> usize {
    fs::read_dir("/proc/self/task")
        .expect("proc")
        .filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .filter(|name| name.trim() == "manifests")
        .count()
}

#[tokio::test]
async fn without_inotify_it_polls_says_so_and_recovers() {
    let dir = tempfile::tempdir().unwrap();
    let put = |label: &str| {
        let text = format!("apiVersion: v1\nkind: Pod\nmetadata: {{name: a, labels: {{l: {label}}}}}\n");
        fs::write(dir.path().join(".new"), text).unwrap();
        fs::rename(dir.path().join(".new"), dir.path().join("a.yaml")).unwrap();
    };
    put("x");
    let source = ManifestDirectory::new(dir.path(), WatchMode::Auto);

    // Room for the directory and a file in it, not for inotify and what goes with it.
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let free = fs::File::open("/dev/null").unwrap();
    let limit = u64::try_from(std::os::fd::AsRawFd::as_raw_fd(&free)).unwrap() + 2;
    drop(free);
    setrlimit(Resource::RLIMIT_NOFILE, limit, hard).unwrap();
    let mut events = source.events();
    let mut next = async || tokio::time::timeout(LONG, events.next()).await.unwrap().unwrap();

    assert!(matches!(next().await, SourceEvent::PodApplied(_)));
    let SourceEvent::Problem(problem) = next().await else {
        panic!("no problem told")
    };
    assert!(
        problem
            .message
            .contains("limit fs.inotify.max_user_instances or of open files"),
        "{problem}"
    );
    assert!(problem.message.contains("looked at every 500 ms"), "{problem}");
    assert_eq!(next().await, SourceEvent::Synced);

    let started = Instant::now();
    put("w");
    let SourceEvent::PodApplied(pod) = next().await else {
        panic!("no pod told")
    };
    assert_eq!(pod.labels["l"], "w");
    assert!(
        started.elapsed() <= Duration::from_secs(2),
        "{:?}",
        started.elapsed()
    );

    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
    assert!(matches!(next().await, SourceEvent::ProblemCleared { .. }));
    let started = Instant::now();
    put("z");
    assert!(matches!(next().await, SourceEvent::PodApplied(_)));
    assert!(
        started.elapsed() < Duration::from_millis(400),
        "announced again: {:?}",
        started.elapsed()
    );

    // Nobody listens: the thread ends and takes its descriptors with it.
    assert_eq!(watching_threads(), 1);
    drop(events);
    let deadline = Instant::now() + LONG;
    while watching_threads() > 0 || open_descriptors().iter().any(|target| target.contains("inotify")) {
        assert!(
            Instant::now() < deadline,
            "still watching: {:?}",
            open_descriptors()
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

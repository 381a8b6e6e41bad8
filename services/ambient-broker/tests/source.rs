//! The manifest directory on a real directory: what is told, when, and what is not.

#![allow(clippy::expect_used, reason = "a failed step is a failed test")]

use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use sluice_ambient_broker::source::{ManifestDirectory, PodSource, SourceEvent, WatchMode};
use tempfile::TempDir;

const LONG: Duration = Duration::from_secs(10);
/// Longer than any reaction, shorter than the writer's grace.
const QUIET: Duration = Duration::from_millis(300);

struct Fixture {
    dir: TempDir,
    source: ManifestDirectory,
    events: BoxStream<'static, SourceEvent>,
}

impl Fixture {
    /// Watches a directory with these files and takes what is told up to `Synced`.
    async fn with(mode: WatchMode, files: &[(&str, &str)]) -> (Self, Vec<String>) {
        let dir = tempfile::tempdir().expect("a directory");
        for (name, text) in files {
            put(dir.path(), name, text);
        }
        let source = ManifestDirectory::new(dir.path(), mode);
        let events = source.events();
        let mut fixture = Self { dir, source, events };
        let mut told = Vec::new();
        loop {
            match fixture.next().await.as_str() {
                "synced" => return (fixture, told),
                event => told.push(event.to_owned()),
            }
        }
    }

    async fn next(&mut self) -> String {
        let event = tokio::time::timeout(LONG, self.events.next())
            .await
            .expect("an event in time");
        self.describe(&event.expect("the stream goes on"))
    }

    async fn quiet(&mut self) {
        let event = tokio::time::timeout(QUIET, self.events.next()).await;
        assert!(event.is_err(), "told without cause: {event:?}");
    }

    fn describe(&self, event: &SourceEvent) -> String {
        let text = match event {
            SourceEvent::Synced => "synced".to_owned(),
            SourceEvent::PodApplied(pod) => {
                format!("pod {} {:?}", pod.id, pod.labels.values().collect::<Vec<_>>())
            }
            SourceEvent::PodDeleted(pod) => format!("pod {} deleted", pod.id),
            SourceEvent::NamespaceApplied(namespace) => {
                format!(
                    "namespace {} {:?}",
                    namespace.name,
                    namespace.labels.values().collect::<Vec<_>>()
                )
            }
            SourceEvent::NamespaceDeleted(namespace) => format!("namespace {} deleted", namespace.name),
            SourceEvent::Undetermined(undetermined) => format!("undetermined {undetermined}"),
            SourceEvent::Problem(problem) => format!("problem {problem}"),
            SourceEvent::ProblemCleared { place } => format!("cleared {place}"),
        };
        text.replace(&format!("{}/", self.dir.path().display()), "")
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }
}

/// As a careful writer does: complete under another name, then renamed.
fn put(dir: &Path, name: &str, text: &str) {
    let temporary = dir.join(format!(".{name}.tmp"));
    fs::write(&temporary, text).expect("written");
    fs::rename(&temporary, dir.join(name)).expect("renamed");
}

fn pod(name: &str, label: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\n  namespace: shop\n  labels: {{l: {label}}}\n"
    )
}

fn namespace(name: &str, label: &str) -> String {
    format!("apiVersion: v1\nkind: Namespace\nmetadata:\n  name: {name}\n  labels: {{l: {label}}}\n")
}

#[tokio::test]
async fn all_that_exists_is_told_before_synced_and_changes_after() {
    let files = [
        ("ns.yaml", &*namespace("shop", "x")),
        ("b.yaml", &pod("b", "x")),
        ("a.yaml", &pod("a", "x")),
    ];
    let (mut fixture, told) = Fixture::with(WatchMode::Auto, &files).await;
    assert_eq!(
        told,
        [
            "namespace shop [\"x\"]",
            "pod shop/a [\"x\"]",
            "pod shop/b [\"x\"]"
        ]
    );

    put(fixture.dir.path(), "a.yaml", &pod("a", "w"));
    assert_eq!(fixture.next().await, "pod shop/a [\"w\"]");
    put(fixture.dir.path(), "ns.yaml", &namespace("shop", "w"));
    assert_eq!(fixture.next().await, "namespace shop [\"w\"]");
    fs::remove_file(fixture.path("b.yaml")).unwrap();
    assert_eq!(fixture.next().await, "pod shop/b deleted");
    fs::remove_file(fixture.path("ns.yaml")).unwrap();
    assert_eq!(fixture.next().await, "namespace shop deleted");
    fs::rename(fixture.path("a.yaml"), fixture.path("c.yaml")).unwrap();
    put(fixture.dir.path(), "d.yaml", &pod("d", "x"));
    let event = fixture.next().await;
    assert!(
        event == "pod shop/d [\"x\"]" || event == "pod shop/a deleted",
        "{event}"
    );
}

#[tokio::test]
async fn a_file_renamed_into_place_is_told_within_milliseconds() {
    let names: Vec<String> = (0..250).map(|i| format!("pod-{i:03}.yaml")).collect();
    let texts: Vec<String> = (0..250).map(|i| pod(&format!("p{i:03}"), "x")).collect();
    let files: Vec<(&str, &str)> = names
        .iter()
        .zip(&texts)
        .map(|(n, t)| (n.as_str(), t.as_str()))
        .collect();
    let (mut fixture, told) = Fixture::with(WatchMode::Auto, &files).await;
    assert_eq!(told.len(), 250);
    let mut times = Vec::new();
    for round in 0..20 {
        let text = pod("p007", &format!("r{round}"));
        fs::write(fixture.path(".new"), text).unwrap();
        let started = Instant::now();
        fs::rename(fixture.path(".new"), fixture.path("pod-007.yaml")).unwrap();
        assert_eq!(fixture.next().await, format!("pod shop/p007 [\"r{round}\"]"));
        times.push(started.elapsed());
    }
    times.sort();
    println!(
        "rename to event with 250 manifests: median {:?}, worst {:?}",
        times[10], times[19]
    );
    assert!(times[10] < Duration::from_millis(20), "{times:?}");
}

#[tokio::test]
async fn a_file_being_written_is_read_when_its_writer_closes_it() {
    let text = pod("a", "x");
    let (mut fixture, _) = Fixture::with(WatchMode::Auto, &[("a.yaml", &text)]).await;
    // Truncated, then written up to the labels: a whole manifest of a pod without any.
    let mut file = fs::File::create(fixture.path("a.yaml")).unwrap();
    file.write_all(&text.as_bytes()[..text.find("  labels").unwrap()])
        .unwrap();
    fixture.quiet().await;
    // Another file's change does not make it be read either.
    put(fixture.dir.path(), "b.yaml", &pod("b", "x"));
    assert_eq!(fixture.next().await, "pod shop/b [\"x\"]");
    file.write_all(b"  labels: {l: w}\n").unwrap();
    fixture.quiet().await;
    let closed = Instant::now();
    drop(file);
    assert_eq!(fixture.next().await, "pod shop/a [\"w\"]");
    assert!(closed.elapsed() < Duration::from_millis(200));
}

#[tokio::test]
async fn a_bad_manifest_is_reported_and_changes_nothing() {
    let files = [
        ("a.yaml", &*format!("{}---\n{}", pod("a", "x"), pod("a2", "x"))),
        ("b.yaml", &pod("b", "x")),
    ];
    let (mut fixture, _) = Fixture::with(WatchMode::Auto, &files).await;
    put(
        fixture.dir.path(),
        "a.yaml",
        &format!("{}spec: {{hostNetwork: 5}}\n", pod("a", "w")),
    );
    let event = fixture.next().await;
    assert!(
        event.starts_with("problem a.yaml:7: spec.hostNetwork: "),
        "{event}"
    );
    fixture.quiet().await;
    // Truncating a file is not removing it.
    fs::write(fixture.path("b.yaml"), "").unwrap();
    let event = fixture.next().await;
    assert!(event.starts_with("problem b.yaml: holds no Pod"), "{event}");
    let lookup = fixture.source.lookup("shop", "b").await.unwrap();
    assert!(lookup.pod.is_some());
    // Mended: what changed is told, then that the problem is over.
    put(fixture.dir.path(), "a.yaml", &pod("a", "z"));
    assert_eq!(fixture.next().await, "pod shop/a2 deleted");
    assert_eq!(fixture.next().await, "pod shop/a [\"z\"]");
    assert_eq!(fixture.next().await, "cleared a.yaml");
    // Removed: its objects and its problem go.
    fs::remove_file(fixture.path("b.yaml")).unwrap();
    assert_eq!(fixture.next().await, "pod shop/b deleted");
    assert_eq!(fixture.next().await, "cleared b.yaml");
}

#[tokio::test]
async fn of_two_definitions_the_first_file_wins_and_the_other_takes_over() {
    let (mut fixture, told) = Fixture::with(WatchMode::Auto, &[("b.yaml", &pod("a", "second"))]).await;
    assert_eq!(told, ["pod shop/a [\"second\"]"]);
    put(fixture.dir.path(), "a.yaml", &pod("a", "first"));
    assert_eq!(fixture.next().await, "pod shop/a [\"first\"]");
    assert_eq!(
        fixture.next().await,
        "problem b.yaml: metadata.name: pod shop/a is defined before, in this file or one sorted before it; ignored here"
    );
    fs::remove_file(fixture.path("a.yaml")).unwrap();
    assert_eq!(fixture.next().await, "pod shop/a [\"second\"]");
    assert_eq!(fixture.next().await, "cleared b.yaml");
}

#[tokio::test]
async fn a_pod_replaced_under_its_name_is_deleted_first() {
    let with_uid = |uid: &str| pod("a", "x").replace("  name: a\n", &format!("  name: a\n  uid: {uid}\n"));
    let (mut fixture, _) = Fixture::with(WatchMode::Auto, &[("a.yaml", &with_uid("first"))]).await;
    put(fixture.dir.path(), "a.yaml", &with_uid("second"));
    assert_eq!(fixture.next().await, "pod shop/a deleted");
    assert_eq!(fixture.next().await, "pod shop/a [\"x\"]");
}

#[tokio::test]
async fn what_editors_leave_beside_a_file_is_ignored() {
    let (mut fixture, _) = Fixture::with(WatchMode::Auto, &[("a.yaml", &pod("a", "x"))]).await;
    for name in [
        ".a.yaml.swp",
        "a.yaml~",
        "#a.yaml#",
        "4913",
        ".hidden.yaml",
        "notes.txt",
    ] {
        fs::write(fixture.path(name), "no: manifest").unwrap();
    }
    fs::create_dir(fixture.path("below")).unwrap();
    fs::write(fixture.path("below/b.yaml"), pod("b", "x")).unwrap();
    fixture.quiet().await;
    // The way vim writes: the old file moves away, the new one is created under its name.
    fs::rename(fixture.path("a.yaml"), fixture.path("a.yaml~")).unwrap();
    fs::write(fixture.path("a.yaml"), pod("a", "w")).unwrap();
    let mut event = fixture.next().await;
    if event == "pod shop/a deleted" {
        event = fixture.next().await;
    }
    assert_eq!(event, "pod shop/a [\"w\"]");
}

#[tokio::test]
async fn a_mounted_volumes_files_change_when_its_link_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let version = |name: &str, label: &str| {
        fs::create_dir(dir.path().join(name)).unwrap();
        fs::write(dir.path().join(name).join("a.yaml"), pod("a", label)).unwrap();
        std::os::unix::fs::symlink(name, dir.path().join("..data_tmp")).unwrap();
        fs::rename(dir.path().join("..data_tmp"), dir.path().join("..data")).unwrap();
    };
    version("..1", "x");
    std::os::unix::fs::symlink("..data/a.yaml", dir.path().join("a.yaml")).unwrap();
    let source = ManifestDirectory::new(dir.path(), WatchMode::Auto);
    let events = source.events();
    let mut fixture = Fixture {
        source,
        events,
        dir: tempfile::tempdir().unwrap(),
    };
    assert_eq!(fixture.next().await, "pod shop/a [\"x\"]");
    assert_eq!(fixture.next().await, "synced");
    version("..2", "w");
    let started = Instant::now();
    assert_eq!(fixture.next().await, "pod shop/a [\"w\"]");
    assert!(
        started.elapsed() < Duration::from_secs(1),
        "{:?}",
        started.elapsed()
    );
}

#[tokio::test]
async fn a_missing_directory_takes_nothing_out_and_is_picked_up_when_it_is_there() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("manifests");
    let source = ManifestDirectory::new(&path, WatchMode::Auto);
    assert!(source.lookup("shop", "a").await.is_err());
    let events = source.events();
    let mut fixture = Fixture {
        source,
        events,
        dir: parent,
    };
    let event = fixture.next().await;
    assert!(
        event.starts_with("problem manifests: cannot be read: "),
        "{event}"
    );
    fixture.quiet().await;
    let staged = fixture.dir.path().join("staged");
    fs::create_dir(&staged).unwrap();
    put(&staged, "a.yaml", &pod("a", "x"));
    fs::rename(&staged, &path).unwrap();
    let mut told = vec![fixture.next().await];
    while told.last().is_some_and(|event| event != "synced") {
        told.push(fixture.next().await);
    }
    assert!(told.contains(&"pod shop/a [\"x\"]".to_owned()), "{told:?}");

    // Gone again: told, and its pods stay.
    fs::rename(&path, &staged).unwrap();
    let mut event = fixture.next().await;
    while !event.starts_with("problem manifests: cannot be read: ") {
        assert!(!event.contains("deleted"), "{event}");
        event = fixture.next().await;
    }
    // Another directory in its place: what is missing there is gone.
    fs::create_dir(&path).unwrap();
    loop {
        let event = fixture.next().await;
        if event == "pod shop/a deleted" {
            break;
        }
    }
}

#[tokio::test]
async fn lookup_sees_what_was_not_told_yet() {
    let (fixture, _) = Fixture::with(WatchMode::Poll, &[("ns.yaml", &namespace("shop", "x"))]).await;
    put(fixture.dir.path(), "a.yaml", &pod("a", "x"));
    let lookup = fixture.source.lookup("shop", "a").await.unwrap();
    assert_eq!(lookup.pod.unwrap().id.to_string(), "shop/a");
    assert_eq!(lookup.namespace.unwrap().labels["l"], "x");
    let missing = fixture.source.lookup("other", "a").await.unwrap();
    assert!(missing.pod.is_none() && missing.namespace.is_none());
}

#[tokio::test]
async fn a_file_that_was_never_valid_leaves_unknown_namespaces_undetermined() {
    let files = [("a.yaml", &*pod("a", "x")), ("ns.yaml", "kind: [\n")];
    let (mut fixture, told) = Fixture::with(WatchMode::Auto, &files).await;
    assert_eq!(told[..2], ["undetermined true", "pod shop/a [\"x\"]"]);
    let lookup = fixture.source.lookup("shop", "a").await.unwrap();
    assert!(lookup.pod.is_some() && lookup.namespace.is_none() && lookup.undetermined);
    put(fixture.dir.path(), "ns.yaml", &namespace("shop", "x"));
    assert_eq!(fixture.next().await, "namespace shop [\"x\"]");
    assert_eq!(fixture.next().await, "undetermined false");
    assert_eq!(fixture.next().await, "cleared ns.yaml");
    // Damaged later, it keeps what it defined.
    put(fixture.dir.path(), "ns.yaml", "kind: [\n");
    assert!(fixture.next().await.starts_with("problem ns.yaml"));
    let lookup = fixture.source.lookup("other", "a").await.unwrap();
    assert!(!lookup.undetermined);
}

#[tokio::test]
async fn a_file_that_is_being_written_for_the_first_time_leaves_a_lookup_undetermined() {
    let (mut fixture, _) = Fixture::with(WatchMode::Auto, &[("a.yaml", &pod("a", "x"))]).await;
    let mut file = fs::File::create(fixture.path("ns.yaml")).unwrap();
    file.write_all(b"apiVersion: v1\n").unwrap();
    fixture.quiet().await;
    put(fixture.dir.path(), "b.yaml", &pod("b", "x"));
    assert_eq!(fixture.next().await, "pod shop/b [\"x\"]");
    let lookup = fixture.source.lookup("shop", "a").await.unwrap();
    assert!(lookup.undetermined);
}

#[tokio::test]
async fn polling_reads_a_file_once_it_no_longer_changes() {
    let text = pod("a", "x");
    let (mut fixture, _) = Fixture::with(WatchMode::Poll, &[("a.yaml", &text)]).await;
    let started = Instant::now();
    put(fixture.dir.path(), "a.yaml", &pod("a", "w"));
    put(fixture.dir.path(), "b.yaml", &pod("b", "w"));
    assert_eq!(fixture.next().await, "pod shop/a [\"w\"]");
    assert_eq!(fixture.next().await, "pod shop/b [\"w\"]");
    assert!(
        started.elapsed() < Duration::from_secs(2),
        "{:?}",
        started.elapsed()
    );
    fs::remove_file(fixture.path("a.yaml")).unwrap();
    assert_eq!(fixture.next().await, "pod shop/a deleted");
}

#[tokio::test]
async fn an_unreadable_file_keeps_its_objects() {
    let (mut fixture, _) = Fixture::with(WatchMode::Auto, &[("a.yaml", &pod("a", "x"))]).await;
    fs::write(fixture.path("new"), [0xff, 0xfe, 0x00]).unwrap();
    fs::rename(fixture.path("new"), fixture.path("a.yaml")).unwrap();
    assert_eq!(
        fixture.next().await,
        "problem a.yaml: not UTF-8 text, from byte 0 on"
    );
    fs::write(fixture.path("new"), vec![b'#'; (1 << 20) + 1]).unwrap();
    fs::rename(fixture.path("new"), fixture.path("a.yaml")).unwrap();
    assert_eq!(fixture.next().await, "cleared a.yaml");
    assert_eq!(fixture.next().await, "problem a.yaml: larger than 1048576 bytes");
    assert!(fixture.source.lookup("shop", "a").await.unwrap().pod.is_some());
}

//! How files come to be: written in place, by editors, as mounted volumes, with their directory.

use std::fs;
use std::io::Write;
use std::time::{Duration, Instant};

use sluice_ambient_broker::source::{ManifestDirectory, PodSource, WatchMode};

use crate::fixture::{Fixture, pod, put};

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
async fn a_slow_writer_that_replaces_a_file_is_not_read_before_it_has_written() {
    for remove in [false, true] {
        let (mut fixture, _) = Fixture::with(WatchMode::Auto, &[("a.yaml", &pod("a", "x"))]).await;
        if remove {
            fs::remove_file(fixture.path("a.yaml")).unwrap();
        } else {
            fs::rename(fixture.path("a.yaml"), fixture.path("a.yaml~")).unwrap();
        }
        let mut file = fs::File::create(fixture.path("a.yaml")).unwrap();
        std::thread::sleep(Duration::from_millis(200));
        file.write_all(pod("a", "w").as_bytes()).unwrap();
        drop(file);
        let mut event = fixture.next().await;
        if event == "pod shop/a deleted" {
            event = fixture.next().await;
        }
        assert_eq!(event, "pod shop/a [\"w\"]");
    }
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

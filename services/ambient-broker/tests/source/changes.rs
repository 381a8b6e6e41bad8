//! Files that come, change and go.

use std::fs;
use std::time::{Duration, Instant};

use sluice_ambient_broker::source::{PodSource, WatchMode};

use crate::fixture::{Fixture, namespace, pod, put};

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

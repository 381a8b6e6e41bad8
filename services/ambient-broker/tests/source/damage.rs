//! Files that cannot be read or mean nothing.

use std::fs;

use sluice_ambient_broker::source::{PodSource, WatchMode};

use crate::fixture::{Fixture, namespace, pod, put};

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

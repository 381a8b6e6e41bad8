//! Lists and watches.

use std::time::{Duration, Instant};

use super::api::{Api, Fault};
use super::*;

#[tokio::test]
async fn everything_is_told_then_synced_then_what_changes() {
    let api = Api::start().await;
    namespace(&api, "shop", "ambient");
    api.put(&path("a"), pod("a", "1"));
    let kubernetes = kubernetes(&api, quick()).await;
    let mut heard = Heard::new(&kubernetes);
    assert_eq!(
        heard.until("synced").await,
        ["+namespace shop", "+pod a 1", "synced"]
    );
    api.put(&path("b"), pod("b", "2"));
    assert_eq!(heard.until("+pod").await, ["+pod b 2"]);
    api.put(&path("a"), pod("a", "3"));
    assert_eq!(heard.until("+pod").await, ["-pod a 1", "+pod a 3"]);
    api.delete(&path("b"));
    assert_eq!(heard.until("-pod").await, ["-pod b 2"]);
    namespace(&api, "shop", "none");
    assert_eq!(heard.until("+namespace").await, ["+namespace shop"]);
    api.delete(&format!("{NAMESPACES}/shop"));
    assert_eq!(heard.until("-namespace").await, ["-namespace shop"]);
    let pods = api.seen("GET", PODS);
    assert!(
        pods.iter()
            .all(|seen| seen.query.contains("fieldSelector=spec.nodeName%3Dnode-1")),
        "{pods:?}"
    );
    assert!(pods.iter().all(|seen| seen.token == "Bearer first"));
}

#[tokio::test]
async fn a_watch_that_ends_or_breaks_goes_on_where_it_was() {
    let (api, _kubernetes, mut heard) = ready().await;
    // It has ended by itself, twice, with nobody told of anything.
    eventually("watched again", || (api.watches(PODS) > 2).then_some(())).await;
    api.watch_fault(PODS, Fault::Cut, 1);
    eventually("rule taken", || (api.watches(PODS) > 3).then_some(())).await;
    api.put(&path("a"), pod("a", "1"));
    assert_eq!(heard.until("+pod").await.last().unwrap(), "+pod a 1");
    assert_eq!((api.lists(PODS), api.lists(NAMESPACES)), (1, 1));
}

#[tokio::test]
async fn a_watch_that_is_silent_is_given_up() {
    let (api, _kubernetes, mut heard) = ready().await;
    api.watch_fault(PODS, Fault::Freeze, 1);
    let before = api.watches(PODS);
    eventually("frozen", || (api.watches(PODS) > before).then_some(())).await;
    let frozen = Instant::now();
    api.put(&path("a"), pod("a", "1"));
    let told = heard.until("+pod").await;
    assert!(
        told.iter()
            .any(|line| line.contains("no answer within 1.2 s (silent)")),
        "{told:?}"
    );
    let took = frozen.elapsed();
    assert!(
        took > Duration::from_millis(900) && took < Duration::from_secs(3),
        "{took:?}"
    );
    assert_eq!(api.lists(PODS), 1);
}

#[tokio::test]
async fn a_version_that_is_too_old_is_listed_anew_and_what_was_missed_is_told() {
    let (api, _kubernetes, mut heard) = ready().await;
    api.put(&path("a"), pod("a", "1"));
    api.put(&path("b"), pod("b", "2"));
    heard.until("+pod b").await;
    api.down().await;
    api.delete(&path("a"));
    api.put(&path("c"), pod("c", "3"));
    api.watch_fault(PODS, Fault::Gone, 1);
    api.up().await;
    let told = heard.until("+pod").await;
    assert_eq!(told.last().unwrap(), "+pod c 3");
    assert!(!told.iter().any(|line| line.contains("pod b")), "{told:?}");
    heard.until("-pod a").await;
    assert_eq!(api.lists(PODS), 2);
}

#[tokio::test]
async fn the_answer_410_to_a_watch_counts_the_same() {
    let (api, _kubernetes, mut heard) = ready().await;
    api.watch_fault(PODS, Fault::Code(410), 1);
    eventually("listed", || (api.lists(PODS) == 2).then_some(())).await;
    api.put(&path("a"), pod("a", "1"));
    heard.until("+pod a").await;
}

#[tokio::test]
async fn a_server_that_is_down_is_told_of_and_nothing_is_synced_before_it_comes() {
    let api = Api::start().await;
    api.down().await;
    let kubernetes = kubernetes(&api, quick()).await;
    let mut heard = Heard::new(&kubernetes);
    let told = heard.until("problem Kubernetes API (namespaces)").await;
    assert!(
        told[0].contains("Connection refused") || told[0].contains("ECONNREFUSED"),
        "{told:?}"
    );
    assert!(told[0].contains("(unreachable); check the network"), "{told:?}");
    namespace(&api, "shop", "ambient");
    api.up().await;
    let told = heard.until("synced").await;
    assert!(
        told.contains(&"over Kubernetes API (namespaces)".to_owned()),
        "{told:?}"
    );
    assert!(told.contains(&"+namespace shop".to_owned()), "{told:?}");
}

#[tokio::test]
async fn a_server_that_goes_down_takes_nothing_away() {
    let (api, _kubernetes, mut heard) = ready().await;
    api.put(&path("a"), pod("a", "1"));
    heard.until("+pod a").await;
    api.down().await;
    heard.until("problem Kubernetes API (pods)").await;
    api.up().await;
    api.put(&path("b"), pod("b", "2"));
    let told = heard.until("+pod b").await;
    assert!(!told.iter().any(|line| line.starts_with('-')), "{told:?}");
    assert!(
        told.contains(&"over Kubernetes API (pods)".to_owned()),
        "{told:?}"
    );
    assert_eq!(api.lists(PODS), 1);
}

#[tokio::test]
async fn a_server_that_hangs_is_told_of() {
    let api = Api::start().await;
    api.fault("GET", PODS, Fault::Hang, 1);
    let kubernetes = kubernetes(&api, quick()).await;
    let mut heard = Heard::new(&kubernetes);
    let told = heard.until("synced").await;
    let silent = "problem Kubernetes API (pods): cannot list pods: no answer within 0.5 s (silent)";
    assert!(told.iter().any(|line| line.starts_with(silent)), "{told:?}");
}

#[tokio::test]
async fn a_refused_token_is_read_anew() {
    let (api, _kubernetes, mut heard) = ready().await;
    api.require_token("second");
    let told = heard.until("problem Kubernetes API (pods)").await;
    assert!(told.last().unwrap().contains("(unauthorized)"), "{told:?}");
    std::fs::write(api.token_file(), "second\n").unwrap();
    heard.until("over Kubernetes API (pods)").await;
    api.put(&path("a"), pod("a", "1"));
    heard.until("+pod a").await;
    assert_eq!(api.lists(PODS), 1);
}

#[tokio::test]
async fn a_missing_rule_is_told_with_what_to_do() {
    let api = Api::start().await;
    api.fault("GET", PODS, Fault::Code(403), 3);
    let kubernetes = kubernetes(&api, quick()).await;
    let mut heard = Heard::new(&kubernetes);
    let told = heard.until("synced").await;
    let forbidden = told
        .iter()
        .find(|line| line.starts_with("problem Kubernetes API (pods)"))
        .unwrap();
    assert!(
        forbidden.contains("answers 403") && forbidden.contains("ClusterRole"),
        "{forbidden}"
    );
    assert!(told.contains(&"over Kubernetes API (pods)".to_owned()));
    // The same trouble is told once.
    assert_eq!(
        told.iter()
            .filter(|line| line.starts_with("problem Kubernetes API (pods)"))
            .count(),
        1
    );
}

#[tokio::test]
async fn a_server_that_asks_for_a_pause_gets_it_from_everybody() {
    let (api, kubernetes, mut heard) = ready().await;
    let quiet = Instant::now();
    api.watch_fault(PODS, Fault::Later(2), 1);
    heard.until("problem Kubernetes API (pods)").await;
    let pause = api.seen("GET", PODS).last().unwrap().at;
    assert!(pause >= quiet);
    let lookup = shared(&kubernetes)
        .lookup("shop", "a")
        .await
        .unwrap_err()
        .to_string();
    assert!(lookup.contains("asked for a pause"), "{lookup}");
    heard.until("over Kubernetes API (pods)").await;
    let later = api
        .seen("GET", "/")
        .into_iter()
        .filter(|seen| seen.at > pause)
        .map(|seen| seen.at - pause);
    let first = later.min().unwrap();
    assert!(first >= Duration::from_millis(1990), "{first:?}");
}

#[tokio::test]
async fn a_server_that_fails_is_asked_less_and_less_often() {
    let api = Api::start().await;
    api.fault("GET", NAMESPACES, Fault::Code(500), 6);
    let kubernetes = kubernetes(&api, quick()).await;
    let mut heard = Heard::new(&kubernetes);
    let told = heard.until("synced").await;
    assert!(told.iter().any(|line| line.contains("(server)")), "{told:?}");
    let asked = api.seen("GET", NAMESPACES);
    let pauses: Vec<_> = asked
        .windows(2)
        .take(6)
        .map(|two| two[1].at - two[0].at)
        .collect();
    // Doubled each time up to 200 ms, each between half and all of it.
    assert!(
        pauses[0] >= Duration::from_millis(10) && pauses[0] < Duration::from_millis(100),
        "{pauses:?}"
    );
    assert!(pauses[5] >= Duration::from_millis(100), "{pauses:?}");
}

#[tokio::test]
async fn nobody_listening_ends_the_watches() {
    let (api, _kubernetes, heard) = ready().await;
    drop(heard);
    // One watch may have been under way.
    let before = api.watches(PODS);
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert!(api.watches(PODS) <= before + 1);
}

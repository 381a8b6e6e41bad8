use super::super::wire::RawPod;
use super::*;

const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));

fn pod(uid: &str, version: u32, value: Option<&str>) -> WirePod {
    pod_in("Running", uid, version, value)
}

fn pod_in(phase: &str, uid: &str, version: u32, value: Option<&str>) -> WirePod {
    let mut annotations = serde_json::Map::new();
    if let Some(value) = value {
        annotations.insert(REDIRECTION_STATUS.into(), value.into());
    }
    serde_json::from_value::<RawPod>(serde_json::json!({
        "metadata": {"name": "p", "namespace": "shop", "uid": uid, "resourceVersion": version.to_string(),
            "annotations": annotations},
        "status": {"phase": phase}}))
    .unwrap()
    .convert()
    .unwrap()
}

fn uid(text: &str) -> PodUid {
    PodUid::parse(text).unwrap()
}

fn due(book: &Book, now: Instant) -> Vec<bool> {
    book.due(now, 8)
        .0
        .into_iter()
        .map(|patch| patch.enrolled)
        .collect()
}

#[test]
fn an_enrolment_is_one_patch_whatever_is_seen_meanwhile() {
    let (book, now) = (Book::new(RETRY), Instant::now());
    book.seen(&pod("u", 5, None), false);
    assert!(book.want(&uid("u"), true));
    let (patches, _) = book.due(now, 8);
    assert_eq!(patches.len(), 1);
    // Under way: asked again and seen without it, nothing more is due.
    assert!(book.want(&uid("u"), true));
    assert!(!book.seen(&pod("u", 6, None), false));
    assert!(due(&book, now).is_empty());
    book.patched(&patches[0], Patched::Done(9), now);
    // An older object that arrives late does not count, the newer ones agree.
    assert!(!book.seen(&pod("u", 8, None), false));
    assert!(!book.seen(&pod("u", 9, Some("enabled")), false));
    assert!(due(&book, now).is_empty());
}

#[test]
fn a_new_pods_status_waits_until_its_sandbox_is_made() {
    let (book, before) = (Book::new(RETRY), Instant::now());
    book.seen(&pod_in("Pending", "u", 5, None), false);
    book.want(&uid("u"), true);
    let (patches, next) = book.due(before, 8);
    assert!(patches.is_empty() && next.unwrap() >= before + SANDBOX);
    // Taking back is never late.
    book.want(&uid("u"), false);
    assert_eq!(book.due(before, 8), (Vec::new(), None));
    book.want(&uid("u"), true);
    let later = Instant::now() + SANDBOX;
    let (patches, _) = book.due(later, 8);
    assert!(patches[0].enrolled);
    book.patched(&patches[0], Patched::Done(6), later);
    book.want(&uid("u"), false);
    assert_eq!(due(&book, later), [false]);
}

#[test]
fn whoever_waits_for_a_status_is_told_when_the_api_has_it() {
    let (book, now) = (Book::new(RETRY), Instant::now());
    book.seen(&pod("u", 1, None), false);
    book.want(&uid("u"), true);
    let mut written = book.written(&uid("u")).unwrap();
    let (failed, _) = book.due(now, 8);
    book.patched(&failed[0], Patched::Failed(None), now);
    assert!(written.try_recv().is_err(), "a patch that failed");
    let (done, _) = book.due(now + RETRY.1, 8);
    book.patched(&done[0], Patched::Done(2), now);
    written.try_recv().unwrap();
    assert!(book.written(&uid("u")).is_none(), "it is there");

    // The answer was lost, but the watch tells that it was written.
    book.want(&uid("u"), false);
    let mut withdrawn = book.written(&uid("u")).unwrap();
    book.seen(&pod("u", 3, None), false);
    withdrawn.try_recv().unwrap();

    // What is wanted no longer is never told.
    book.want(&uid("u"), true);
    let mut given_up = book.written(&uid("u")).unwrap();
    book.want(&uid("u"), false);
    book.want(&uid("u"), true);
    assert!(matches!(
        given_up.try_recv(),
        Err(oneshot::error::TryRecvError::Closed)
    ));
}

#[test]
fn on_off_on_while_a_patch_is_under_way_ends_as_it_should() {
    let (book, now) = (Book::new(RETRY), Instant::now());
    book.seen(&pod("u", 1, None), false);
    book.want(&uid("u"), true);
    let (first, _) = book.due(now, 8);
    book.want(&uid("u"), false);
    book.patched(&first[0], Patched::Done(2), now);
    let (second, _) = book.due(now, 8);
    assert!(!second[0].enrolled);
    book.want(&uid("u"), true);
    book.patched(&second[0], Patched::Done(3), now);
    assert_eq!(due(&book, now), [true]);
}

#[test]
fn what_somebody_else_writes_is_noticed_and_put_right() {
    let (book, now) = (Book::new(RETRY), Instant::now());
    book.seen(&pod("u", 1, None), false);
    assert!(book.seen(&pod("u", 2, Some("enabled")), false), "by hand");
    assert_eq!(due(&book, now), [false]);
    let other = Book::new(RETRY);
    other.seen(&pod("u", 1, Some("yes please")), false);
    assert_eq!(due(&other, now), [false]);
}

#[test]
fn after_a_restart_what_is_there_counts_as_ours_until_told_otherwise() {
    let (book, now) = (Book::new(RETRY), Instant::now());
    book.seen(&pod("u", 1, Some("enabled")), false);
    assert!(due(&book, now).is_empty());
    book.want(&uid("u"), false);
    assert_eq!(due(&book, now), [false]);
}

#[test]
fn failures_wait_and_a_new_wish_does_not() {
    let (book, now) = (Book::new(RETRY), Instant::now());
    book.seen(&pod("u", 1, None), false);
    book.want(&uid("u"), true);
    let (patches, _) = book.due(now, 8);
    book.patched(&patches[0], Patched::Failed(Some(Duration::from_secs(7))), now);
    let (none, next) = book.due(now + Duration::from_secs(6), 8);
    assert!(none.is_empty());
    assert!(next.unwrap() >= now + Duration::from_secs(7));
    assert_eq!(due(&book, now + Duration::from_secs(8)), [true]);
}

#[test]
fn a_pod_that_is_not_here_or_is_another_one_is_left_alone() {
    let (book, now) = (Book::new(RETRY), Instant::now());
    assert!(!book.want(&uid("nobody"), true));
    book.seen(&pod("u", 1, None), false);
    book.want(&uid("u"), true);
    let (patches, _) = book.due(now, 8);
    book.patched(&patches[0], Patched::Gone, now);
    assert!(due(&book, now).is_empty());
    book.gone("u");
    assert!(!book.want(&uid("u"), true));
}

#[test]
fn a_static_pod_is_patched_by_the_uid_the_api_knows() {
    let hash = "0123456789abcdef0123456789abcdef";
    let mut mirror = pod("mirror", 1, None);
    let inner = Arc::make_mut(&mut mirror.pod);
    inner
        .annotations
        .insert(sluice_selection::CONFIG_MIRROR.into(), hash.into());
    let (book, now) = (Book::new(RETRY), Instant::now());
    book.seen(&mirror, false);
    assert!(book.want(&uid(hash), true));
    assert_eq!(book.due(now, 8).0[0].pod.uid, uid("mirror"));
}

fn report(standing: Standing, ignored: &str) -> Arc<PodReport> {
    Arc::new(PodReport {
        pod: PodRef {
            namespace: "shop".parse().unwrap(),
            name: "p".parse().unwrap(),
            uid: uid("u"),
        },
        standing,
        unprotected: standing == Standing::Pending,
        verdict: "label".into(),
        ignored: ignored.into(),
        reason: if standing == Standing::Pending {
            "no-proxy"
        } else {
            ""
        },
        last_error: None,
        netns: None,
        addresses: Vec::new(),
        timings: Vec::new(),
        acked: None,
        retries: 0,
        rules_version: String::new(),
    })
}

#[test]
fn annotations_that_are_not_taken_are_told_once_each() {
    let (book, now) = (Book::new(RETRY), Instant::now());
    book.seen(&pod("u", 1, None), false);
    let mut told = Vec::new();
    for ignored in ["one", "one", "", "", "another"] {
        book.reported(&uid("u"), &report(Standing::Enrolled, ignored), now);
        told.extend(book.ignored().into_iter().map(|(_, text)| text));
    }
    assert_eq!(told, ["one", "another"]);
}

#[test]
fn a_running_pod_outside_of_the_mesh_is_told_of_once_if_it_stays_there() {
    const PATIENCE: Duration = Duration::from_secs(8);
    let (book, now) = (Book::new(RETRY), Instant::now());
    let after = |seconds| now + Duration::from_secs(seconds);
    book.seen(&pod("u", 1, None), false);
    book.reported(&uid("u"), &report(Standing::Pending, ""), now);
    assert!(book.untold(after(7), PATIENCE).is_empty());
    // Tried again in vain: no new patience.
    book.reported(&uid("u"), &report(Standing::Pending, ""), after(7));
    assert_eq!(book.untold(after(8), PATIENCE).len(), 1);
    assert!(book.untold(after(60), PATIENCE).is_empty());
}

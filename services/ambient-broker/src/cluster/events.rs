//! Kubernetes Events on pods: what `kubectl describe pod` shows. Best effort: one that cannot be written is lost.
//!
//! Few on purpose: an Event that says the same of the same pod is counted, not written again, and all of them
//! together pass a bucket, so that a node on which everything fails does not make the API server fail too.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kube::core::params::{Patch, PatchParams, PostParams};
use kube::core::request::Request;
use serde_json::json;
use sluice_proto::id::PodRef;
use tokio::sync::mpsc;

use super::Kind;
use super::client::Api;
use super::failure::ApiError;
use super::wire::MetadataOnly;

/// Who reports (a qualified name, as the API asks for).
const CONTROLLER: &str = "sluice/ambient-broker";
/// Longest note (Kubernetes API reference, Event v1).
const LONGEST_NOTE: usize = 1000;
/// Another note for the same reason is written after this time at the earliest.
const ANOTHER: Duration = Duration::from_secs(30);
/// Events that may be written at once, and how long one takes to come back.
const BURST: u32 = 20;
const REFILL: Duration = Duration::from_secs(1);
/// More than that are not remembered.
const REMEMBERED: usize = 512;
/// The place in troubles.
const PLACE: &str = "events";

/// Something people should know of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Note {
    /// The pod as the API knows it.
    pub(super) pod: PodRef,
    /// A word for machines.
    pub(super) reason: &'static str,
    /// It needs attention.
    pub(super) warning: bool,
    /// Who, what, why, and what to do.
    pub(super) text: String,
}

/// Where notes are handed in.
#[derive(Debug, Clone)]
pub(super) struct Recorder(mpsc::Sender<Note>);

impl Recorder {
    /// A recorder and the queue that [`write()`] empties.
    pub(super) fn new() -> (Self, mpsc::Receiver<Note>) {
        let (sender, queue) = mpsc::channel(64);
        (Self(sender), queue)
    }

    /// Hands a note in; lost if there are too many.
    pub(super) fn record(&self, note: Note) {
        if self.0.try_send(note).is_err() {
            tracing::debug!("too many events at once");
        }
    }
}

/// Writes notes, for ever.
pub(super) async fn write(api: Api, mut queue: mpsc::Receiver<Note>, instance: String) {
    let mut ledger = Ledger::new(Instant::now(), api.timing.event_repeat);
    while let Some(note) = queue.recv().await {
        let now = Instant::now();
        let result = match ledger.take(&note, now) {
            Step::Nothing => continue,
            Step::Create(name) => create(&api, &note, &name, &instance).await,
            Step::Repeat(name, count) => match repeat(&api, &note, &name, count).await {
                // The server forgets Events after an hour.
                Err(error) if error.kind == Kind::NotFound => {
                    let name = ledger.begin(&note, now);
                    create(&api, &note, &name, &instance).await
                }
                result => result,
            },
        };
        match result {
            Ok(()) => api.troubles.over(PLACE),
            Err(error) if error.kind == Kind::NotFound => {}
            Err(error) => {
                ledger.forget(&note);
                api.troubles.stand(PLACE, &error);
            }
        }
    }
}

fn events(note: &Note) -> Request {
    Request::new(format!(
        "/apis/events.k8s.io/v1/namespaces/{}/events",
        note.pod.namespace
    ))
}

async fn create(api: &Api, note: &Note, name: &str, instance: &str) -> Result<(), ApiError> {
    let pod = &note.pod;
    let body = json!({
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": pod.namespace.as_str()},
        "eventTime": micro_now(),
        "reportingController": CONTROLLER,
        "reportingInstance": shorten(instance, 128),
        "action": "Enrol",
        "reason": note.reason,
        "type": if note.warning { "Warning" } else { "Normal" },
        "note": shorten(&note.text, LONGEST_NOTE),
        "regarding": {
            "apiVersion": "v1", "kind": "Pod", "namespace": pod.namespace.as_str(), "name": pod.name.as_str(),
            "uid": pod.uid.as_str(),
        },
    });
    let built = events(note).create(&PostParams::default(), body.to_string().into_bytes());
    let created = api
        .read::<MetadataOnly>("create event", built, api.timing.call)
        .await;
    created.map(drop)
}

async fn repeat(api: &Api, note: &Note, name: &str, count: u32) -> Result<(), ApiError> {
    let body = json!({"series": {"count": count, "lastObservedTime": micro_now()}});
    let built = events(note).patch(name, &PatchParams::default(), &Patch::Merge(body));
    let patched = api
        .read::<MetadataOnly>("patch event", built, api.timing.call)
        .await;
    patched.map(drop)
}

/// RFC 3339 with microseconds, as `MicroTime` is written.
fn micro_now() -> String {
    format!("{:.6}", jiff::Timestamp::now())
}

fn shorten(text: &str, longest: usize) -> String {
    let end = text.floor_char_boundary(longest);
    text[..end].to_owned()
}

/// What to do with a note.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Nothing,
    /// Write it under this name.
    Create(String),
    /// Count it on the Event of this name.
    Repeat(String, u32),
}

#[derive(Debug)]
struct Written {
    name: String,
    text: String,
    count: u32,
    at: Instant,
}

/// What was written of whom: pure but for the names, which are random.
#[derive(Debug)]
struct Ledger {
    /// The same again is written after this time at the earliest.
    repeat: Duration,
    written: HashMap<(String, &'static str), Written>,
    tokens: u32,
    refilled: Instant,
}

impl Ledger {
    fn new(now: Instant, repeat: Duration) -> Self {
        Self {
            repeat,
            written: HashMap::new(),
            tokens: BURST,
            refilled: now,
        }
    }

    fn take(&mut self, note: &Note, now: Instant) -> Step {
        let key = (note.pod.uid.to_string(), note.reason);
        if let Some(written) = self.written.get_mut(&key) {
            let same = written.text == note.text;
            let age = now.saturating_duration_since(written.at);
            written.count = written.count.saturating_add(1);
            if age < if same { self.repeat } else { ANOTHER } {
                return Step::Nothing;
            }
            if !self.spend(now) {
                return Step::Nothing;
            }
            if same && let Some(written) = self.written.get_mut(&key) {
                written.at = now;
                return Step::Repeat(written.name.clone(), written.count);
            }
            return Step::Create(self.begin(note, now));
        }
        if self.spend(now) {
            Step::Create(self.begin(note, now))
        } else {
            Step::Nothing
        }
    }

    /// Remembers the note as just written; its name.
    fn begin(&mut self, note: &Note, now: Instant) -> String {
        if self.written.len() >= REMEMBERED {
            let repeat = self.repeat;
            self.written
                .retain(|_, written| now.saturating_duration_since(written.at) < repeat);
        }
        let name = format!(
            "{}.{:016x}",
            shorten(note.pod.name.as_str(), 230),
            super::pause::random()
        );
        let written = Written {
            name: name.clone(),
            text: note.text.clone(),
            count: 1,
            at: now,
        };
        if self.written.len() < REMEMBERED {
            self.written
                .insert((note.pod.uid.to_string(), note.reason), written);
        }
        name
    }

    /// It could not be written.
    fn forget(&mut self, note: &Note) {
        self.written.remove(&(note.pod.uid.to_string(), note.reason));
    }

    fn spend(&mut self, now: Instant) -> bool {
        let earned = now.saturating_duration_since(self.refilled).as_secs() / REFILL.as_secs();
        if earned > 0 {
            self.refilled = now;
            self.tokens = self
                .tokens
                .saturating_add(u32::try_from(earned).unwrap_or(BURST))
                .min(BURST);
        }
        let some = self.tokens > 0;
        self.tokens = self.tokens.saturating_sub(1);
        some
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPEAT: Duration = Duration::from_mins(10);

    fn note(uid: &str, text: &str) -> Note {
        Note {
            pod: PodRef {
                namespace: "shop".parse().unwrap(),
                name: "p".parse().unwrap(),
                uid: uid.parse().unwrap(),
            },
            reason: "R",
            warning: true,
            text: text.into(),
        }
    }

    #[test]
    fn the_same_is_counted_and_written_once_in_a_while() {
        let now = Instant::now();
        let mut ledger = Ledger::new(now, REPEAT);
        let Step::Create(name) = ledger.take(&note("u", "a"), now) else {
            panic!("not created");
        };
        assert_eq!(ledger.take(&note("u", "a"), now), Step::Nothing);
        assert_eq!(ledger.take(&note("u", "b"), now), Step::Nothing);
        assert_eq!(ledger.take(&note("u", "a"), now + REPEAT), Step::Repeat(name, 4));
        let other = ledger.take(&note("u", "b"), now + REPEAT + ANOTHER);
        assert!(matches!(other, Step::Create(_)));
    }

    #[test]
    fn a_flood_is_cut_and_comes_back_slowly() {
        let now = Instant::now();
        let mut ledger = Ledger::new(now, REPEAT);
        let mut written =
            |n: u32, now| !matches!(ledger.take(&note(&format!("u{n}"), "a"), now), Step::Nothing);
        assert_eq!((0..100).filter(|n| written(*n, now)).count(), 20);
        let later = now + 3 * REFILL;
        assert_eq!((100..200).filter(|n| written(*n, later)).count(), 3);
    }

    #[test]
    fn times_have_microseconds_and_notes_end_at_a_character() {
        let now = micro_now();
        assert!(
            now.ends_with('Z') && now.split_once('.').unwrap().1.len() == 7,
            "{now}"
        );
        assert_eq!(shorten("aä", 2), "a");
    }
}

//! A directory, the source on it, and what it tells as text.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use sluice_ambient_broker::source::{ManifestDirectory, PodSource, SourceEvent, WatchMode};
use tempfile::TempDir;

const LONG: Duration = Duration::from_secs(10);

/// Longer than any reaction, shorter than the writer's grace.
const QUIET: Duration = Duration::from_millis(300);

pub(crate) struct Fixture {
    pub(crate) dir: TempDir,
    pub(crate) source: ManifestDirectory,
    pub(crate) events: BoxStream<'static, SourceEvent>,
}

impl Fixture {
    /// Watches a directory with these files and takes what is told up to `Synced`.
    pub(crate) async fn with(mode: WatchMode, files: &[(&str, &str)]) -> (Self, Vec<String>) {
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

    pub(crate) async fn next(&mut self) -> String {
        let event = tokio::time::timeout(LONG, self.events.next())
            .await
            .expect("an event in time");
        self.describe(&event.expect("the stream goes on"))
    }

    pub(crate) async fn quiet(&mut self) {
        let event = tokio::time::timeout(QUIET, self.events.next()).await;
        assert!(event.is_err(), "told without cause: {event:?}");
    }

    pub(crate) fn describe(&self, event: &SourceEvent) -> String {
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

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

/// As a careful writer does: complete under another name, then renamed.
pub(crate) fn put(dir: &Path, name: &str, text: &str) {
    let temporary = dir.join(format!(".{name}.tmp"));
    fs::write(&temporary, text).expect("written");
    fs::rename(&temporary, dir.join(name)).expect("renamed");
}

pub(crate) fn pod(name: &str, label: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\n  namespace: shop\n  labels: {{l: {label}}}\n"
    )
}

pub(crate) fn namespace(name: &str, label: &str) -> String {
    format!("apiVersion: v1\nkind: Namespace\nmetadata:\n  name: {name}\n  labels: {{l: {label}}}\n")
}

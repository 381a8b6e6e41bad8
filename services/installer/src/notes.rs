//! What an operator should know although it keeps nothing from working.

use std::path::Path;

use serde::Deserialize;
use sluice_proto::paths::RunDir;
use sluice_selection::SelectionConfig;

use crate::config::read_selection;
use crate::files;

/// Records of static pods that are told at most.
const MOST: usize = 100;

/// Settings in the selection file that are not yet in force: broker and plugin must have the same, so nobody takes over a
/// change alone.
pub(crate) fn pending_restart(path: &Path, in_force: &SelectionConfig) -> Option<String> {
    let found = match read_selection(path) {
        Ok(found) if found == *in_force => return None,
        Ok(found) => found,
        Err(error) => {
            let error = sluice_runtime::telemetry::chain(&error);
            return Some(format!(
                "pending-restart: {error}; the settings that were read at the start stay in force"
            ));
        }
    };
    let fields = |config: &SelectionConfig| serde_json::to_value(config).unwrap_or_default();
    let (old, new) = (fields(in_force), fields(&found));
    let changed: Vec<&str> = new
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(key, value)| old.get(key.as_str()) != Some(value))
        .map(|(key, _)| key.as_str())
        .collect();
    Some(format!(
        "pending-restart: {} has another {} since the start; restart the agent's pod",
        path.display(),
        changed.join(", ")
    ))
}

/// Static pods that the plugin let start while nobody could say whether they belong to the mesh.
pub(crate) fn unprotected(run: &RunDir) -> Vec<String> {
    #[derive(Deserialize)]
    struct Record {
        pod: String,
        unix_ms: u64,
        error: String,
    }
    let entries = std::fs::read_dir(run.unprotected())
        .into_iter()
        .flatten()
        .flatten();
    let records = entries
        .filter(|entry| {
            entry
                .file_name()
                .to_str()
                .is_some_and(|name| !name.starts_with('.'))
        })
        .take(MOST)
        .filter_map(|entry| serde_json::from_slice::<Record>(&files::read(&entry.path()).ok()?.0).ok());
    let note = |record: Record| {
        format!(
            "unprotected: static pod {} started without the mesh at Unix time {}: {}",
            record.pod,
            record.unix_ms / 1000,
            record.error
        )
    };
    let mut notes: Vec<String> = records.map(note).collect();
    notes.sort();
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_selection_is_told_by_field() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("selection.yaml");
        std::fs::write(&path, "dnsCapture: true\n").unwrap();
        let in_force = read_selection(&path).unwrap();
        assert_eq!(pending_restart(&path, &in_force), None);
        std::fs::write(&path, "dnsCapture: false\nexcludedNamespaces: [a]\n").unwrap();
        let note = pending_restart(&path, &in_force).unwrap();
        assert!(
            note.contains("has another excludedNamespaces, dnsCapture since"),
            "{note}"
        );
        std::fs::write(&path, "dnsCapture: maybe\n").unwrap();
        let note = pending_restart(&path, &in_force).unwrap();
        assert!(
            note.contains("is not valid") && note.contains("stay in force"),
            "{note}"
        );
    }

    #[test]
    fn static_pods_that_passed_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let run = RunDir::new(directory.path());
        assert!(unprotected(&run).is_empty());
        std::fs::create_dir_all(run.unprotected()).unwrap();
        let record = r#"{"pod":"kube-system/etcd-a","container_id":"c0ffee","unix_ms":1700000000123,"error":"API down"}"#;
        std::fs::write(run.unprotected().join("0123.json"), record).unwrap();
        std::fs::write(run.unprotected().join(".0124.77"), record).unwrap();
        std::fs::write(run.unprotected().join("0125.json"), "{").unwrap();
        let notes = unprotected(&run);
        assert_eq!(
            notes,
            [
                "unprotected: static pod kube-system/etcd-a started without the mesh at Unix time 1700000000: API down"
            ]
        );
    }
}

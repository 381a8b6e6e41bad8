//! The text of one manifest file to pods and namespaces, or to problems that name line and field.
//!
//! Unknown fields are ignored, as the API server does without validation; a known field of the wrong type, a kind that
//! is neither Pod nor Namespace nor a List of them, or an invalid name makes the whole file invalid.

use std::sync::Arc;

use serde::Deserialize;
use serde_saphyr::{DefaultMessageFormatter, MessageFormatter};
use sluice_proto::id::{InvalidId, Namespace as NamespaceName, PodName, PodRef, PodUid};
use sluice_selection::Labels;
use uuid::Uuid;

use super::fields::{self, Spec, Status};
use super::{Namespace, Pod, Problem};

/// The namespace that UIDs are derived in (RFC 9562 section 5.5), itself derived from this product's name.
const UID_NAMESPACE: Uuid = Uuid::from_u128(0x6c1c_8f0b_2f5e_5d0a_9a55_7f6c_6e0a_91d3);

/// An object of a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Object {
    Pod(Arc<Pod>),
    Namespace(Arc<Namespace>),
}

/// Reads a file's text. `place` is the file's name in problems; JSON is read as such where `json` says so.
pub(super) fn parse(text: &str, place: &str, json: bool) -> Result<Vec<Object>, Vec<Problem>> {
    let mut objects = Vec::new();
    let mut problems = Vec::new();
    for document in if json { vec![(0, text)] } else { documents(text) } {
        let (offset, text) = document;
        let result = if json { parse_json(text) } else { parse_yaml(text) };
        match result
            .and_then(|manifest| manifest.map_or(Ok(Vec::new()), |m| m.into_objects(first_line(text), "")))
        {
            Ok(found) => objects.extend(found),
            Err(fault) => problems.push(fault.into_problem(place, offset)),
        }
    }
    if objects.is_empty() && problems.is_empty() {
        problems.push(Problem {
            place: place.into(),
            line: None,
            field: None,
            message: "holds no Pod and no Namespace; remove the file to remove its objects".into(),
        });
    }
    if problems.is_empty() {
        Ok(objects)
    } else {
        Err(problems)
    }
}

/// Splits a YAML stream at its document markers: `---` at the start of a line, which can stand nowhere inside a
/// document (YAML 1.2.2, rule 206). Each part comes with the number of lines before it, so that one bad document
/// does not hide what is wrong with the next.
fn documents(text: &str) -> Vec<(u64, &str)> {
    let mut parts = Vec::new();
    let (mut start, mut start_line, mut at, mut line) = (0, 0, 0, 0);
    for content in text.split_inclusive('\n') {
        let marker = content
            .strip_prefix("---")
            .is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\r', '\n']));
        if marker && at > start {
            parts.push((start_line, &text[start..at]));
            (start, start_line) = (at, line);
        }
        at += content.len();
        line += 1;
    }
    parts.push((start_line, &text[start..]));
    parts
}

/// The first line with content, from 1.
fn first_line(text: &str) -> u64 {
    let blank = |line: &&str| {
        let line = line.trim();
        line.is_empty() || line.starts_with('#') || line.starts_with("---")
    };
    text.lines().take_while(blank).count() as u64 + 1
}

/// What is wrong with a document, its line counted from the document's start.
struct Fault {
    line: Option<u64>,
    field: Option<String>,
    message: String,
}

impl Fault {
    fn into_problem(self, place: &str, offset: u64) -> Problem {
        Problem {
            place: place.into(),
            line: self.line.map(|line| line + offset),
            field: self.field,
            message: self.message,
        }
    }
}

fn field(path: &serde_path_to_error::Path) -> Option<String> {
    (path.iter().len() > 0).then(|| path.to_string())
}

fn parse_yaml(text: &str) -> Result<Option<Manifest>, Fault> {
    let options = serde_saphyr::options! {
        with_snippet: false,
        // Kubernetes refuses `label: true` and `label: 1` too: a label's value is a string.
        no_schema: true,
    };
    let mut path = None;
    serde_saphyr::with_deserializer_from_str_with_options(text, options, |deserializer| {
        serde_path_to_error::deserialize(deserializer).map_err(|error| {
            path = field(error.path());
            error.into_inner()
        })
    })
    .map_err(|error| Fault {
        line: error.location().map(|location| location.line()),
        field: path,
        message: DefaultMessageFormatter
            .format_message(error.without_snippet())
            .replace(char::is_control, " "),
    })
}

fn parse_json(text: &str) -> Result<Option<Manifest>, Fault> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let fault = |field, error: &serde_json::Error| {
        let message = error.to_string();
        // The line is told apart from the message; serde_json appends it.
        let message = message
            .rsplit_once(" at line ")
            .map_or(message.as_str(), |(message, _)| message)
            .to_owned();
        Fault {
            line: Some(error.line() as u64),
            field,
            message,
        }
    };
    let manifest = serde_path_to_error::deserialize(&mut deserializer)
        .map_err(|error| fault(field(error.path()), error.inner()))?;
    deserializer.end().map_err(|error| fault(None, &error))?;
    Ok(manifest)
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    /// Only checked: another version's fields may mean something else.
    #[serde(rename = "apiVersion")]
    _api_version: ApiVersion,
    kind: Kind,
    #[serde(default)]
    metadata: Option<Metadata>,
    #[serde(default)]
    spec: Option<Spec>,
    #[serde(default)]
    status: Option<Status>,
    #[serde(default)]
    items: Option<Vec<Manifest>>,
}

#[derive(Debug, Deserialize)]
enum ApiVersion {
    #[serde(rename = "v1")]
    V1,
}

#[derive(Debug, Deserialize)]
enum Kind {
    Pod,
    Namespace,
    List,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    /// Required but in a List.
    #[serde(default)]
    name: Option<PodName>,
    #[serde(default)]
    namespace: Option<NamespaceName>,
    #[serde(default)]
    uid: Option<PodUid>,
    #[serde(default)]
    labels: Option<Labels>,
    #[serde(default)]
    annotations: Option<Labels>,
    #[serde(default)]
    deletion_timestamp: Option<String>,
}

impl Manifest {
    /// `line` is where the document begins, `path` where in it this object stands: empty or ending in a dot.
    fn into_objects(self, line: u64, path: &str) -> Result<Vec<Object>, Fault> {
        let fault = |field: &str, message: String| Fault {
            line: Some(line),
            field: Some(format!("{path}{field}")),
            message,
        };
        if matches!(self.kind, Kind::List) {
            let items = self.items.unwrap_or_default().into_iter().enumerate();
            let objects =
                items.map(|(index, item)| item.into_objects(line, &format!("{path}items[{index}].")));
            return Ok(objects
                .collect::<Result<Vec<_>, _>>()?
                .into_iter()
                .flatten()
                .collect());
        }
        let mut metadata = self.metadata.ok_or_else(|| fault("metadata", "missing".into()))?;
        let name = metadata
            .name
            .take()
            .ok_or_else(|| fault("metadata.name", "missing".into()))?;
        if matches!(self.kind, Kind::Namespace) {
            let name = NamespaceName::parse(name.as_str())
                .map_err(|error| fault("metadata.name", error.to_string()))?;
            let labels = metadata.labels.unwrap_or_default();
            return Ok(vec![Object::Namespace(Arc::new(Namespace { name, labels }))]);
        }
        let (spec, status) = (self.spec.unwrap_or_default(), self.status.unwrap_or_default());
        let pod = pod(name, metadata, spec, &status).map_err(|error| fault("metadata", error.to_string()))?;
        Ok(vec![Object::Pod(Arc::new(pod))])
    }
}

fn pod(name: PodName, metadata: Metadata, spec: Spec, status: &Status) -> Result<Pod, InvalidId> {
    let namespace = metadata
        .namespace
        .map_or_else(|| NamespaceName::parse("default"), Ok)?;
    let uid = metadata.uid.map_or_else(|| derived_uid(&namespace, &name), Ok)?;
    Ok(fields::pod(
        PodRef { namespace, name, uid },
        metadata.labels.unwrap_or_default(),
        metadata.annotations.unwrap_or_default(),
        metadata.deletion_timestamp,
        spec,
        status,
    ))
}

/// The UID of a pod whose manifest gives none: a version 5 UUID of `namespace/name`, so the same after every restart
/// and on every machine, and the same for a later pod of that name.
fn derived_uid(namespace: &NamespaceName, name: &PodName) -> Result<PodUid, InvalidId> {
    PodUid::parse(Uuid::new_v5(&UID_NAMESPACE, format!("{namespace}/{name}").as_bytes()).to_string())
}

#[cfg(test)]
mod tests;

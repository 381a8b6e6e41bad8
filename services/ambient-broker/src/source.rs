//! Where pods and namespaces come from: one trait, and the slim objects that every source fills.
//!
//! A source only tells what exists. It decides nothing, keeps no mesh state and needs no privilege.

mod diff;
mod directory;
pub(crate) mod fields;
mod manifest;
mod object;
mod scan;
mod watch;

use std::fmt;

use futures_util::future::BoxFuture;
use futures_util::stream::BoxStream;

use std::sync::Arc;

pub use directory::{ManifestDirectory, WatchMode};
pub use object::{Namespace, Pod};

/// What changed at the source.
///
/// A stream begins with everything that exists, then [`SourceEvent::Synced`], then changes. Events are state, not
/// deltas: the same object may be applied again unchanged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceEvent {
    /// All that existed when the stream began has been told. Sent once a stream.
    Synced,
    /// The pod exists, as it is now.
    PodApplied(Arc<Pod>),
    /// The pod is gone; as it was last seen. A pod that was replaced by one of the same name but another UID is
    /// deleted first.
    PodDeleted(Arc<Pod>),
    /// The namespace exists, as it is now.
    NamespaceApplied(Arc<Namespace>),
    /// The namespace is gone; as it was last seen. Its pods may outlive it.
    NamespaceDeleted(Arc<Namespace>),
    /// Whether a namespace that was not told may exist all the same, because something cannot be read that was never
    /// read before. Not so until told.
    Undetermined(bool),
    /// Something at the source is wrong. It changes no object.
    Problem(Problem),
    /// All problems told of this place are over; those that remain are told again right after.
    ProblemCleared {
        /// [`Problem::place`] of the problems meant.
        place: String,
    },
}

/// Something at the source that a person has to look at.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Which file, directory or API.
    pub place: String,
    /// The line in the file, from 1.
    pub line: Option<u64>,
    /// The field, e.g. `spec.hostNetwork`.
    pub field: Option<String>,
    /// What is wrong and what is allowed.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.place)?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        if let Some(field) = &self.field {
            write!(f, ": {field}")?;
        }
        write!(f, ": {}", self.message)
    }
}

/// A pod and its namespace, asked for by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Lookup {
    /// `None`: the source has no such pod.
    pub pod: Option<Arc<Pod>>,
    /// `None`: the source knows nothing of the namespace.
    pub namespace: Option<Arc<Namespace>>,
    /// It may exist all the same ([`SourceEvent::Undetermined`]).
    pub undetermined: bool,
}

/// The source cannot be asked.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The directory cannot be read.
    #[error("cannot read manifest directory {path}")]
    Directory {
        /// Which.
        path: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The API server cannot be asked, or does not answer.
    #[error(transparent)]
    Api(#[from] crate::cluster::ApiError),
    /// The process is shutting down.
    #[error("the pod source has stopped")]
    Stopped,
}

/// Something that knows which pods and namespaces exist on this node.
pub trait PodSource: fmt::Debug + Send + Sync {
    /// Watches from now on. The stream ends only when the source cannot go on; dropping it ends the watch.
    fn events(&self) -> BoxStream<'static, SourceEvent>;

    /// Asks for one pod as it is this moment, for a sandbox whose pod the events have not told of yet.
    fn lookup<'a>(&'a self, namespace: &'a str, name: &'a str) -> BoxFuture<'a, Result<Lookup, SourceError>>;
}

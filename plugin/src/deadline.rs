//! The one deadline that everything in a run of the plugin shares.

use std::time::{Duration, Instant};

use sluice_proto::paths::DEADLINES;

/// When the plugin must have answered, counted from its start.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline(Instant);

impl Deadline {
    /// The plugin's deadline, from now on.
    pub(crate) fn start() -> Self {
        Self(Instant::now() + DEADLINES.plugin)
    }

    /// What is left, zero when it is over.
    pub(crate) fn left(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }

    /// This deadline, or `limit` from now on if that is sooner.
    pub(crate) fn at_most(self, limit: Duration) -> Self {
        Self(self.0.min(Instant::now() + limit))
    }
}

//! The one deadline that everything in a run of the plugin shares.

use std::time::{Duration, Instant};

use sluice_proto::paths::DEADLINES;

/// When the plugin must have answered, counted from its start.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline {
    started: Instant,
    until: Instant,
}

/// The API server has at least this long, however late the agent turned out to be away.
const LEAST_FOR_API: Duration = Duration::from_secs(1);

impl Deadline {
    /// The plugin's deadline, from now on.
    pub(crate) fn start() -> Self {
        let started = Instant::now();
        Self {
            started,
            until: started + DEADLINES.plugin,
        }
    }

    /// What is left, zero when it is over.
    pub(crate) fn left(self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// This deadline, or `limit` from now on if that is sooner.
    pub(crate) fn at_most(self, limit: Duration) -> Self {
        Self {
            until: self.until.min(Instant::now() + limit),
            ..self
        }
    }

    /// By when the API server must have answered in the agent's place.
    pub(crate) fn without_agent(self) -> Self {
        let usual = self.started + DEADLINES.without_agent;
        Self {
            until: self.until.min(usual.max(Instant::now() + LEAST_FOR_API)),
            ..self
        }
    }
}

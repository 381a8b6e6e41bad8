//! Why the agent could not be asked, and what a pod is told that cannot start because of it.

use sluice_proto::code::ErrorCode;

use super::Undecided;
use crate::error::chain;
use crate::executor::ExecutorError;

/// Nobody of the agent could decide.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Away {
    #[error(transparent)]
    Executor(ExecutorError),
    /// The executor answers, but no broker watches it, or one whose cache has not filled yet.
    #[error("no broker within {waited_ms} ms")]
    Broker { waited_ms: u32 },
}

impl Away {
    fn error_code(&self) -> ErrorCode {
        match self {
            Self::Executor(error) => error.error_code(),
            Self::Broker { .. } => ErrorCode::BrokerUnavailable,
        }
    }

    fn component(&self) -> &'static str {
        match self {
            Self::Executor(_) => "plugin",
            Self::Broker { .. } => "netns-executor",
        }
    }

    fn stage(&self) -> &'static str {
        match self {
            Self::Executor(error) => error.stage(),
            Self::Broker { .. } => "wait for the broker",
        }
    }
}

/// The agent is away, and the pod cannot start without it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WithoutAgent {
    /// The API server says that the pod belongs to the mesh.
    #[error("the pod is in the mesh ({reason})")]
    InMesh {
        #[source]
        away: Away,
        reason: String,
    },
    #[error("the agent is away ({})", chain(away))]
    Undecided {
        away: Away,
        #[source]
        why: Undecided,
    },
}

impl WithoutAgent {
    /// What the agent's absence alone is called by, unless asking the API server failed in a way of its own.
    pub(crate) fn error_code(&self) -> ErrorCode {
        match self {
            Self::InMesh { away, .. } => away.error_code(),
            Self::Undecided { away, why } => why.error_code().unwrap_or_else(|| away.error_code()),
        }
    }

    pub(crate) fn component(&self) -> &'static str {
        match self {
            Self::Undecided { why, .. } if why.error_code().is_some() => "plugin",
            Self::Undecided { away, .. } | Self::InMesh { away, .. } => away.component(),
        }
    }

    pub(crate) fn stage(&self) -> &'static str {
        match self {
            Self::Undecided { why, .. } if why.error_code().is_some() => why.stage(),
            Self::Undecided { away, .. } | Self::InMesh { away, .. } => away.stage(),
        }
    }

    /// Both halves, the one that `stage` names first.
    pub(crate) fn explanation(&self) -> String {
        match self {
            Self::InMesh { away, reason } => format!("{}; the pod is in the mesh ({reason})", chain(away)),
            Self::Undecided { away, why } if why.error_code().is_some() => {
                format!("{}; the agent is away ({})", chain(why), chain(away))
            }
            Self::Undecided { away, why } => format!("{}; {}", chain(away), chain(why)),
        }
    }
}

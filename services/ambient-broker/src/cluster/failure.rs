//! How a request to the API server can end badly, and what a person can do about it.

use std::fmt;
use std::time::Duration;

use super::guard::{Silent, Throttled, TokenError};

/// What kind of failure it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// No connection: refused, no route, TLS.
    Unreachable,
    /// A connection, but no answer in time.
    Silent,
    /// 401: the token does not count.
    Unauthorized,
    /// 403: a rule of the role is missing.
    Forbidden,
    /// 404.
    NotFound,
    /// 409, or 422 where the UID asked for is another one: the object is not the one that was meant.
    Conflict,
    /// 410: the resource version is too old.
    Gone,
    /// 429, or held back by an earlier 429 or 503 with `Retry-After`.
    Throttled,
    /// 5xx.
    Server,
    /// Anything else: an answer that cannot be read, another 4xx.
    Unexpected,
}

impl Kind {
    /// Its name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::Silent => "silent",
            Self::Unauthorized => "unauthorized",
            Self::Forbidden => "forbidden",
            Self::NotFound => "not-found",
            Self::Conflict => "conflict",
            Self::Gone => "gone",
            Self::Throttled => "throttled",
            Self::Server => "server",
            Self::Unexpected => "unexpected",
        }
    }

    fn of_code(code: u16) -> Self {
        match code {
            401 => Self::Unauthorized,
            403 => Self::Forbidden,
            404 => Self::NotFound,
            409 | 422 => Self::Conflict,
            410 => Self::Gone,
            429 => Self::Throttled,
            500.. => Self::Server,
            _ => Self::Unexpected,
        }
    }

    /// What a person can do about it.
    fn advice(self) -> &'static str {
        match self {
            Self::Unreachable | Self::Silent => "check the network between this node and the API server",
            Self::Unauthorized => {
                "check that the broker's ServiceAccount exists and its token volume is mounted"
            }
            Self::Forbidden => {
                "give the broker's ServiceAccount the rules of the chart's ClusterRole and Role"
            }
            Self::Throttled => "none: it is asked again later",
            Self::Server => "see the API server's log; it is asked again",
            Self::NotFound | Self::Conflict | Self::Gone | Self::Unexpected => "none: it is asked again",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A request to the API server failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what}: {detail}")]
pub struct ApiError {
    /// What was attempted, e.g. `list pods`.
    pub what: String,
    /// How it failed.
    pub kind: Kind,
    /// What the server or the transport said.
    pub detail: String,
    /// The server wants to be left alone this long.
    pub wait: Option<Duration>,
}

impl ApiError {
    /// The failure of `what`.
    pub(super) fn new(what: &str, error: &kube::Error) -> Self {
        let (kind, detail, wait) = match error {
            kube::Error::Api(status) => Self::status(status),
            kube::Error::Service(source) => Self::transport(source.as_ref()),
            other => {
                let broken = matches!(other, kube::Error::HyperError(_) | kube::Error::ReadEvents(_));
                let kind = if broken {
                    Kind::Unreachable
                } else {
                    Kind::Unexpected
                };
                (kind, sluice_runtime::telemetry::chain(other), None)
            }
        };
        Self {
            what: what.to_owned(),
            kind,
            detail,
            wait,
        }
    }

    /// What the server said, as an answer or inside a watch.
    pub(super) fn of_status(what: &str, status: &kube::core::Status) -> Self {
        let (kind, detail, wait) = Self::status(status);
        Self {
            what: what.to_owned(),
            kind,
            detail,
            wait,
        }
    }

    /// No answer within `after`.
    pub(super) fn silent(what: &str, after: Duration) -> Self {
        Self {
            what: what.to_owned(),
            kind: Kind::Silent,
            detail: Silent { after }.to_string(),
            wait: None,
        }
    }

    /// An answer that is not what the API promises.
    pub(super) fn unexpected(what: &str, error: &dyn fmt::Display) -> Self {
        Self {
            what: what.to_owned(),
            kind: Kind::Unexpected,
            detail: error.to_string(),
            wait: None,
        }
    }

    fn status(status: &kube::core::Status) -> (Kind, String, Option<Duration>) {
        let seconds = status
            .details
            .as_ref()
            .map_or(0, |details| details.retry_after_seconds);
        let wait = (seconds > 0).then(|| Duration::from_secs(seconds.into()));
        // A proxy in between answers with a page of its own.
        let message: String = status
            .message
            .chars()
            .filter(|c| !c.is_control())
            .take(300)
            .collect();
        (
            Kind::of_code(status.code),
            format!("the API server answers {}: {message}", status.code),
            wait,
        )
    }

    fn transport(
        source: &(dyn std::error::Error + Send + Sync + 'static),
    ) -> (Kind, String, Option<Duration>) {
        if let Some(throttled) = source.downcast_ref::<Throttled>() {
            return (Kind::Throttled, throttled.to_string(), Some(throttled.wait));
        }
        let kind = if source.is::<Silent>() {
            Kind::Silent
        } else if source.is::<TokenError>() {
            Kind::Unauthorized
        } else {
            Kind::Unreachable
        };
        (kind, sluice_runtime::telemetry::chain(source), None)
    }

    /// The failure and what to do about it, as one line.
    pub(super) fn with_advice(&self) -> String {
        format!("{self} ({}); {}", self.kind, self.kind.advice())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_answer_has_its_kind() {
        for (code, kind) in [
            (401, Kind::Unauthorized),
            (403, Kind::Forbidden),
            (404, Kind::NotFound),
            (409, Kind::Conflict),
            (410, Kind::Gone),
            (422, Kind::Conflict),
            (429, Kind::Throttled),
            (400, Kind::Unexpected),
            (500, Kind::Server),
            (503, Kind::Server),
        ] {
            let status = kube::core::Status::failure("no\nway", "Reason").with_code(code);
            let error = ApiError::new("list pods", &kube::Error::Api(Box::new(status)));
            assert_eq!(error.kind, kind, "{code}");
            assert_eq!(
                error.to_string(),
                format!("cannot list pods: the API server answers {code}: noway")
            );
        }
    }

    #[test]
    fn a_held_back_request_says_for_how_long() {
        let held = Throttled {
            wait: Duration::from_secs(3),
        };
        let error = ApiError::new("get pod", &kube::Error::Service(Box::new(held)));
        assert_eq!(
            (error.kind, error.wait),
            (Kind::Throttled, Some(Duration::from_secs(3)))
        );
    }
}

//! Every way a run can fail, and the CNI error it becomes (CNI spec section 5): `msg` names component, stage, cause
//! and pod in at most 256 characters, `details` begins with the stable code and says what to do.

use std::error::Error;
use std::io;

use nix::errno::Errno;
use serde::Serialize;
use sluice_proto::code::ErrorCode;
use sluice_proto::sandbox::Failure;

use crate::config::{ConfigError, SpecVersion};
use crate::executor::ExecutorError;
use crate::invocation::EnvironmentError;
use crate::netns::NetnsError;
use crate::prev_result::PrevResultError;
use crate::stdin::StdinError;
use crate::without_agent::WithoutAgent;

/// Longest `msg`, in characters.
const MAX_MSG: usize = 256;
/// Longest pod name in `msg`; the full one is in `details`.
const MAX_POD: usize = 100;

/// What is known about whom a run is for.
#[derive(Debug, Clone, Default)]
pub(crate) struct Subject {
    pub(crate) version: SpecVersion,
    /// `namespace/name`.
    pub(crate) pod: Option<String>,
    pub(crate) container_id: Option<String>,
}

/// Why a run failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PluginError {
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    #[error(transparent)]
    Stdin(#[from] StdinError),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    PrevResult(#[from] PrevResultError),
    #[error(transparent)]
    Netns(#[from] NetnsError),
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    #[error(transparent)]
    WithoutAgent(Box<WithoutAgent>),
    /// The agent says no.
    #[error("{0}")]
    Refused(Failure),
    /// The attachment is not as it should be.
    #[error("{0}")]
    CheckFailed(Failure),
    /// STATUS, where it was opted in.
    #[error("{}", if .0.is_some() { "the executor does not answer" } else { "no broker is connected to the executor" })]
    NotReady(#[source] Option<ExecutorError>),
    #[error("{0}")]
    Panic(String),
}

impl From<WithoutAgent> for PluginError {
    fn from(error: WithoutAgent) -> Self {
        Self::WithoutAgent(Box::new(error))
    }
}

/// The error document.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct CniError<'a> {
    cni_version: &'a str,
    code: u32,
    msg: &'a str,
    details: &'a str,
}

impl PluginError {
    pub(crate) fn error_code(&self) -> ErrorCode {
        match self {
            Self::WithoutAgent(error) => error.error_code(),
            Self::Environment(_) => ErrorCode::PluginEnvironment,
            Self::Stdin(_) | Self::Config(_) | Self::PrevResult(_) => ErrorCode::PluginConfiguration,
            Self::Netns(NetnsError::Host { .. }) => ErrorCode::DescriptorRefused,
            Self::Netns(_) => ErrorCode::PluginNetns,
            Self::Executor(error) | Self::NotReady(Some(error)) => error.error_code(),
            Self::Refused(failure) | Self::CheckFailed(failure) => failure.code,
            Self::NotReady(None) => ErrorCode::BrokerUnavailable,
            Self::Panic(_) => ErrorCode::PluginBug,
        }
    }

    /// The number in the document: CNI spec section 5 up to 99, ours from 100.
    fn cni_code(&self) -> u32 {
        match self {
            Self::Config(ConfigError::Version { .. }) => 1,
            Self::Stdin(StdinError::Read(_) | StdinError::Deadline) | Self::Netns(_) => 5,
            Self::Stdin(StdinError::TooLong)
            | Self::Config(ConfigError::Syntax(_) | ConfigError::Shape(_))
            | Self::PrevResult(PrevResultError::Shape(_)) => 6,
            // Only from CHECK: it tells the runtime that there is nothing to clean up, which after ADD would be wrong.
            Self::CheckFailed(failure) if failure.code == ErrorCode::SandboxGone => 3,
            Self::NotReady(_) => 50,
            _ => cni_code(self.error_code()),
        }
    }

    fn component(&self) -> &str {
        match self {
            Self::Refused(failure) | Self::CheckFailed(failure) if !failure.component.is_empty() => {
                &failure.component
            }
            Self::WithoutAgent(error) => error.component(),
            _ => "plugin",
        }
    }

    fn stage(&self) -> &str {
        match self {
            Self::Environment(_) => "read the environment",
            Self::Stdin(_) | Self::Config(_) | Self::PrevResult(_) => "read the configuration",
            Self::Netns(_) => "open netns sockets",
            Self::Executor(error) => error.stage(),
            Self::WithoutAgent(error) => error.stage(),
            Self::Refused(failure) | Self::CheckFailed(failure) => &failure.stage,
            Self::NotReady(_) => "status",
            Self::Panic(_) => "panic",
        }
    }

    fn cause(&self) -> String {
        match self {
            Self::Refused(failure) | Self::CheckFailed(failure) => failure.cause.clone(),
            Self::WithoutAgent(error) => error.explanation(),
            error => chain(error),
        }
    }

    /// The CNI error document.
    pub(crate) fn to_json(&self, subject: &Subject) -> String {
        let code = self.error_code();
        let before = format!("sluice: {}: {}: ", self.component(), self.stage());
        let after = subject
            .pod
            .as_deref()
            .map_or_else(String::new, |pod| format!(" (pod {})", shorten(pod, MAX_POD)));
        let room = MAX_MSG.saturating_sub(before.chars().count() + after.chars().count());
        let cause = self.cause();
        let msg = format!("{before}{}{after}", shorten(&cause, room));
        let mut details = format!("{code}: {}", code.fix());
        let facts = [
            ("pod", subject.pod.as_deref()),
            ("container id", subject.container_id.as_deref()),
            ("cause", (cause.chars().count() > room).then_some(cause.as_str())),
        ];
        for (what, value) in facts {
            if let Some(value) = value {
                details.push_str("; ");
                details.push_str(what);
                details.push(' ');
                details.push_str(value);
            }
        }
        let document = CniError {
            cni_version: subject.version.as_str(),
            code: self.cni_code(),
            msg: &shorten(&msg, MAX_MSG),
            details: &details,
        };
        // Strings and a number always serialise; the empty text keeps stdout legal even so.
        serde_json::to_string(&document).unwrap_or_default()
    }
}

fn cni_code(code: ErrorCode) -> u32 {
    match code {
        ErrorCode::PluginEnvironment => 4,
        ErrorCode::PluginConfiguration => 7,
        ErrorCode::PluginNetns => 5,
        ErrorCode::Rules => 100,
        ErrorCode::Routes => 101,
        ErrorCode::ProbeSet => 102,
        ErrorCode::StateFile => 103,
        ErrorCode::DescriptorRefused => 104,
        ErrorCode::DescriptorLimit => 105,
        ErrorCode::SandboxGone => 106,
        ErrorCode::InvalidInput => 107,
        ErrorCode::Drift => 108,
        ErrorCode::KernelFeature => 109,
        ErrorCode::ProxyNack => 110,
        ErrorCode::BrokerState => 111,
        ErrorCode::OpenerNetns => 112,
        ErrorCode::PluginBug => 113,
        // Something is not there, not yet decided or too slow: try again.
        _ => 11,
    }
}

/// The message of an error and of each of its causes, error numbers by name.
pub(crate) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = describe(error);
    let mut source = error.source();
    while let Some(error) = source {
        let next = describe(error);
        // Some libraries repeat their cause in their own message.
        if !text.ends_with(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        source = error.source();
    }
    text
}

fn describe(error: &(dyn Error + 'static)) -> String {
    error
        .downcast_ref::<io::Error>()
        .and_then(io::Error::raw_os_error)
        .map_or_else(|| error.to_string(), |number| Errno::from_raw(number).to_string())
}

/// Cuts the middle out of a text that is longer than `max` characters.
fn shorten(text: &str, max: usize) -> String {
    let length = text.chars().count();
    if length <= max {
        return text.to_owned();
    }
    let keep = max.saturating_sub(3);
    let head = keep - keep / 3;
    let mut short: String = text.chars().take(head).collect();
    short.push_str("...");
    short.extend(text.chars().skip(length - keep / 3));
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(error: &PluginError, subject: &Subject) -> serde_json::Value {
        serde_json::from_str(&error.to_json(subject)).unwrap()
    }

    #[test]
    fn a_message_names_component_stage_cause_and_pod() {
        let failure = Failure::new(
            ErrorCode::ProxyNack,
            "ztunnel",
            "add workload",
            "bind 15001: EADDRINUSE",
        );
        let subject = Subject {
            pod: Some("team-a/web-0".into()),
            container_id: Some("c1".into()),
            ..Subject::default()
        };
        let json = parse(&PluginError::Refused(failure), &subject);
        assert_eq!(
            json["msg"],
            "sluice: ztunnel: add workload: bind 15001: EADDRINUSE (pod team-a/web-0)"
        );
        assert_eq!(json["code"], 110);
        let details = json["details"].as_str().unwrap();
        assert!(details.starts_with("ZT-NACK: ztunnel says why"), "{details}");
        assert!(
            details.ends_with("; pod team-a/web-0; container id c1"),
            "{details}"
        );
    }

    #[test]
    fn a_long_message_keeps_both_ends_and_its_limit() {
        let failure = Failure::new(
            ErrorCode::Rules,
            "netns-executor",
            "apply rules",
            "x".repeat(2000),
        );
        let subject = Subject {
            pod: Some(format!("team-a/{}", "p".repeat(253))),
            ..Subject::default()
        };
        let json = parse(&PluginError::Refused(failure), &subject);
        let msg = json["msg"].as_str().unwrap();
        assert_eq!(msg.chars().count(), MAX_MSG);
        assert!(
            msg.starts_with("sluice: netns-executor: apply rules: xxx"),
            "{msg}"
        );
        assert!(msg.contains("(pod team-a/ppp") && msg.ends_with("ppp)"), "{msg}");
        assert!(json["details"].as_str().unwrap().contains(&"p".repeat(253)));
    }

    #[test]
    fn error_numbers_have_their_names() {
        let error = PluginError::Stdin(StdinError::Read(io::Error::from_raw_os_error(2)));
        assert_eq!(
            chain(&error),
            "stdin cannot be read: ENOENT: No such file or directory"
        );
    }
}

//! What the runtime says in the environment: command, attachment and pod (CNI spec section 2).

use std::env;

use sluice_proto::id::{
    ContainerId, InterfaceName, InvalidId, Namespace, NetnsPath, PodName, PodRef, PodUid,
};

use crate::error::Subject;

/// A variable of the environment is missing or malformed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EnvironmentError {
    #[error("{0} is not set")]
    Missing(&'static str),
    #[error("{0} is not valid UTF-8")]
    NotText(&'static str),
    #[error("CNI_COMMAND {0:?} is not one of ADD, DEL, CHECK, GC, STATUS, VERSION")]
    Command(String),
    #[error("{variable} is malformed")]
    Invalid {
        variable: &'static str,
        #[source]
        source: InvalidId,
    },
    #[error("CNI_ARGS: {0:?} is not of the form KEY=VALUE")]
    Pair(String),
    #[error("CNI_ARGS: {present} is set but {absent} is not; a pod has both, and no pod has neither")]
    HalfAPod {
        present: &'static str,
        absent: &'static str,
    },
    #[error("CNI_ARGS: K8S_POD_UID is not set (containerd 1.6 and CRI-O 1.20 or newer set it)")]
    NoUid,
}

/// `CNI_COMMAND`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Command {
    Add,
    Del,
    Check,
    Gc,
    Status,
    Version,
}

impl Command {
    pub(crate) fn from_environment() -> Result<Self, EnvironmentError> {
        let command = required("CNI_COMMAND")?;
        Ok(match command.as_str() {
            "ADD" => Self::Add,
            "DEL" => Self::Del,
            "CHECK" => Self::Check,
            "GC" => Self::Gc,
            "STATUS" => Self::Status,
            "VERSION" => Self::Version,
            _ => return Err(EnvironmentError::Command(command.chars().take(32).collect())),
        })
    }

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Del => "DEL",
            Self::Check => "CHECK",
            Self::Gc => "GC",
            Self::Status => "STATUS",
            Self::Version => "VERSION",
        }
    }
}

/// A command with what it is about.
#[derive(Debug)]
pub(crate) enum Invocation {
    Add(AttachmentArgs),
    Del(AttachmentArgs),
    Check(AttachmentArgs),
    Status,
    Gc,
}

/// One interface of one sandbox, and the pod it belongs to.
#[derive(Debug)]
pub(crate) struct AttachmentArgs {
    pub(crate) container_id: ContainerId,
    pub(crate) ifname: InterfaceName,
    /// `None` only for DEL.
    pub(crate) netns: Option<NetnsPath>,
    /// `None`: `CNI_ARGS` names no pod.
    pub(crate) pod: Option<PodArgs>,
}

/// A pod as `CNI_ARGS` names it.
#[derive(Debug, Clone)]
pub(crate) struct PodArgs {
    pub(crate) namespace: Namespace,
    pub(crate) name: PodName,
    uid: Option<PodUid>,
}

impl PodArgs {
    /// The pod with its UID, which only those pods need that are handed over.
    pub(crate) fn identified(&self) -> Result<PodRef, EnvironmentError> {
        Ok(PodRef {
            namespace: self.namespace.clone(),
            name: self.name.clone(),
            uid: self.uid.clone().ok_or(EnvironmentError::NoUid)?,
        })
    }
}

impl Invocation {
    /// Reads and checks every variable `command` needs; what is known so far is left in `subject` for messages.
    pub(crate) fn from_environment(
        command: Command,
        subject: &mut Subject,
    ) -> Result<Self, EnvironmentError> {
        Ok(match command {
            Command::Add => Self::Add(AttachmentArgs::from_environment(true, subject)?),
            Command::Check => Self::Check(AttachmentArgs::from_environment(true, subject)?),
            Command::Del => Self::Del(AttachmentArgs::from_environment(false, subject)?),
            Command::Gc => Self::Gc,
            Command::Status | Command::Version => Self::Status,
        })
    }
}

impl AttachmentArgs {
    fn from_environment(needs_netns: bool, subject: &mut Subject) -> Result<Self, EnvironmentError> {
        let container_id = parse(
            "CNI_CONTAINERID",
            required("CNI_CONTAINERID")?,
            ContainerId::parse,
        )?;
        subject.container_id = Some(container_id.to_string());
        let pod = parse_args(&variable("CNI_ARGS")?.unwrap_or_default())?;
        subject.pod = pod.as_ref().map(|pod| format!("{}/{}", pod.namespace, pod.name));
        let ifname = parse("CNI_IFNAME", required("CNI_IFNAME")?, InterfaceName::parse)?;
        let netns = match variable("CNI_NETNS")?.filter(|path| !path.is_empty()) {
            Some(path) if needs_netns => Some(parse("CNI_NETNS", path, NetnsPath::parse)?),
            None if needs_netns => return Err(EnvironmentError::Missing("CNI_NETNS")),
            _ => None,
        };
        Ok(Self {
            container_id,
            ifname,
            netns,
            pod,
        })
    }
}

fn variable(name: &'static str) -> Result<Option<String>, EnvironmentError> {
    env::var_os(name)
        .map(|value| value.into_string().map_err(|_| EnvironmentError::NotText(name)))
        .transpose()
}

fn required(name: &'static str) -> Result<String, EnvironmentError> {
    variable(name)?
        .filter(|value| !value.is_empty())
        .ok_or(EnvironmentError::Missing(name))
}

fn parse<T>(
    variable: &'static str,
    value: String,
    parse: impl FnOnce(String) -> Result<T, InvalidId>,
) -> Result<T, EnvironmentError> {
    parse(value).map_err(|source| EnvironmentError::Invalid { variable, source })
}

/// `KEY=VALUE` pairs joined by ';'. Keys that are not ours are somebody else's.
fn parse_args(args: &str) -> Result<Option<PodArgs>, EnvironmentError> {
    let (mut namespace, mut name, mut uid) = (None, None, None);
    for pair in args.split(';').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair
            .split_once('=')
            .ok_or_else(|| EnvironmentError::Pair(pair.chars().take(64).collect()))?;
        match key {
            "K8S_POD_NAMESPACE" => namespace = Some(value),
            "K8S_POD_NAME" => name = Some(value),
            "K8S_POD_UID" => uid = Some(value),
            _ => {}
        }
    }
    let given = |value: Option<&str>| value.filter(|value| !value.is_empty()).map(str::to_owned);
    let (present, absent) = match (given(namespace), given(name)) {
        (None, None) => return Ok(None),
        (Some(namespace), Some(name)) => {
            return Ok(Some(PodArgs {
                namespace: parse("K8S_POD_NAMESPACE in CNI_ARGS", namespace, Namespace::parse)?,
                name: parse("K8S_POD_NAME in CNI_ARGS", name, PodName::parse)?,
                uid: given(uid)
                    .map(|uid| parse("K8S_POD_UID in CNI_ARGS", uid, PodUid::parse))
                    .transpose()?,
            }));
        }
        (Some(_), None) => ("K8S_POD_NAMESPACE", "K8S_POD_NAME"),
        (None, Some(_)) => ("K8S_POD_NAME", "K8S_POD_NAMESPACE"),
    };
    Err(EnvironmentError::HalfAPod { present, absent })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_read_from_among_other_arguments() {
        let pod =
            parse_args("IgnoreUnknown=1;K8S_POD_NAMESPACE=team-a;K8S_POD_NAME=web-0;X=a=b;K8S_POD_UID=u-1")
                .unwrap()
                .unwrap();
        assert_eq!(pod.identified().unwrap().to_string(), "team-a/web-0");
    }

    #[test]
    fn without_namespace_and_name_there_is_no_pod() {
        for args in ["", "IgnoreUnknown=1", "K8S_POD_NAMESPACE=;K8S_POD_NAME="] {
            assert!(parse_args(args).unwrap().is_none(), "{args}");
        }
    }

    #[test]
    fn half_a_pod_is_an_error_that_names_both_keys() {
        let error = parse_args("K8S_POD_NAME=x").unwrap_err().to_string();
        assert!(
            error.contains("K8S_POD_NAME is set but K8S_POD_NAMESPACE is not"),
            "{error}"
        );
    }

    #[test]
    fn a_pod_without_uid_is_named_but_not_identified() {
        let pod = parse_args("K8S_POD_NAMESPACE=a;K8S_POD_NAME=b").unwrap().unwrap();
        assert!(matches!(pod.identified(), Err(EnvironmentError::NoUid)));
    }
}

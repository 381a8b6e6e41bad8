//! The decision without an agent: one look at the API server, and the code by which the broker decides, too.
//!
//! A pod passes only if the API server says that it is outside the mesh. One that is in the mesh waits for the
//! agent; one that nobody can place does not start, a static pod excepted (a control plane may depend on one).

mod api;
mod away;
mod kubeconfig;
mod object;
mod unprotected;

use std::path::PathBuf;

use sluice_proto::code::ErrorCode;
use sluice_proto::id::PodRef;
use sluice_selection::SelectionConfig;

use crate::config::Settings;
use crate::deadline::Deadline;
use crate::netns::{NetnsError, PodNetns};
use api::{Api, ApiError};
pub(crate) use away::{Away, WithoutAgent};
use kubeconfig::{Credentials, KubeconfigError};
use object::ObjectError;
pub(crate) use unprotected::record;

/// What the API server's objects say of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Decision {
    /// It may start. With the reason.
    Outside(String),
    /// It must be enrolled first. With the reason.
    InMesh(String),
}

/// Why the API server could not be asked, or its answer decides nothing.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Undecided {
    #[error("there is no kubeconfig {} to ask the API server with", .0.display())]
    NoKubeconfig(PathBuf),
    #[error("the network configuration has no selection to decide by")]
    NoSelection,
    #[error(transparent)]
    Kubeconfig(#[from] KubeconfigError),
    #[error(transparent)]
    Netns(#[from] NetnsError),
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error(transparent)]
    Object(#[from] ObjectError),
}

impl Undecided {
    /// `None`: nothing was asked, so the agent's absence is all there is to say.
    pub(crate) fn error_code(&self) -> Option<ErrorCode> {
        match self {
            Self::NoKubeconfig(_) | Self::NoSelection => None,
            Self::Kubeconfig(_) => Some(ErrorCode::Kubeconfig),
            Self::Netns(_) => Some(ErrorCode::Undecided),
            Self::Api(error) => Some(error.error_code()),
            Self::Object(error) => Some(error.error_code()),
        }
    }

    pub(crate) fn stage(&self) -> &'static str {
        match self {
            Self::Kubeconfig(_) => "read the kubeconfig",
            Self::Netns(_) => "return to the host's network",
            _ => "ask the API server",
        }
    }

    /// The API server has answered, and the answer speaks against this pod.
    pub(crate) fn is_denial(&self) -> bool {
        self.error_code() == Some(ErrorCode::PodUnconfirmed)
    }
}

/// Asks the API server for pod and namespace, from the host's network, and decides.
pub(crate) fn decide(
    settings: &Settings,
    pod: &PodRef,
    netns: &PodNetns,
    deadline: Deadline,
) -> Result<Decision, Undecided> {
    let selection = settings.selection.as_ref().ok_or(Undecided::NoSelection)?;
    let path = settings.kubeconfig();
    let credentials = match Credentials::read(&path) {
        Err(KubeconfigError::Missing) => return Err(Undecided::NoKubeconfig(path)),
        credentials => credentials?,
    };
    netns.outside(|| ask(selection, pod, credentials, deadline))?
}

fn ask(
    selection: &SelectionConfig,
    pod: &PodRef,
    credentials: Credentials,
    deadline: Deadline,
) -> Result<Decision, Undecided> {
    let api = Api::new(credentials)?;
    let (pod_json, namespace_json) = api.pod_and_namespace(pod, deadline)?;
    let pod_object = object::parse("pod", &pod_json)?;
    let namespace_object = object::parse("namespace", &namespace_json)?;
    Ok(object::decide(selection, pod, &pod_object, &namespace_object)?)
}

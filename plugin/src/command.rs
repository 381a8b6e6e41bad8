//! The commands. Each takes what was read and gives the answer; none prints.

mod add;
mod check;
mod del;
mod gc;
mod hand_over;
mod status;

pub(crate) use add::add;
pub(crate) use check::check;
pub(crate) use del::del;
pub(crate) use gc::gc;
pub(crate) use status::{status, unreadable};

use serde::Serialize;
use sluice_proto::id::Attachment;

use crate::config::{GivenVersion, NetworkConfig, Settings, SpecVersion};
use crate::error::chain;
use crate::invocation::{AttachmentArgs, PodArgs};
use crate::log::{Level, configure, line};

/// What goes to stdout.
#[derive(Debug)]
pub(crate) enum Answer {
    Nothing,
    Document(String),
}

/// VERSION: what we speak (CNI spec section 2).
pub(crate) fn version(given: &GivenVersion) -> Answer {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Version<'a> {
        cni_version: &'a str,
        supported_versions: [&'static str; 4],
    }
    let version = Version {
        cni_version: given.text(),
        supported_versions: SpecVersion::ALL.map(SpecVersion::as_str),
    };
    Answer::Document(serde_json::to_string(&version).unwrap_or_default())
}

/// Why an attachment is none of our business.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Exemption {
    NotAPod,
    OtherInterface,
    OwnPod,
    ExcludedNamespace,
}

impl Exemption {
    fn as_str(self) -> &'static str {
        match self {
            Self::NotAPod => "not a pod",
            Self::OtherInterface => "not the sandbox's first interface",
            Self::OwnPod => "the agent's own pod",
            Self::ExcludedNamespace => "excluded namespace",
        }
    }
}

/// Decides without any socket or file who passes, or gives the pod that does not.
fn exempt<'a>(args: &'a AttachmentArgs, settings: &Settings) -> Result<&'a PodArgs, Exemption> {
    let Some(pod) = &args.pod else {
        return Err(Exemption::NotAPod);
    };
    if *settings.subject(&args.ifname) != settings.ifname {
        return Err(Exemption::OtherInterface);
    }
    if let Some(selection) = &settings.selection {
        let namespace = pod.namespace.as_str();
        if selection.is_own_pod(namespace, pod.name.as_str()) {
            return Err(Exemption::OwnPod);
        }
        if selection.excludes(namespace) {
            return Err(Exemption::ExcludedNamespace);
        }
    }
    Ok(pod)
}

fn attachment(config: &NetworkConfig<'_>, settings: &Settings, args: &AttachmentArgs) -> Attachment {
    Attachment {
        network_name: config.name.clone(),
        container_id: args.container_id.clone(),
        ifname: settings.subject(&args.ifname).clone(),
    }
}

/// Reads our own keys, for commands that must not fail on a mistake in them.
fn settings_or_default(config: &NetworkConfig<'_>) -> Settings {
    let settings = config.settings().unwrap_or_else(|error| {
        let error = chain(&error);
        let message = "our settings cannot be read, default settings are used";
        line(Level::Error, message, &[("error", &error)]);
        Settings::default()
    });
    configure(&settings);
    settings
}

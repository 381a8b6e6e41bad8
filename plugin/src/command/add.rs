//! ADD: hand the pod's namespace to the executor and wait until the pod may start.

use sluice_proto::code::ErrorCode;
use sluice_proto::id::{NetnsPath, PodRef};
use sluice_proto::paths::DEADLINES;
use sluice_proto::pb::cni::{AddRequest, AddResponse, add_response::Outcome};
use sluice_proto::sandbox::Failure;

use super::{Answer, attachment, exempt};
use crate::config::{NetworkConfig, Settings, SpecVersion};
use crate::deadline::Deadline;
use crate::error::PluginError;
use crate::executor::{self, ExecutorError};
use crate::invocation::{AttachmentArgs, EnvironmentError};
use crate::log::{Level, line, set_level};
use crate::netns::open_sockets;
use crate::prev_result::addresses;

pub(crate) fn add(
    args: &AttachmentArgs,
    version: SpecVersion,
    input: &[u8],
    deadline: Deadline,
) -> Result<Answer, PluginError> {
    let config = NetworkConfig::parse(input)?;
    let settings = config.settings()?;
    set_level(settings.log_level);
    let passed = || {
        Answer::Document(match config.prev_result {
            Some(result) => result.to_owned(),
            None => format!(r#"{{"cniVersion":"{}"}}"#, version.as_str()),
        })
    };
    let container_id = args.container_id.as_str();
    match exempt(args, &settings) {
        Err(exemption) => {
            let fields = [("container_id", container_id), ("reason", exemption.as_str())];
            line(Level::Debug, "passed without asking", &fields);
        }
        Ok(pod) => {
            let pod = pod.identified()?;
            let netns = args
                .netns
                .as_ref()
                .ok_or(EnvironmentError::Missing("CNI_NETNS"))?;
            enrol(args, &config, &settings, &pod, netns, deadline)?;
            let name = pod.to_string();
            line(
                Level::Info,
                "admitted",
                &[("pod", &name), ("container_id", container_id)],
            );
        }
    }
    Ok(passed())
}

fn enrol(
    args: &AttachmentArgs,
    config: &NetworkConfig<'_>,
    settings: &Settings,
    pod: &PodRef,
    netns: &NetnsPath,
    deadline: Deadline,
) -> Result<(), PluginError> {
    let addresses = config
        .prev_result
        .map(|result| addresses(result, args.ifname.as_str()))
        .transpose()?
        .unwrap_or_default();
    let message = AddRequest {
        attachment: Some((&attachment(config, args)).into()),
        pod: Some(pod.into()),
        netns_path: netns.to_string(),
        addresses,
        config_hash: settings
            .selection
            .as_ref()
            .map(sluice_selection::SelectionConfig::hash)
            .unwrap_or_default(),
    };
    let descriptors = open_sockets(netns)?;
    #[cfg(debug_assertions)]
    crate::output::panic_if_asked("netns");
    let path = settings.run_dir.cni_socket();
    let response = executor::call(
        &path,
        descriptors,
        DEADLINES.connect,
        deadline,
        |mut client| async move {
            #[cfg(debug_assertions)]
            crate::output::panic_if_asked("call");
            client.add(executor::request(message, deadline)).await
        },
    )?;
    judge(response)
}

/// Anything but an explicit yes keeps the pod from starting.
fn judge(response: AddResponse) -> Result<(), PluginError> {
    match response.outcome {
        Some(Outcome::Admitted(_)) => Ok(()),
        Some(Outcome::Refused(failure)) => Err(PluginError::Refused(failure.into())),
        Some(Outcome::NoBroker(waited)) => {
            let cause = format!("no broker within {} ms, so nobody can decide", waited.waited_ms);
            let code = ErrorCode::BrokerUnavailable;
            Err(PluginError::Refused(Failure::new(
                code,
                "netns-executor",
                "wait for the broker",
                cause,
            )))
        }
        None => Err(ExecutorError::NoOutcome.into()),
    }
}

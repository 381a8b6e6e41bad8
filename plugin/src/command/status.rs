//! STATUS: succeeds and stays silent unless it was opted in. A failing STATUS makes containerd's node NotReady,
//! on which the agent itself could not start.

use std::time::Duration;

use sluice_proto::pb::cni::StatusRequest;

use super::{Answer, settings_or_default};
use crate::config::{ConfigError, NetworkConfig};
use crate::deadline::Deadline;
use crate::error::{PluginError, chain};
use crate::executor;
use crate::log::{Level, line};

/// containerd calls STATUS without a time-out of its own.
const ANSWER: Duration = Duration::from_millis(90);

pub(crate) fn status(input: &[u8]) -> Result<Answer, PluginError> {
    let config = match NetworkConfig::parse(input) {
        Ok(config) => config,
        Err(error) => return Ok(unreadable(&error)),
    };
    let settings = settings_or_default(&config);
    if !settings.gate_node {
        return Ok(Answer::Nothing);
    }
    let deadline = Deadline::start().at_most(ANSWER);
    let path = settings.run_dir.cni_socket();
    let answer = executor::call(
        &path,
        Vec::new(),
        Duration::ZERO,
        deadline,
        |mut client| async move { client.status(executor::request(StatusRequest {}, deadline)).await },
    );
    match answer {
        Ok(status) if status.broker_connected => Ok(Answer::Nothing),
        Ok(_) => Err(PluginError::NotReady(None)),
        Err(error) => Err(PluginError::NotReady(Some(error))),
    }
}

/// A configuration that cannot be read fails every ADD, and says so there.
pub(crate) fn unreadable(error: &ConfigError) -> Answer {
    let error = chain(error);
    line(Level::Error, "configuration cannot be read", &[("error", &error)]);
    Answer::Nothing
}

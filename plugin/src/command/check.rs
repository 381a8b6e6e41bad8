//! CHECK: have the executor compare the attachment with what it should be.

use sluice_proto::paths::DEADLINES;
use sluice_proto::pb::cni::CheckRequest;

use super::{Answer, attachment, exempt};
use crate::config::{ConfigError, NetworkConfig};
use crate::deadline::Deadline;
use crate::error::PluginError;
use crate::executor;
use crate::invocation::AttachmentArgs;
use crate::log::{Level, configure, line};

pub(crate) fn check(args: &AttachmentArgs, input: &[u8], deadline: Deadline) -> Result<Answer, PluginError> {
    let config = NetworkConfig::parse(input)?;
    let settings = config.settings()?;
    configure(&settings);
    if config.prev_result.is_none() {
        return Err(ConfigError::NoPrevResult("CHECK").into());
    }
    if exempt(args, &settings).is_err() {
        return Ok(Answer::Nothing);
    }
    let message = CheckRequest {
        attachment: Some((&attachment(&config, &settings, args)).into()),
    };
    let path = settings.run_dir.cni_socket();
    let response = executor::call(
        &path,
        Vec::new(),
        DEADLINES.connect,
        deadline,
        |mut client| async move { client.check(executor::request(message, deadline)).await },
    )?;
    let mut failures = response
        .failures
        .into_iter()
        .map(sluice_proto::sandbox::Failure::from);
    let Some(first) = failures.next() else {
        return Ok(Answer::Nothing);
    };
    // The document has room for one; the others are not lost.
    for failure in failures {
        let failure = failure.to_string();
        line(Level::Warn, "CHECK found more", &[("failure", &failure)]);
    }
    Err(PluginError::CheckFailed(first))
}

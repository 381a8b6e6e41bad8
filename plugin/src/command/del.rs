//! DEL: have the executor let go of the sandbox, or leave a tombstone for when it comes back.

use std::fs;
use std::io;
use std::time::Duration;

use sluice_proto::id::Attachment;
use sluice_proto::paths::RunDir;
use sluice_proto::pb::cni::DelRequest;
use sluice_proto::tombstone::Tombstone;

use super::{Answer, attachment, settings_or_default};
use crate::config::{ConfigError, NetworkConfig};
use crate::deadline::Deadline;
use crate::error::chain;
use crate::executor::{self, ExecutorError};
use crate::invocation::AttachmentArgs;
use crate::log::{Level, line, unix_ms};

/// How long the executor has; it waits 1 s at most for the rollback of a pending ADD.
const ANSWER: Duration = Duration::from_secs(3);

/// Never fails once the configuration is read: a pod that cannot be deleted is worse than a sandbox that the executor
/// finds dead by itself.
pub(crate) fn del(args: &AttachmentArgs, input: &[u8], deadline: Deadline) -> Result<Answer, ConfigError> {
    let config = NetworkConfig::parse(input)?;
    let settings = settings_or_default(&config);
    // Exempt pods are not left out: they may have been enrolled live, or under another configuration.
    if *settings.subject(&args.ifname) != settings.ifname {
        return Ok(Answer::Nothing);
    }
    let attachment = attachment(&config, &settings, args);
    let run_dir = &settings.run_dir;
    let Err(error) = ask(run_dir, &attachment, deadline) else {
        return Ok(Answer::Nothing);
    };
    let nobody_listened = matches!(error, ExecutorError::Connect { .. });
    let error = chain(&error);
    let container_id = args.container_id.as_str();
    match leave_tombstone(run_dir, &attachment) {
        Ok(true) => {
            // An executor that came up and read its tombstones in the meantime must still hear of this one.
            if nobody_listened && ask(run_dir, &attachment, deadline).is_ok() {
                let _ = Tombstone::remove(&run_dir.tombstones(), &attachment);
            } else {
                let fields = [("container_id", container_id), ("error", error.as_str())];
                line(
                    Level::Warn,
                    "executor unreachable on DEL, left a tombstone",
                    &fields,
                );
            }
        }
        Ok(false) => {}
        Err(io_error) => {
            let io_error = chain(&io_error);
            let fields = [
                ("container_id", container_id),
                ("error", error.as_str()),
                ("tombstone_error", io_error.as_str()),
            ];
            line(
                Level::Error,
                "executor unreachable on DEL, and no tombstone can be left",
                &fields,
            );
        }
    }
    Ok(Answer::Nothing)
}

fn ask(run_dir: &RunDir, attachment: &Attachment, deadline: Deadline) -> Result<(), ExecutorError> {
    let message = DelRequest {
        attachment: Some(attachment.into()),
    };
    let deadline = deadline.at_most(ANSWER);
    let ask =
        |mut client: executor::Client| async move { client.del(executor::request(message, deadline)).await };
    // No second try while nobody listens: that is what the tombstone is for.
    executor::call(&run_dir.cni_socket(), Vec::new(), Duration::ZERO, deadline, ask).map(drop)
}

/// Whether a tombstone was needed: a node without a run directory (after a reboot) has no sandboxes either.
fn leave_tombstone(run_dir: &RunDir, attachment: &Attachment) -> io::Result<bool> {
    if !run_dir.root().try_exists()? {
        return Ok(false);
    }
    let directory = run_dir.tombstones();
    fs::create_dir_all(&directory)?;
    let tombstone = Tombstone {
        attachment: attachment.clone(),
        deleted_unix_ms: unix_ms(),
    };
    tombstone.write(&directory)?;
    Ok(true)
}

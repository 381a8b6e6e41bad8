//! GC: tell the executor what still exists in this network.

use sluice_proto::id::{Attachment, ContainerId, InterfaceName};
use sluice_proto::paths::DEADLINES;
use sluice_proto::pb::cni::GcRequest;

use super::Answer;
use crate::config::NetworkConfig;
use crate::deadline::Deadline;
use crate::error::PluginError;
use crate::executor;
use crate::log::{Level, configure, line};

pub(crate) fn gc(input: &[u8], deadline: Deadline) -> Result<Answer, PluginError> {
    let config = NetworkConfig::parse(input)?;
    let settings = config.settings()?;
    configure(&settings);
    // What has no valid name was never handed over, so leaving it out removes nothing.
    let valid = config.valid_attachments()?.iter().filter_map(|attachment| {
        let attachment = Attachment {
            network_name: config.name.clone(),
            container_id: ContainerId::parse(attachment.container_id.as_str()).ok()?,
            ifname: settings
                .subject(&InterfaceName::parse(attachment.ifname.as_str()).ok()?)
                .clone(),
        };
        Some((&attachment).into())
    });
    let message = GcRequest {
        network_name: config.name.to_string(),
        valid: valid.collect(),
    };
    let path = settings.run_dir.cni_socket();
    let response = executor::call(
        &path,
        Vec::new(),
        DEADLINES.connect,
        deadline,
        |mut client| async move { client.gc(executor::request(message, deadline)).await },
    )?;
    if response.removed > 0 {
        let removed = response.removed.to_string();
        line(Level::Info, "garbage removed", &[("attachments", &removed)]);
    }
    Ok(Answer::Nothing)
}

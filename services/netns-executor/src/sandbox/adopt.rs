//! Running pods that were not added through the plugin.

use std::net::IpAddr;
use std::sync::Arc;

use sluice_proto::code::ErrorCode;
use sluice_proto::id::{Attachment, ContainerId, InterfaceName, NetnsPath, NetworkName, PodRef};
use sluice_proto::opener::OpenerRequest;
use sluice_proto::pb::executor::Sandbox;
use sluice_proto::pb::executor::sandbox_event::Event;
use sluice_proto::sandbox::Failure;
use tokio::sync::mpsc;

use super::add::register;
use super::recovery::{Found, Scan, ask_scan, candidate, interface_with, offer, open, recover};
use super::registry::{Handle, wait_for_end};
use super::{Message, Reason};
use crate::kernel::Opened;
use crate::node::{Node, unix_ms};
use crate::pool::COMPONENT;
use crate::rules::RULE_SCHEMA;
use crate::table::{FORMAT, Record};

const STAGE: &str = "adopt pod";
/// Network name of adopted sandboxes; a runtime's GC speaks of its own networks only.
pub const NETWORK: &str = "sluice-adopted";
const MAX_CANDIDATES: u32 = 16;

fn failed(code: ErrorCode, cause: impl Into<String>) -> Failure {
    Failure::new(code, COMPONENT, STAGE, cause)
}

/// Finds a running pod's namespace and makes a sandbox of it. A pod that has one already keeps it.
///
/// `netns_path`: only this one is looked at, instead of a scan of the host's processes.
pub async fn adopt(
    node: &Arc<Node>,
    pod: PodRef,
    addresses: Vec<IpAddr>,
    netns_path: Option<NetnsPath>,
) -> Result<Sandbox, Failure> {
    if let Some(path) = netns_path {
        return adopt_at(node, pod, addresses, &path).await;
    }
    if let Some(handle) = node.registry.find_by_uid(&pod.uid) {
        if !handle.reachable() {
            recover(node, &handle, &mut Scan::default())
                .await
                .map_err(|lost| lost.failure)?;
            handle.send(Message::Examine);
        }
        return known(node, &handle);
    }
    refuse_unprovable(&pod, &addresses)?;
    adopt_by_scan(node, pod, addresses).await
}

fn known(node: &Node, handle: &Handle) -> Result<Sandbox, Failure> {
    let view = node.hub.view(&handle.attachment);
    view.ok_or_else(|| failed(ErrorCode::SandboxGone, "the sandbox has ended meanwhile"))
}

fn refuse_unprovable(pod: &PodRef, addresses: &[IpAddr]) -> Result<(), Failure> {
    if addresses.is_empty() {
        let cause = format!("pod {pod} has no address yet, so no namespace can be proven to be its own");
        return Err(failed(ErrorCode::InvalidInput, cause));
    }
    Ok(())
}

/// The runtime says which namespace it is: what is known about the pod counts only if it is about this one, since a
/// retried pod keeps its UID and gets another namespace.
async fn adopt_at(
    node: &Arc<Node>,
    pod: PodRef,
    addresses: Vec<IpAddr>,
    path: &NetnsPath,
) -> Result<Sandbox, Failure> {
    let request = OpenerRequest::Path(path.as_str().to_owned());
    let opened = open(node, &request).await.map_err(|error| error.failure())?;
    let earlier = node.registry.find_by_uid(&pod.uid);
    if let Some(handle) = &earlier
        && handle.netns.is_same_netns(&opened.identity)
    {
        if handle.reachable() {
            node.reaper.close(opened);
        } else {
            offer(node, handle, opened, false).await?;
        }
        return known(node, handle);
    }
    refuse_unprovable(&pod, &addresses)?;
    let (opened, found) = interface_with(opened, addresses).await?;
    let Some(found) = found else {
        let cause = format!(
            "the namespace at {path} (inode {}) has none of the addresses of pod {pod}",
            opened.identity.inode
        );
        node.reaper.close(opened);
        return Err(failed(ErrorCode::DescriptorRefused, cause));
    };
    if let Some(handle) = earlier {
        tracing::info!(attachment = %handle.attachment, netns = opened.identity.inode,
            "sandbox is replaced by the pod's namespace of now");
        handle.send(Message::Remove(Reason::Replaced));
        wait_for_end(vec![handle.ended]).await;
    }
    take(node, pod, path, found, opened)
}

async fn adopt_by_scan(node: &Arc<Node>, pod: PodRef, addresses: Vec<IpAddr>) -> Result<Sandbox, Failure> {
    ask_scan(node).await?;
    let mut refused = Vec::new();
    for index in 0..MAX_CANDIDATES {
        match candidate(node, &pod.uid, index).await {
            Ok(None) => break,
            Ok(Some(opened)) => {
                let (opened, found) = interface_with(opened, addresses.clone()).await?;
                match found {
                    Some(found) => return take(node, pod, "", found, opened),
                    None => refused.push(format!(
                        "inode {} has none of its addresses",
                        opened.identity.inode
                    )),
                }
                node.reaper.close(opened);
            }
            // A process of the pod may well live in the host's namespace; the next one may not.
            Err(failure) if failure.code == ErrorCode::DescriptorRefused => refused.push(failure.cause),
            Err(failure) => return Err(failure),
        }
    }
    let cause = format!(
        "netns-not-found: no process of pod {pod} (uid {}) lives in a namespace of its own [{}]",
        pod.uid,
        refused.join("; ")
    );
    Err(failed(ErrorCode::SandboxGone, cause))
}

fn take(
    node: &Arc<Node>,
    pod: PodRef,
    netns_path: impl AsRef<str>,
    found: Found,
    opened: Opened,
) -> Result<Sandbox, Failure> {
    let invalid = |error: sluice_proto::id::InvalidId| failed(ErrorCode::InvalidInput, error.to_string());
    let attachment = Attachment {
        network_name: NetworkName::parse(NETWORK).map_err(invalid)?,
        container_id: ContainerId::parse(pod.uid.as_str()).map_err(invalid)?,
        ifname: InterfaceName::parse(found.interface).map_err(invalid)?,
    };
    let mut inner = node.registry.lock();
    inner.refuse_when_retired(STAGE)?;
    // Whoever came first has it: another pod, or this one's own ADD while the scan ran.
    if let Some(owner) = inner.owner_of(&opened.identity) {
        let (inode, owner) = (opened.identity.inode, owner.attachment.to_string());
        return Err(failed(
            ErrorCode::DescriptorRefused,
            format!("inode {inode} belongs to sandbox {owner}"),
        ));
    }
    let record = Record {
        format: FORMAT,
        attachment: attachment.clone(),
        generation: inner.next_generation(),
        pod,
        addresses: found.addresses,
        netns: opened.identity.clone(),
        netns_path: netns_path.as_ref().to_owned(),
        added_unix_ms: unix_ms(),
        programmed: None,
        rule_schema: RULE_SCHEMA,
        admitted: true,
        pending: false,
        adopted: true,
    };
    let (sender, inbox) = mpsc::unbounded_channel();
    let mut task = register(node, &mut inner, record, sender, inbox);
    drop(inner);
    task.attach(opened);
    if let Err(failure) = task.save() {
        task.detach();
        node.registry.forget(&attachment, task.record.generation);
        return Err(failure);
    }
    tracing::info!(target: "audit", attachment = %attachment, netns = task.record.netns.inode, "running pod adopted");
    task.publish(Event::Changed);
    let view = task.view();
    tokio::spawn(task.run(Vec::new()));
    Ok(view)
}

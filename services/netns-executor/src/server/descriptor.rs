//! The descriptor socket: the broker fetches a sandbox's netns descriptor, and gives one back after a restart.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use prost::Message as _;
use sluice_proto::code::ErrorCode;
use sluice_proto::opener::OpenerRequest;
use sluice_proto::pb::executor::{
    DescriptorOf, DescriptorReply, DescriptorRequest, descriptor_reply, descriptor_request,
};
use sluice_proto::sandbox::{Failure, NetnsIdentity};
use sluice_proto::transport::descriptors::TransportError;
use sluice_proto::transport::seqpacket::{SeqpacketConnection, SeqpacketListener};
use sluice_proto::transport::uds::PeerPolicy;

use super::convert::{attachment, invalid_failure, unknown};
use super::listen::admit;
use crate::node::Node;
use crate::pool::COMPONENT;
use crate::sandbox::registry::Handle;
use crate::sandbox::{not_at_hand, recovery};

type Reply = Result<(NetnsIdentity, Option<Arc<OwnedFd>>), Failure>;

/// Accepts for ever; each connection in a task of its own.
pub(super) async fn serve(node: Arc<Node>, listener: SeqpacketListener, policy: PeerPolicy) {
    loop {
        match listener.accept().await {
            Ok(connection) if admit(&node, &policy, connection.peer(), "descriptor") => {
                let node = Arc::clone(&node);
                tokio::spawn(async move {
                    match serve_one(&node, &connection).await {
                        TransportError::Closed => {}
                        error => {
                            let error = sluice_runtime::telemetry::chain(&error);
                            tracing::warn!(error, "descriptor connection closed");
                        }
                    }
                });
            }
            Ok(_) => {}
            Err(error) => {
                tracing::error!(%error, "cannot accept on the descriptor socket");
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
        }
    }
}

async fn serve_one(node: &Arc<Node>, connection: &SeqpacketConnection) -> TransportError {
    loop {
        let received = match connection.receive(1).await {
            Ok(received) => received,
            Err(error) => return error,
        };
        let outcome = match DescriptorRequest::decode(received.bytes.as_slice()) {
            Ok(request) => answer(node, request, received.descriptors).await,
            Err(error) => Err(invalid_failure("read request", error)),
        };
        let (outcome, descriptor) = match outcome {
            Ok((identity, descriptor)) => (descriptor_reply::Outcome::Ok((&identity).into()), descriptor),
            Err(failure) => (descriptor_reply::Outcome::Failed(shortened(&failure)), None),
        };
        let reply = DescriptorReply {
            outcome: Some(outcome),
        }
        .encode_to_vec();
        let descriptors: Vec<_> = descriptor.iter().map(|descriptor| descriptor.as_fd()).collect();
        if let Err(error) = connection.send(&reply, &descriptors).await {
            return error;
        }
    }
}

/// A packet is short.
fn shortened(failure: &Failure) -> sluice_proto::pb::types::Failure {
    let mut pb = sluice_proto::pb::types::Failure::from(failure);
    pb.cause = pb.cause.chars().take(200).collect();
    pb
}

async fn answer(node: &Arc<Node>, request: DescriptorRequest, descriptors: Vec<OwnedFd>) -> Reply {
    match request.request {
        Some(descriptor_request::Request::Fetch(of)) => fetch(node, of),
        Some(descriptor_request::Request::Offer(of)) => offer(node, of, descriptors).await,
        None => Err(Failure::new(
            ErrorCode::InvalidInput,
            COMPONENT,
            "read request",
            "it is neither fetch nor offer",
        )),
    }
}

fn find(node: &Node, stage: &str, of: DescriptorOf) -> Result<Handle, Failure> {
    let key = attachment(of.attachment).map_err(|error| invalid_failure(stage, error))?;
    node.registry.find(&key).ok_or_else(|| unknown(stage, &key))
}

fn fetch(node: &Node, of: DescriptorOf) -> Reply {
    const STAGE: &str = "fetch descriptor";
    let generation = of.generation;
    let handle = find(node, STAGE, of)?;
    if handle.ending {
        return Err(unknown(STAGE, &handle.attachment));
    }
    if handle.generation != generation {
        let cause = format!("generation {generation} is over");
        return Err(Failure::new(ErrorCode::TooLate, COMPONENT, STAGE, cause));
    }
    let descriptor = handle.descriptor.ok_or_else(|| not_at_hand(STAGE))?;
    Ok((handle.netns, Some(descriptor)))
}

async fn offer(node: &Arc<Node>, of: DescriptorOf, descriptors: Vec<OwnedFd>) -> Reply {
    const STAGE: &str = "take descriptor back";
    let generation = of.generation;
    let handle = find(node, STAGE, of)?;
    if handle.generation != generation {
        let cause = format!("generation {generation} is over");
        return Err(Failure::new(ErrorCode::TooLate, COMPONENT, STAGE, cause));
    }
    if handle.reachable() {
        return Ok((handle.netns, None));
    }
    let descriptor = descriptors.first().ok_or_else(|| {
        Failure::new(
            ErrorCode::DescriptorRefused,
            COMPONENT,
            STAGE,
            "no descriptor came",
        )
    })?;
    let opened = node
        .opener
        .open(&OpenerRequest::Descriptor, Some(descriptor.as_fd()))
        .await
        .map_err(|error| error.failure(STAGE))?;
    // Checked against our own table, never against what the sender says.
    let opened = node.kernel.open(opened).map_err(|refusal| {
        node.metrics.refused_descriptor(refusal.reason());
        tracing::warn!(target: "audit", attachment = %handle.attachment, error = %refusal, "offered descriptor refused");
        refusal.failure(STAGE)
    })?;
    let identity = opened.identity.clone();
    recovery::offer(node, &handle, opened, false).await?;
    Ok((identity, None))
}

//! The executor's messages as facts, validated.

use sluice_proto::ambient::Desired;
use sluice_proto::id::{Attachment, PodRef};
use sluice_proto::pb::executor::{self, sandbox_event};
use sluice_proto::sandbox::{InvalidMessage, parse_addresses};

use crate::reconcile::Event;
use crate::reconcile::event::{Sandbox, SandboxId};

/// `None`: nothing that concerns a pod.
pub(super) fn event(event: sandbox_event::Event) -> Result<Option<Event>, InvalidMessage> {
    Ok(Some(match event {
        sandbox_event::Event::Present(pb) => Event::SandboxPresent(Box::new(sandbox(pb)?)),
        sandbox_event::Event::SnapshotDone(_) => Event::SandboxesListed,
        sandbox_event::Event::Pending(pb) => Event::SandboxPending(Box::new(sandbox(pb)?)),
        sandbox_event::Event::Changed(pb) => Event::SandboxChanged(Box::new(sandbox(pb)?)),
        sandbox_event::Event::Gone(gone) => Event::SandboxGone {
            id: SandboxId {
                attachment: attachment(gone.attachment)?,
                generation: gone.generation,
            },
            pod: pod(gone.pod)?.uid,
        },
        sandbox_event::Event::Repaired(_) | sandbox_event::Event::Heartbeat(_) => return Ok(None),
    }))
}

pub(super) fn sandbox(pb: executor::Sandbox) -> Result<Sandbox, InvalidMessage> {
    Ok(Sandbox {
        id: SandboxId {
            attachment: attachment(pb.attachment)?,
            generation: pb.generation,
        },
        pod: pod(pb.pod)?,
        addresses: parse_addresses(&pb.addresses)?,
        netns: pb.netns.ok_or(InvalidMessage::Missing("netns"))?.into(),
        // What cannot be understood counts as nothing: it is then programmed anew.
        programmed: pb
            .programmed
            .and_then(|desired| Desired::try_from(desired).ok())
            .unwrap_or(Desired::None),
        reachable: pb.reachable,
        broken: pb.broken.map(Into::into),
        pending: pb.pending,
        fingerprint: pb.fingerprint,
        attempts: pb.attempts,
    })
}

fn attachment(pb: Option<sluice_proto::pb::types::Attachment>) -> Result<Attachment, InvalidMessage> {
    pb.ok_or(InvalidMessage::Missing("attachment"))?.try_into()
}

fn pod(pb: Option<sluice_proto::pb::types::PodRef>) -> Result<PodRef, InvalidMessage> {
    pb.ok_or(InvalidMessage::Missing("pod"))?.try_into()
}

//! From messages to checked values, and failures to answers.

use sluice_proto::code::ErrorCode;
use sluice_proto::id::{Attachment, PodRef};
use sluice_proto::pb::types;
use sluice_proto::sandbox::{Failure, InvalidMessage};
use tonic::Status;

use crate::pool::COMPONENT;

pub(super) fn attachment(pb: Option<types::Attachment>) -> Result<Attachment, InvalidMessage> {
    pb.ok_or(InvalidMessage::Missing("attachment"))?.try_into()
}

pub(super) fn pod(pb: Option<types::PodRef>) -> Result<PodRef, InvalidMessage> {
    pb.ok_or(InvalidMessage::Missing("pod"))?.try_into()
}

/// A malformed request as a gRPC status.
pub(super) fn invalid(error: impl std::error::Error + 'static) -> Status {
    Status::invalid_argument(sluice_runtime::telemetry::chain(&error))
}

/// A malformed request as a failure, where the contract has a place for it.
pub(super) fn invalid_failure(stage: &str, error: impl std::error::Error + 'static) -> Failure {
    Failure::new(
        ErrorCode::InvalidInput,
        COMPONENT,
        stage,
        sluice_runtime::telemetry::chain(&error),
    )
}

/// A sandbox that nobody knows.
pub(super) fn unknown(stage: &str, attachment: &Attachment) -> Failure {
    let cause = format!("sandbox {attachment} is not known");
    Failure::new(ErrorCode::SandboxGone, COMPONENT, stage, cause)
}

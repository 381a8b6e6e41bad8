//! One call to the executor: connect, hand over descriptors, ask, all within a deadline.

use std::future::Future;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use sluice_proto::code::ErrorCode;
use sluice_proto::pb::cni::cni_service_client::CniServiceClient;
use sluice_proto::transport::descriptors::TransportError;
use sluice_proto::transport::grpc::{UdsChannel, origin};
use sluice_proto::transport::preamble;
use tonic::{Code, Request, Response, Status};

use crate::deadline::Deadline;

/// The client of one connection.
pub(crate) type Client = CniServiceClient<UdsChannel>;

/// No answer from the executor.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExecutorError {
    #[error("{}", path.display())]
    Connect {
        path: PathBuf,
        #[source]
        source: TransportError,
    },
    #[error("no event loop")]
    Runtime(#[source] io::Error),
    #[error("no HTTP/2 on the executor's socket")]
    Handshake(#[source] hyper::Error),
    #[error("no answer within {0:.1?}")]
    Deadline(Duration),
    #[error("the connection ended before the answer")]
    Ended(#[source] Box<Status>),
    #[error("{}: {}", .0.code(), .0.message())]
    Answered(Box<Status>),
    #[error("the executor gave no outcome")]
    NoOutcome,
}

impl ExecutorError {
    pub(crate) fn error_code(&self) -> ErrorCode {
        match self {
            Self::Connect {
                source: TransportError::DescriptorsLost,
                ..
            } => ErrorCode::DescriptorLimit,
            Self::Connect { .. } | Self::Runtime(_) | Self::Handshake(_) | Self::Ended(_) => {
                ErrorCode::ExecutorUnreachable
            }
            Self::Deadline(_) => ErrorCode::ExecutorTimeout,
            Self::NoOutcome => ErrorCode::InvalidInput,
            Self::Answered(status) => match status.code() {
                Code::DeadlineExceeded => ErrorCode::ExecutorTimeout,
                Code::NotFound => ErrorCode::SandboxGone,
                Code::PermissionDenied | Code::Unauthenticated => ErrorCode::DescriptorRefused,
                Code::InvalidArgument | Code::Unimplemented => ErrorCode::InvalidInput,
                Code::Aborted | Code::Cancelled => ErrorCode::TooLate,
                _ => ErrorCode::ExecutorUnreachable,
            },
        }
    }

    pub(crate) fn stage(&self) -> &'static str {
        match self {
            Self::Connect { .. } | Self::Runtime(_) | Self::Handshake(_) => "connect to the executor",
            Self::Deadline(_) | Self::Ended(_) => "wait for the executor",
            Self::Answered(_) | Self::NoOutcome => "executor",
        }
    }
}

/// Connects to the executor at `path`, trying for `connect` while nobody listens, hands over `descriptors` (closing
/// our own copies at once, so that only the executor keeps the namespace alive), and makes one call.
pub(crate) fn call<T, F>(
    path: &Path,
    descriptors: Vec<OwnedFd>,
    connect: Duration,
    deadline: Deadline,
    ask: impl FnOnce(Client) -> F,
) -> Result<T, ExecutorError>
where
    F: Future<Output = Result<Response<T>, Status>>,
{
    let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
    let stream = preamble::connect(path, &borrowed, connect.min(deadline.left())).map_err(|source| {
        ExecutorError::Connect {
            path: path.to_owned(),
            source,
        }
    })?;
    drop(descriptors);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
        .map_err(ExecutorError::Runtime)?;
    let left = deadline.left();
    let answer = runtime.block_on(async {
        tokio::time::timeout(left, converse(stream, ask))
            .await
            .map_err(|_| ExecutorError::Deadline(left))?
    });
    // The process ends right after the answer: taking the event loop down would only cost time.
    std::mem::forget(runtime);
    answer
}

async fn converse<T, F>(
    stream: std::os::unix::net::UnixStream,
    ask: impl FnOnce(Client) -> F,
) -> Result<T, ExecutorError>
where
    F: Future<Output = Result<Response<T>, Status>>,
{
    stream.set_nonblocking(true).map_err(ExecutorError::Runtime)?;
    let stream = tokio::net::UnixStream::from_std(stream).map_err(ExecutorError::Runtime)?;
    let channel = UdsChannel::handshake(stream)
        .await
        .map_err(ExecutorError::Handshake)?;
    match ask(Client::with_origin(channel, origin())).await {
        Ok(response) => Ok(response.into_inner()),
        Err(status) if std::error::Error::source(&status).is_some() => {
            Err(ExecutorError::Ended(Box::new(status)))
        }
        Err(status) => Err(ExecutorError::Answered(Box::new(status))),
    }
}

/// A request that tells the executor how long we wait (`grpc-timeout`).
pub(crate) fn request<T>(message: T, deadline: Deadline) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(deadline.left());
    request
}

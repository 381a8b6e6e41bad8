//! Asking the broker: what can come of a question, for everybody who has one ([`pb::node`], [`pb::workload`]).
//!
//! [`pb::node`]: crate::pb::node
//! [`pb::workload`]: crate::pb::workload

use std::future::Future;
use std::path::Path;
use std::time::Duration;

use tonic::Status;

use crate::transport::dial::DialError;
use crate::transport::grpc::UdsChannel;

/// The broker cannot be asked.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// There is no connection to it.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// It did not answer in time.
    #[error("the broker did not answer within {0:?}")]
    Deadline(Duration),
    /// It answered with an error.
    #[error("the broker answered {}: {}", .0.code(), .0.message())]
    Answered(Box<Status>),
    /// The connection ended before the answer.
    #[error("the broker closed the connection")]
    Closed,
}

impl From<Status> for BrokerError {
    fn from(status: Status) -> Self {
        // A status with a cause was made here, from a broken connection.
        if std::error::Error::source(&status).is_some() {
            Self::Closed
        } else {
            Self::Answered(Box::new(status))
        }
    }
}

/// Connects to the broker's socket at `path`. Sets no deadline.
pub async fn dial(path: &Path) -> Result<UdsChannel, BrokerError> {
    Ok(UdsChannel::dial("broker", path).await?)
}

/// Waits for `answer`, at most for `limit`.
pub async fn within<T>(
    limit: Duration,
    answer: impl Future<Output = Result<T, BrokerError>>,
) -> Result<T, BrokerError> {
    tokio::time::timeout(limit, answer)
        .await
        .map_err(|_| BrokerError::Deadline(limit))?
}

//! Asks the broker. Every answer has a deadline; only a watch may take as long as it likes.

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sluice_proto::broker::{self, BrokerError};
use sluice_proto::paths::RunDir;
use sluice_proto::pb::workload::pod_event::Event;
use sluice_proto::pb::workload::pod_netns_client::PodNetnsClient;
use sluice_proto::pb::workload::{
    DescribeRequest, DescribeResponse, NodeRequest, NodeResponse, Pod, PodEvent, SubscribeRequest,
};
use sluice_proto::transport::dial::DialError;
use sluice_proto::transport::grpc::{UdsChannel, origin};
use tonic::{Code, Streaming};

use crate::kubectl::KubectlError;

/// The broker reads back from the kernel for some answers; more than this is a hang.
const ANSWER: Duration = Duration::from_secs(10);

/// A question that could not be answered.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AskError {
    #[error(transparent)]
    Broker(#[from] BrokerError),
    #[error("no pod {pod} on this node{}", similar(names))]
    NoPod { pod: String, names: Vec<String> },
    #[error("cannot start an event loop")]
    Runtime(#[source] io::Error),
    #[error("cannot write the output")]
    Output(#[source] io::Error),
    #[error("cannot write {}", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Kubectl(#[from] KubectlError),
}

fn similar(names: &[String]) -> String {
    if names.is_empty() {
        String::new()
    } else {
        format!("; there is {}", names.join(", "))
    }
}

impl AskError {
    /// Nobody reads our output any more.
    pub(crate) fn is_broken_pipe(&self) -> bool {
        matches!(self, Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// The error with its causes and what to do about it.
    pub(crate) fn explain(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(error) = source {
            text.push_str(": ");
            text.push_str(&error.to_string());
            source = error.source();
        }
        if let Some(advice) = self.advice() {
            text.push('\n');
            text.push_str(advice);
        }
        text
    }

    fn advice(&self) -> Option<&'static str> {
        match self {
            Self::Broker(error) => advice(error),
            Self::Kubectl(error) => error.advice(),
            _ => None,
        }
    }
}

fn advice(error: &BrokerError) -> Option<&'static str> {
    match error {
        BrokerError::Dial(DialError::Connect { source, .. }) => Some(match source.kind() {
            io::ErrorKind::NotFound => {
                "There is no such socket: run this on the node or name one with --node, check that the \
                 ambient-broker container runs, or name the directory of the sockets with --run-dir."
            }
            io::ErrorKind::ConnectionRefused => {
                "The socket is there but nobody listens: the ambient-broker was killed or is restarting."
            }
            io::ErrorKind::PermissionDenied => "Run this as root.",
            _ => return None,
        }),
        BrokerError::Deadline(_) => Some("The ambient-broker hangs or is overloaded; look at its log."),
        BrokerError::Answered(status) if status.code() == Code::Unimplemented => {
            Some("The broker is older than this command; finish the upgrade.")
        }
        BrokerError::Answered(status) if status.code() == Code::PermissionDenied => Some("Run this as root."),
        BrokerError::Dial(DialError::Handshake { .. }) | BrokerError::Answered(_) | BrokerError::Closed => {
            None
        }
    }
}

/// One connection to the broker.
#[derive(Debug)]
pub(crate) struct Broker(PodNetnsClient<UdsChannel>);

impl Broker {
    /// Connects to the broker of the node whose sockets are below `run_dir`.
    pub(crate) async fn connect(run_dir: &Path) -> Result<Self, AskError> {
        let path = RunDir::new(run_dir).workload_socket();
        let channel = within(broker::dial(&path)).await?;
        Ok(Self(PodNetnsClient::with_origin(channel, origin())))
    }

    /// The node in full.
    pub(crate) async fn node(&mut self) -> Result<NodeResponse, BrokerError> {
        within(async { Ok(self.0.node(NodeRequest {}).await?.into_inner()) }).await
    }

    /// Every pod of the node, sorted by name.
    pub(crate) async fn pods(&mut self) -> Result<Vec<Pod>, BrokerError> {
        within(async {
            let mut events = self.subscribe().await?;
            let mut pods = Vec::new();
            loop {
                match next(&mut events).await? {
                    Event::Present(pod) => pods.push(pod),
                    Event::SnapshotDone(_) => break,
                    Event::Changed(_) | Event::Gone(_) => {}
                }
            }
            let name = |pod: &Pod| {
                pod.pod
                    .as_ref()
                    .map(|pod| (pod.namespace.clone(), pod.name.clone()))
            };
            pods.sort_by_cached_key(name);
            Ok(pods)
        })
        .await
    }

    /// One pod in full, or an error that lists pods with a similar name.
    pub(crate) async fn describe(
        &mut self,
        namespace: &str,
        name: &str,
    ) -> Result<DescribeResponse, AskError> {
        let request = DescribeRequest {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        };
        let answer = within(async { Ok(self.0.describe(request).await?.into_inner()) }).await?;
        if answer.pod.is_some() {
            return Ok(answer);
        }
        let pods = self.pods().await.unwrap_or_default();
        let names = pods
            .iter()
            .filter_map(|pod| pod.pod.as_ref())
            .filter(|pod| pod.name == name || (pod.namespace == namespace && pod.name.starts_with(name)));
        Err(AskError::NoPod {
            pod: format!("{namespace}/{name}"),
            names: names
                .take(5)
                .map(|pod| format!("{}/{}", pod.namespace, pod.name))
                .collect(),
        })
    }

    /// All pods, then every change.
    pub(crate) async fn subscribe(&mut self) -> Result<Streaming<PodEvent>, BrokerError> {
        Ok(self.0.subscribe(SubscribeRequest {}).await?.into_inner())
    }
}

/// The next event that this version knows.
pub(crate) async fn next(events: &mut Streaming<PodEvent>) -> Result<Event, BrokerError> {
    loop {
        match events.message().await? {
            Some(PodEvent { event: Some(event) }) => return Ok(event),
            Some(PodEvent { event: None }) => {}
            None => return Err(BrokerError::Closed),
        }
    }
}

async fn within<T>(answer: impl Future<Output = Result<T, BrokerError>>) -> Result<T, BrokerError> {
    broker::within(ANSWER, answer).await
}

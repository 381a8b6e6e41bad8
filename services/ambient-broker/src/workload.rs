//! `PodNetns`: what node-local tools may ask. Answers only; changes nothing.

use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::Stream;
use sluice_proto::id::{InvalidId, Namespace, PodName};
use sluice_proto::pb::workload::pod_netns_server::PodNetns;
use sluice_proto::pb::workload::{
    DescribeRequest, DescribeResponse, ManifestProblem, NodeRequest, NodeResponse, PodEvent, SelectionStep,
    SubscribeRequest, ZdsConnection,
};
use tokio::sync::{mpsc, oneshot};
use tonic::{Request, Response, Status};

use crate::driver::{Overview, Query};
use crate::executor::Executor;
use crate::health::Health;
use crate::registry::{Registry, to_pb};
use crate::source::Problem;
use crate::zds::{ServerStatus, Zds};

/// Problems of the source that still stand. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Problems(Arc<Mutex<Vec<Problem>>>);

/// Where the kernel keeps a file's label.
const SELINUX_LABEL: &str = "security.selinux";

/// More problems than anybody reads.
const MAX_PROBLEMS: usize = 256;

impl Problems {
    /// A problem stands.
    pub fn add(&self, problem: Problem) {
        let mut problems = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !problems.contains(&problem) && problems.len() < MAX_PROBLEMS {
            problems.push(problem);
        }
    }

    /// All problems of this place are over.
    pub fn clear(&self, place: &str) {
        let mut problems = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        problems.retain(|problem| problem.place != place);
    }

    fn all(&self) -> Vec<Problem> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The server.
#[derive(Debug, Clone)]
pub struct Workloads {
    /// Reports.
    pub registry: Registry,
    /// Questions to the loop.
    pub queries: mpsc::Sender<Query>,
    /// For read-backs.
    pub executor: Executor,
    /// For the state of connections.
    pub zds: Zds,
    /// What is not ready, and why.
    pub health: Health,
    /// Problems of the source.
    pub problems: Problems,
}

impl Workloads {
    async fn ask<T>(&self, query: impl FnOnce(oneshot::Sender<T>) -> Query) -> Result<T, Status> {
        let (reply, answer) = oneshot::channel();
        let gone = || Status::unavailable("the broker is shutting down");
        self.queries.send(query(reply)).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())
    }
}

type EventStream = Pin<Box<dyn Stream<Item = Result<PodEvent, Status>> + Send>>;

#[tonic::async_trait]
impl PodNetns for Workloads {
    type SubscribeStream = EventStream;

    async fn subscribe(&self, _: Request<SubscribeRequest>) -> Result<Response<EventStream>, Status> {
        let subscription = self.registry.subscribe();
        let events = futures_util::stream::unfold(Some(subscription), |subscription| async move {
            let mut subscription = subscription?;
            if let Some(event) = subscription.next().await {
                return Some((Ok(event), Some(subscription)));
            }
            let slow = Status::resource_exhausted("events were not taken in time; list again");
            Some((Err(slow), None))
        });
        Ok(Response::new(Box::pin(events)))
    }

    async fn describe(
        &self,
        request: Request<DescribeRequest>,
    ) -> Result<Response<DescribeResponse>, Status> {
        let request = request.into_inner();
        let invalid = |error: InvalidId| Status::invalid_argument(error.to_string());
        let namespace = Namespace::parse(request.namespace).map_err(invalid)?;
        let name = PodName::parse(request.name).map_err(invalid)?;
        let found = self
            .ask(|reply| Query::Explain {
                namespace,
                name,
                reply,
            })
            .await?;
        let Some(explanation) = found else {
            return Ok(Response::new(DescribeResponse::default()));
        };
        let steps = explanation
            .selection
            .map(|verdict| verdict.steps)
            .unwrap_or_default();
        let mut response = DescribeResponse {
            pod: Some(to_pb(&explanation.report)),
            selection: steps
                .into_iter()
                .map(|step| SelectionStep {
                    check: step.check,
                    observed: step.observed,
                    decides: step.decides,
                })
                .collect(),
            ..DescribeResponse::default()
        };
        if let Some(sandbox) = explanation.sandbox {
            match self.executor.inspect(&sandbox).await {
                Ok(inspection) => {
                    response.differences = inspection.differences;
                    response.rules = inspection.rules;
                    response.probe_addresses = inspection.probe_addresses;
                    response.executor_rule_schema = inspection.rule_schema;
                    let sandbox = inspection.sandbox.unwrap_or_default();
                    response.rule_schema = sandbox.rule_schema;
                    if !sandbox.reachable {
                        response.failed = sandbox.broken;
                    }
                }
                Err(failure) => response.failed = Some((&failure).into()),
            }
        }
        Ok(Response::new(response))
    }

    async fn node(&self, _: Request<NodeRequest>) -> Result<Response<NodeResponse>, Status> {
        let overview: Overview = self.ask(Query::Counts).await?;
        let zds = self.zds.status();
        let not_ready = self.health.not_ready_because();
        let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        Ok(Response::new(NodeResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ready: not_ready.is_empty(),
            not_ready_because: not_ready,
            zds_socket: describe_socket(&self.zds.options().socket, &zds),
            zds: zds.connections.iter().map(connection_to_pb).collect(),
            pods: number(overview.counts.pods),
            pods_expected: number(overview.counts.expected),
            pods_enrolled: number(overview.counts.enrolled),
            pods_broken: number(overview.counts.broken),
            executor: self.executor.node_status().await.ok(),
            source_problems: self.problems.all().into_iter().map(problem_to_pb).collect(),
            preflight: self
                .executor
                .last_preflight()
                .and_then(Result::ok)
                .unwrap_or_default(),
        }))
    }
}

fn connection_to_pb(connection: &crate::zds::ConnectionStatus) -> ZdsConnection {
    let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
    ZdsConnection {
        id: connection.id.0,
        state: connection.phase.as_str().to_owned(),
        acked: number(connection.acked),
        pending: number(connection.pending),
        peer_uid: connection.peer_uid,
        peer_pid: connection.peer_pid,
        connected_unix_ms: connection.connected_unix_ms,
    }
}

fn problem_to_pb(problem: Problem) -> ManifestProblem {
    ManifestProblem {
        file: problem.place,
        line: problem
            .line
            .and_then(|line| u32::try_from(line).ok())
            .unwrap_or(0),
        field: problem.field.unwrap_or_default(),
        problem: problem.message,
    }
}

/// Path, mode, owner and label as the file system has them now, and whether anybody has ever connected.
fn describe_socket(path: &Path, status: &ServerStatus) -> String {
    use std::fmt::Write;
    use std::os::unix::fs::MetadataExt;
    let file = match std::fs::metadata(path) {
        Ok(metadata) => format!(
            "mode {:04o}, owner {}:{}, {}",
            metadata.mode() & 0o7777,
            metadata.uid(),
            metadata.gid(),
            describe_label(path)
        ),
        Err(error) => format!("not there: {error}"),
    };
    let peers = match status.ever_connected {
        0 => format!("0 peers ever connected for {} s", status.listening.as_secs()),
        n => format!("{n} peers connected so far"),
    };
    let mut text = format!("{}: listening, {peers}; {file}", path.display());
    if status.refused_peers > 0 {
        let _ = write!(text, "; {} peers refused", status.refused_peers);
    }
    if let Some(version) = status.unknown_version {
        let _ = write!(text, "; a peer spoke version {version}, ours is 1");
    }
    text
}

/// A policy may keep ztunnel from a socket that mode and owner let it connect to.
fn describe_label(path: &Path) -> String {
    use rustix::io::Errno;
    let mut label = [0; 1024];
    match rustix::fs::getxattr(path, SELINUX_LABEL, label.as_mut_slice()) {
        Ok(length) => {
            let label = String::from_utf8_lossy(&label[..length]);
            format!("label {}", label.trim_end_matches('\0'))
        }
        Err(Errno::NODATA | Errno::OPNOTSUPP) => "no SELinux label".to_owned(),
        Err(error) => format!("label not readable: {error}"),
    }
}

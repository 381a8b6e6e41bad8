//! A stand-in for the broker, and the command run against it.

use std::path::Path;
use std::pin::Pin;
use std::process::Command;

use sluice_proto::paths::RunDir;
use sluice_proto::pb::executor::SnapshotDone;
use sluice_proto::pb::workload::pod_event::Event;
use sluice_proto::pb::workload::pod_netns_server::{PodNetns, PodNetnsServer};
use sluice_proto::pb::workload::{
    DescribeRequest, DescribeResponse, NodeRequest, NodeResponse, PodEvent, SubscribeRequest,
};
use sluice_proto::transport::preamble::PreambleStream;
use sluice_proto::transport::uds::bind_stream;
use tempfile::TempDir;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};

/// What the stand-in answers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Answers {
    pub(crate) node: NodeResponse,
    pub(crate) pods: Vec<DescribeResponse>,
    pub(crate) changes: Vec<Event>,
}

#[tonic::async_trait]
impl PodNetns for Answers {
    type SubscribeStream = Pin<Box<dyn Stream<Item = Result<PodEvent, Status>> + Send>>;

    async fn subscribe(
        &self,
        _: Request<SubscribeRequest>,
    ) -> Result<Response<Self::SubscribeStream>, Status> {
        let present = self
            .pods
            .iter()
            .filter_map(|answer| answer.pod.clone())
            .map(Event::Present);
        let events: Vec<Event> = present
            .chain([Event::SnapshotDone(SnapshotDone {})])
            .chain(self.changes.clone())
            .collect();
        let events = tokio_stream::iter(events).map(|event| Ok(PodEvent { event: Some(event) }));
        Ok(Response::new(Box::pin(events)))
    }

    async fn describe(
        &self,
        request: Request<DescribeRequest>,
    ) -> Result<Response<DescribeResponse>, Status> {
        let asked = request.into_inner();
        let found = self.pods.iter().find(|answer| {
            let pod = answer.pod.as_ref().and_then(|pod| pod.pod.as_ref());
            pod.is_some_and(|pod| pod.namespace == asked.namespace && pod.name == asked.name)
        });
        Ok(Response::new(found.cloned().unwrap_or_default()))
    }

    async fn node(&self, _: Request<NodeRequest>) -> Result<Response<NodeResponse>, Status> {
        Ok(Response::new(self.node.clone()))
    }
}

/// A node whose broker answers.
pub(crate) struct Node {
    pub(crate) run_dir: TempDir,
    pub(crate) runtime: tokio::runtime::Runtime,
}

impl Node {
    pub(crate) fn new(answers: Answers) -> Self {
        let run_dir = tempfile::tempdir().unwrap();
        let socket = RunDir::new(run_dir.path()).workload_socket();
        std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let context = runtime.enter();
        let listener = bind_stream(&socket, 0o600, None).unwrap();
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let stream = PreambleStream::accept(stream).await.unwrap();
                let server = tonic::transport::Server::builder()
                    .add_service(PodNetnsServer::new(answers.clone()))
                    .serve_with_incoming(tokio_stream::once(Ok::<_, std::io::Error>(stream)));
                tokio::spawn(server);
            }
        });
        drop(context);
        Self { run_dir, runtime }
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Done {
        run(self.run_dir.path(), arguments)
    }
}

#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) status: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Done {
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap()
    }
}

pub(crate) fn run(run_dir: &Path, arguments: &[&str]) -> Done {
    run_as(Path::new(env!("CARGO_BIN_EXE_sluicectl")), run_dir, arguments)
}

#[expect(clippy::disallowed_methods, reason = "the test runs the command")]
pub(crate) fn run_as(program: &Path, run_dir: &Path, arguments: &[&str]) -> Done {
    let output = Command::new(program)
        .arg("--run-dir")
        .arg(run_dir)
        .args(arguments)
        .output()
        .unwrap();
    Done {
        status: output.status.code().unwrap(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

//! A broker that says what a test wants.

use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use sluice_proto::paths::RunDir;
use sluice_proto::pb::node::node_lifecycle_server::{NodeLifecycle, NodeLifecycleServer};
use sluice_proto::pb::node::{
    InstallerReport, Lifecycle, NodeState, PluginCredentials, ReportResponse, WatchRequest,
};
use sluice_proto::transport::preamble::PreambleStream;
use sluice_proto::transport::uds::bind_stream;
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};

/// A broker that says what a test wants.
#[derive(Debug)]
pub(crate) struct FakeBroker {
    pub(crate) state: watch::Sender<NodeState>,
    reports: Arc<Mutex<Vec<InstallerReport>>>,
    runtime: tokio::runtime::Runtime,
    socket: PathBuf,
}

#[derive(Debug, Clone)]
struct Service {
    state: watch::Receiver<NodeState>,
    reports: Arc<Mutex<Vec<InstallerReport>>>,
}

#[tonic::async_trait]
impl NodeLifecycle for Service {
    type WatchStream = std::pin::Pin<Box<dyn Stream<Item = Result<NodeState, Status>> + Send>>;

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let mut ended = false;
        let states = WatchStream::new(self.state.clone()).take_while(move |state| {
            let before = ended;
            ended = state.r#final;
            !before
        });
        Ok(Response::new(Box::pin(states.map(Ok))))
    }

    async fn report(&self, report: Request<InstallerReport>) -> Result<Response<ReportResponse>, Status> {
        self.reports.lock().unwrap().push(report.into_inner());
        Ok(Response::new(ReportResponse {}))
    }
}

pub(crate) fn serving() -> NodeState {
    NodeState {
        can_serve: true,
        lifecycle: Lifecycle::Keep.into(),
        lifecycle_reason: "the DaemonSet wants this node".into(),
        credentials: Some(credentials("eyJhbGciOiJSUzI1NiJ9.first-token.signature")),
        ..NodeState::default()
    }
}

pub(crate) fn credentials(token: &str) -> PluginCredentials {
    PluginCredentials {
        server: "https://10.96.0.1:443".into(),
        tls_server_name: String::new(),
        ca_pem: "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n".into(),
        token: token.into(),
        expires_unix: 4_000_000_000,
    }
}

impl FakeBroker {
    pub(super) fn start(run: &RunDir, state: NodeState) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let (state, receiver) = watch::channel(state);
        let reports = Arc::default();
        let service = Service {
            state: receiver,
            reports: Arc::clone(&reports),
        };
        let socket = run.node_socket();
        let context = runtime.enter();
        let listener = bind_stream(&socket, 0o660, None).unwrap();
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let Ok(stream) = PreambleStream::accept(stream).await else {
                    continue;
                };
                let server = tonic::transport::Server::builder()
                    .add_service(NodeLifecycleServer::new(service.clone()))
                    .serve_with_incoming(tokio_stream::once(Ok::<_, std::io::Error>(stream)));
                tokio::spawn(server);
            }
        });
        drop(context);
        Self {
            state,
            reports,
            runtime,
            socket,
        }
    }

    pub(crate) fn say(&self, change: impl FnOnce(&mut NodeState)) {
        self.state.send_modify(change);
    }

    pub(crate) fn report(&self) -> Option<InstallerReport> {
        self.reports.lock().unwrap().last().cloned()
    }

    /// Ends without a last word.
    pub(crate) fn stop(self) {
        fs::remove_file(&self.socket).unwrap();
        self.runtime.shutdown_background();
    }
}

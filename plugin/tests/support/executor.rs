//! A stand-in for the executor that speaks the real protocol and does what a test says.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use sluice_proto::paths::RunDir;
use sluice_proto::pb::cni::cni_service_server::{CniService, CniServiceServer};
use sluice_proto::pb::cni::{
    AddRequest, AddResponse, Admitted, CheckRequest, CheckResponse, DelRequest, DelResponse, GcRequest,
    GcResponse, HandOverRequest, HandOverResponse, NoBroker, StatusRequest, StatusResponse,
    add_response::Outcome,
};
use sluice_proto::pb::types::{Failure, Mode};
use sluice_proto::transport::preamble::{Connection, PreambleStream};
use sluice_proto::transport::uds::bind_stream;
use tokio::sync::watch;
use tonic::{Request, Response, Status};

/// What the stand-in answers.
#[derive(Debug, Clone)]
pub(crate) enum Behaviour {
    Well,
    Fail(Failure),
    NoBroker,
    /// As the executor does it: after some time.
    NoBrokerAfter(std::time::Duration),
    /// Takes the call and never answers.
    Hang,
    /// Takes the call and closes the connection.
    Vanish,
}

/// A request with what came before it.
#[derive(Debug)]
pub(crate) struct Seen<T> {
    pub(crate) message: T,
    pub(crate) descriptors: Vec<OwnedFd>,
    /// `grpc-timeout`.
    pub(crate) timeout: String,
}

#[derive(Debug, Clone)]
struct Service {
    behaviour: Behaviour,
    seen: Arc<Mutex<Calls>>,
    vanish: watch::Sender<bool>,
}

/// Every call, in order of arrival.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    pub(crate) add: Vec<Seen<AddRequest>>,
    pub(crate) del: Vec<DelRequest>,
    pub(crate) check: Vec<CheckRequest>,
    pub(crate) gc: Vec<GcRequest>,
}

/// The stand-in; ends when dropped.
#[derive(Debug)]
pub(crate) struct FakeExecutor {
    _runtime: tokio::runtime::Runtime,
    seen: Arc<Mutex<Calls>>,
    socket: PathBuf,
}

impl FakeExecutor {
    pub(crate) fn start(run_dir: &Path, behaviour: Behaviour) -> Self {
        let socket = RunDir::new(run_dir).cni_socket();
        std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let seen = Arc::new(Mutex::new(Calls::default()));
        let (vanish, _) = watch::channel(false);
        let service = Service {
            behaviour,
            seen: seen.clone(),
            vanish,
        };
        let _context = runtime.enter();
        let listener = bind_stream(&socket, 0o600, None).unwrap();
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, service.clone()));
            }
        });
        Self {
            _runtime: runtime,
            seen,
            socket,
        }
    }

    pub(crate) fn calls(&self) -> std::sync::MutexGuard<'_, Calls> {
        self.seen.lock().unwrap()
    }
}

impl Drop for FakeExecutor {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
    }
}

async fn serve(stream: tokio::net::UnixStream, service: Service) {
    let mut vanish = service.vanish.subscribe();
    let connection = stream.as_fd().try_clone_to_owned().unwrap();
    let stream = PreambleStream::accept(stream).await.unwrap();
    let server = tonic::transport::Server::builder()
        .add_service(CniServiceServer::new(service))
        .serve_with_incoming(tokio_stream::once(Ok::<_, std::io::Error>(stream)));
    tokio::spawn(server);
    if vanish.wait_for(|vanish| *vanish).await.is_ok() {
        nix::sys::socket::shutdown(connection.as_raw_fd(), nix::sys::socket::Shutdown::Both).unwrap();
    }
}

impl Service {
    async fn misbehave(&self) {
        if matches!(self.behaviour, Behaviour::Vanish) {
            self.vanish.send_replace(true);
        }
        if matches!(self.behaviour, Behaviour::Vanish | Behaviour::Hang) {
            std::future::pending::<()>().await;
        }
    }
}

#[tonic::async_trait]
impl CniService for Service {
    async fn add(&self, request: Request<AddRequest>) -> Result<Response<AddResponse>, Status> {
        let descriptors = request
            .extensions()
            .get::<Connection>()
            .unwrap()
            .take_descriptors();
        let timeout = request
            .metadata()
            .get("grpc-timeout")
            .map(|value| value.to_str().unwrap().to_owned());
        self.seen.lock().unwrap().add.push(Seen {
            message: request.into_inner(),
            descriptors,
            timeout: timeout.unwrap_or_default(),
        });
        self.misbehave().await;
        let outcome = match &self.behaviour {
            Behaviour::Fail(failure) => Outcome::Refused(failure.clone()),
            Behaviour::NoBroker => Outcome::NoBroker(NoBroker { waited_ms: 2000 }),
            Behaviour::NoBrokerAfter(patience) => {
                tokio::time::sleep(*patience).await;
                Outcome::NoBroker(NoBroker { waited_ms: 2000 })
            }
            _ => Outcome::Admitted(Admitted {
                mode: Mode::Ambient.into(),
            }),
        };
        Ok(Response::new(AddResponse {
            outcome: Some(outcome),
        }))
    }

    async fn hand_over(&self, _: Request<HandOverRequest>) -> Result<Response<HandOverResponse>, Status> {
        Ok(Response::new(HandOverResponse { failed: None }))
    }

    async fn del(&self, request: Request<DelRequest>) -> Result<Response<DelResponse>, Status> {
        self.seen.lock().unwrap().del.push(request.into_inner());
        self.misbehave().await;
        Ok(Response::new(DelResponse {}))
    }

    async fn check(&self, request: Request<CheckRequest>) -> Result<Response<CheckResponse>, Status> {
        self.seen.lock().unwrap().check.push(request.into_inner());
        self.misbehave().await;
        let failures = match &self.behaviour {
            Behaviour::Fail(failure) => vec![failure.clone(), failure.clone()],
            _ => Vec::new(),
        };
        Ok(Response::new(CheckResponse { failures }))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusResponse>, Status> {
        self.misbehave().await;
        Ok(Response::new(StatusResponse {
            broker_connected: !matches!(self.behaviour, Behaviour::NoBroker),
            version: "test".into(),
        }))
    }

    async fn gc(&self, request: Request<GcRequest>) -> Result<Response<GcResponse>, Status> {
        self.seen.lock().unwrap().gc.push(request.into_inner());
        self.misbehave().await;
        Ok(Response::new(GcResponse { removed: 1 }))
    }
}

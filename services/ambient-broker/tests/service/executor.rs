//! A stand-in executor: keeps sandboxes, programs nothing, remembers what it was told.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use futures_util::Stream;
use prost::Message;
use sluice_proto::paths::RunDir;
use sluice_proto::pb::executor::netns_executor_server::{NetnsExecutor, NetnsExecutorServer};
use sluice_proto::pb::executor::*;
use sluice_proto::pb::types::{Attachment, Desired, Failure, Mode, NetnsIdentity, PodRef};
use sluice_proto::transport::seqpacket::SeqpacketListener;
use sluice_proto::transport::uds::bind_stream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{UnboundedReceiverStream, UnixListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) sandboxes: BTreeMap<String, Sandbox>,
    pub(crate) calls: Vec<String>,
    pub(crate) verdicts: Vec<complete_request::Verdict>,
    pub(crate) redirected: VecDeque<u32>,
    pub(crate) opener: bool,
    pub(crate) features: Vec<Feature>,
    watchers: Vec<mpsc::UnboundedSender<Result<SandboxEvent, Status>>>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct FakeExecutor(pub(crate) Arc<Mutex<Shared>>);

pub(crate) fn own_netns() -> OwnedFd {
    std::fs::File::open("/proc/self/ns/net").unwrap().into()
}

fn identity(cookie: u64) -> NetnsIdentity {
    let metadata = std::fs::metadata("/proc/self/ns/net").unwrap();
    NetnsIdentity {
        cookie,
        device: metadata.dev(),
        inode: metadata.ino(),
        boot_id: "boot".into(),
    }
}

fn send(shared: &mut Shared, event: sandbox_event::Event) {
    let event = SandboxEvent { event: Some(event) };
    shared
        .watchers
        .retain(|watcher| watcher.send(Ok(event.clone())).is_ok());
}

fn gone(sandbox: Sandbox, reason: &str) -> sandbox_event::Event {
    sandbox_event::Event::Gone(Gone {
        attachment: sandbox.attachment,
        generation: sandbox.generation,
        pod: sandbox.pod,
        reason: reason.into(),
    })
}

impl FakeExecutor {
    /// Serves until the token is cancelled.
    pub(crate) fn serve(&self, run: &RunDir) -> CancellationToken {
        let stop = CancellationToken::new();
        let listener = bind_stream(&run.executor_socket(), 0o600, None).unwrap();
        let server = tonic::transport::Server::builder()
            .add_service(NetnsExecutorServer::new(self.clone()))
            .serve_with_incoming(UnixListenerStream::new(listener));
        let stopped = stop.clone();
        tokio::spawn(async move {
            tokio::select! {
                served = server => served.unwrap(),
                () = stopped.cancelled() => {}
            }
        });
        tokio::spawn(self.clone().descriptors(run.descriptor_socket(), stop.clone()));
        stop
    }

    async fn descriptors(self, path: impl AsRef<Path>, stop: CancellationToken) {
        let listener = SeqpacketListener::bind(path.as_ref(), 0o600, None).unwrap();
        loop {
            let connection = tokio::select! {
                () = stop.cancelled() => return,
                accepted = listener.accept() => accepted.unwrap(),
            };
            let shared = self.0.clone();
            tokio::spawn(async move {
                while let Ok(received) = connection.receive(1).await {
                    let request = DescriptorRequest::decode(received.bytes.as_slice()).unwrap();
                    let (of, carries) = match request.request.unwrap() {
                        descriptor_request::Request::Fetch(of) => (of, true),
                        descriptor_request::Request::Offer(of) => {
                            assert_eq!(received.descriptors.len(), 1);
                            (of, false)
                        }
                    };
                    let id = of.attachment.unwrap().container_id;
                    let sandbox = {
                        let mut shared = shared.lock().unwrap();
                        shared
                            .calls
                            .push(format!("{} {id}", if carries { "fetch" } else { "offer" }));
                        if let Some(sandbox) = shared.sandboxes.get_mut(&id) {
                            sandbox.reachable = true;
                        }
                        shared.sandboxes.get(&id).cloned()
                    };
                    let outcome = match sandbox {
                        Some(sandbox) => descriptor_reply::Outcome::Ok(sandbox.netns.unwrap()),
                        None => descriptor_reply::Outcome::Failed(Failure {
                            code: "EXE-GONE".into(),
                            ..Failure::default()
                        }),
                    };
                    let carries = carries && matches!(outcome, descriptor_reply::Outcome::Ok(_));
                    let reply = DescriptorReply {
                        outcome: Some(outcome),
                    }
                    .encode_to_vec();
                    let netns = own_netns();
                    let with = [netns.as_fd()];
                    connection
                        .send(&reply, if carries { &with } else { &[] })
                        .await
                        .unwrap();
                }
            });
        }
    }

    pub(crate) fn add(&self, pod: &PodRef, container: &str, generation: u64) {
        let sandbox = Sandbox {
            attachment: Some(Attachment {
                network_name: "net".into(),
                container_id: container.into(),
                ifname: "eth0".into(),
            }),
            generation,
            pod: Some(pod.clone()),
            addresses: vec!["10.0.0.1".into()],
            netns: Some(identity(generation)),
            reachable: true,
            pending: true,
            ..Sandbox::default()
        };
        let mut shared = self.0.lock().unwrap();
        shared.sandboxes.insert(container.into(), sandbox.clone());
        send(&mut shared, sandbox_event::Event::Pending(sandbox));
    }

    pub(crate) fn del(&self, container: &str) {
        let mut shared = self.0.lock().unwrap();
        let sandbox = shared.sandboxes.remove(container).unwrap();
        send(&mut shared, gone(sandbox, "DEL"));
    }

    pub(crate) fn verdicts(&self) -> Vec<complete_request::Verdict> {
        self.0.lock().unwrap().verdicts.clone()
    }

    pub(crate) fn calls(&self) -> Vec<String> {
        self.0.lock().unwrap().calls.clone()
    }

    pub(crate) fn mode(&self, container: &str) -> Mode {
        let shared = self.0.lock().unwrap();
        let programmed = shared.sandboxes[container].programmed.as_ref();
        programmed.map_or(Mode::Unspecified, Desired::mode)
    }
}

type Events = Pin<Box<dyn Stream<Item = Result<SandboxEvent, Status>> + Send>>;

#[tonic::async_trait]
impl NetnsExecutor for FakeExecutor {
    type WatchStream = Events;

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Events>, Status> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let mut shared = self.0.lock().unwrap();
        for sandbox in shared.sandboxes.values() {
            let event = Some(sandbox_event::Event::Present(sandbox.clone()));
            sender.send(Ok(SandboxEvent { event })).unwrap();
        }
        let event = Some(sandbox_event::Event::SnapshotDone(SnapshotDone {}));
        sender.send(Ok(SandboxEvent { event })).unwrap();
        shared.watchers.push(sender);
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(receiver))))
    }

    async fn program(&self, request: Request<ProgramRequest>) -> Result<Response<ProgramResponse>, Status> {
        let request = request.into_inner();
        let id = request.attachment.unwrap().container_id;
        let mut shared = self.0.lock().unwrap();
        let mode = request.desired.as_ref().unwrap().mode();
        shared.calls.push(format!("program {id} {}", mode.as_str_name()));
        let outcome = match shared.sandboxes.get_mut(&id) {
            Some(sandbox) => {
                sandbox.programmed = request.desired;
                program_response::Outcome::Programmed(Programmed::default())
            }
            None => program_response::Outcome::TooLate(TooLate {}),
        };
        Ok(Response::new(ProgramResponse {
            outcome: Some(outcome),
        }))
    }

    async fn foresee(&self, _: Request<ForeseeRequest>) -> Result<Response<ForeseeResponse>, Status> {
        // This one always asks.
        Ok(Response::new(ForeseeResponse {}))
    }

    async fn complete(
        &self,
        request: Request<CompleteRequest>,
    ) -> Result<Response<CompleteResponse>, Status> {
        let request = request.into_inner();
        let id = request.attachment.unwrap().container_id;
        let mut shared = self.0.lock().unwrap();
        shared.verdicts.push(request.verdict.unwrap());
        if let Some(sandbox) = shared.sandboxes.get_mut(&id) {
            sandbox.pending = false;
        }
        let outcome = Some(complete_response::Outcome::Accepted(Accepted {}));
        Ok(Response::new(CompleteResponse { outcome }))
    }

    async fn pod_gone(&self, request: Request<PodGoneRequest>) -> Result<Response<PodGoneResponse>, Status> {
        let id = request.into_inner().attachment.unwrap().container_id;
        self.0.lock().unwrap().calls.push(format!("pod gone {id}"));
        Ok(Response::new(PodGoneResponse {
            held: "mounted".into(),
        }))
    }

    async fn adopt(&self, request: Request<AdoptRequest>) -> Result<Response<AdoptResponse>, Status> {
        let request = request.into_inner();
        let mut shared = self.0.lock().unwrap();
        shared.calls.push(format!("adopt {}", request.netns_path));
        let outcome = if shared.opener {
            let sandbox = Sandbox {
                attachment: Some(Attachment {
                    network_name: "adopted".into(),
                    container_id: "adopted-1".into(),
                    ifname: "eth0".into(),
                }),
                generation: 77,
                pod: request.pod,
                addresses: request.addresses,
                netns: Some(identity(77)),
                reachable: true,
                adopted: true,
                ..Sandbox::default()
            };
            shared.sandboxes.insert("adopted-1".into(), sandbox.clone());
            adopt_response::Outcome::Sandbox(sandbox)
        } else {
            adopt_response::Outcome::Failed(Failure {
                code: "OPN-NONE".into(),
                component: "netns-executor".into(),
                stage: "adopt pod".into(),
                cause: "no opener is connected".into(),
            })
        };
        Ok(Response::new(AdoptResponse {
            outcome: Some(outcome),
        }))
    }

    async fn inspect(&self, _: Request<InspectRequest>) -> Result<Response<InspectResponse>, Status> {
        let redirected_connections = self.0.lock().unwrap().redirected.pop_front().unwrap_or(0);
        Ok(Response::new(InspectResponse {
            redirected_connections,
            rules: vec!["a rule".into()],
            ..InspectResponse::default()
        }))
    }

    async fn sync_probe_set(
        &self,
        request: Request<SyncProbeSetRequest>,
    ) -> Result<Response<SyncProbeSetResponse>, Status> {
        let request = request.into_inner();
        let call = format!("probes +{} -{}", request.addresses.len(), request.remove.len());
        self.0.lock().unwrap().calls.push(call);
        Ok(Response::new(SyncProbeSetResponse::default()))
    }

    async fn sync_handoffs(
        &self,
        _: Request<SyncHandoffsRequest>,
    ) -> Result<Response<SyncHandoffsResponse>, Status> {
        Ok(Response::new(SyncHandoffsResponse {}))
    }

    async fn retire(&self, _: Request<RetireRequest>) -> Result<Response<RetireResponse>, Status> {
        let mut shared = self.0.lock().unwrap();
        shared.calls.push("retire".to_owned());
        for sandbox in std::mem::take(&mut shared.sandboxes).into_values() {
            send(&mut shared, gone(sandbox, "retired"));
        }
        Ok(Response::new(RetireResponse::default()))
    }

    async fn preflight(&self, _: Request<PreflightRequest>) -> Result<Response<PreflightResponse>, Status> {
        let features = self.0.lock().unwrap().features.clone();
        Ok(Response::new(PreflightResponse { features }))
    }

    async fn node_status(
        &self,
        _: Request<NodeStatusRequest>,
    ) -> Result<Response<NodeStatusResponse>, Status> {
        Ok(Response::new(NodeStatusResponse::default()))
    }
}

//! `CniService`: what the runtime asks through the plugin.

use std::sync::Arc;

use sluice_proto::code::ErrorCode;
use sluice_proto::id::NetworkName;
use sluice_proto::pb::cni::cni_service_server::CniService;
use sluice_proto::pb::cni::{
    AddRequest, AddResponse, Admitted, CheckRequest, CheckResponse, DelRequest, DelResponse, GcRequest,
    GcResponse, HandOverRequest, HandOverResponse, NoBroker, StatusRequest, StatusResponse, add_response,
};
use sluice_proto::sandbox::{Failure, parse_addresses};
use tokio::sync::oneshot;
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use super::convert::{attachment, invalid, invalid_failure, pod, unknown};
use super::hand_over;
use super::listen::Connection;
use crate::metrics::Stage;
use crate::node::Node;
use crate::pool::COMPONENT;
use crate::sandbox::add::{self, Begun};
use crate::sandbox::registry::wait_for_end;
use crate::sandbox::{Answer, Message, Reason};
use crate::self_test;

#[derive(Debug)]
pub(super) struct Cni {
    node: Arc<Node>,
}

impl Cni {
    pub(super) fn new(node: Arc<Node>) -> Self {
        Self { node }
    }

    async fn begin(&self, request: Request<AddRequest>) -> Result<Begun, Failure> {
        let request = self.receive(request)?;
        add::begin(&self.node, add::with_addresses(request).await?)
    }

    fn receive(&self, request: Request<AddRequest>) -> Result<add::Request, Failure> {
        const STAGE: &str = "check descriptors";
        let connection = request.extensions().get::<Connection>().cloned().ok_or_else(|| {
            Failure::new(
                ErrorCode::Unknown,
                COMPONENT,
                STAGE,
                "bug: connection without information",
            )
        })?;
        self.node
            .metrics
            .observe(Stage::Connect, connection.accepted.elapsed());
        let descriptors = connection.preamble.take_descriptors();
        let called = Instant::now();
        let request = request.into_inner();
        self.node.configurations.of_plugin(&request.config_hash);
        let key = attachment(request.attachment).map_err(|error| invalid_failure(STAGE, error))?;
        let pod = pod(request.pod).map_err(|error| invalid_failure(STAGE, error))?;
        let addresses = parse_addresses(&request.addresses).map_err(|error| invalid_failure(STAGE, error))?;
        let netns_path = request.netns_path.parse().map_err(|error| {
            let error: sluice_proto::id::InvalidId = error;
            invalid_failure(STAGE, error)
        })?;
        let opened = self.node.kernel.open(descriptors).map_err(|refusal| {
            self.node.metrics.refused_descriptor(refusal.reason());
            let peer = connection.preamble.peer;
            tracing::warn!(target: "audit", attachment = %key, %pod, peer_uid = peer.uid, peer_pid = peer.pid,
                error = %refusal, "descriptors refused");
            refusal.failure(STAGE)
        })?;
        Ok(add::Request {
            attachment: key,
            pod,
            addresses,
            netns_path,
            opened,
            accepted: connection.accepted,
            called,
        })
    }
}

fn outcome(answer: Answer) -> add_response::Outcome {
    match answer {
        Answer::Admitted(mode) => add_response::Outcome::Admitted(Admitted { mode: mode.into() }),
        Answer::Refused(failure) => add_response::Outcome::Refused((&failure).into()),
        Answer::NoBroker(waited) => add_response::Outcome::NoBroker(NoBroker {
            waited_ms: u32::try_from(waited.as_millis()).unwrap_or(u32::MAX),
        }),
    }
}

#[tonic::async_trait]
impl CniService for Cni {
    async fn add(&self, request: Request<AddRequest>) -> Result<Response<AddResponse>, Status> {
        let begun = Instant::now();
        let answer = match self.begin(request).await {
            Ok(Begun::Answered(answer)) => answer,
            Ok(Begun::Waiting(waiting)) => waiting.answer().await,
            Err(failure) => Answer::Refused(failure),
        };
        if let Answer::Refused(failure) = &answer {
            let elapsed_ms = begun.elapsed().as_millis();
            tracing::warn!(error = %failure, elapsed_ms, "ADD refused");
        }
        let outcome = Some(outcome(answer));
        Ok(Response::new(AddResponse { outcome }))
    }

    async fn del(&self, request: Request<DelRequest>) -> Result<Response<DelResponse>, Status> {
        let key = attachment(request.into_inner().attachment).map_err(invalid)?;
        if let Some(handle) = self.node.registry.delete(&key, Reason::Del) {
            wait_for_end(vec![handle.ended]).await;
        }
        Ok(Response::new(DelResponse {}))
    }

    async fn check(&self, request: Request<CheckRequest>) -> Result<Response<CheckResponse>, Status> {
        let key = attachment(request.into_inner().attachment).map_err(invalid)?;
        let gone = || vec![unknown("check", &key)];
        let failures = match self.node.registry.find(&key) {
            Some(handle) => {
                let (reply, failures) = oneshot::channel();
                handle.send(Message::Check(reply));
                let mut failures = failures.await.unwrap_or_else(|_| gone());
                failures.extend(self.node.handoffs.missing(&handle.pod.uid));
                failures
            }
            None => gone(),
        };
        let failures = failures.iter().map(Into::into).collect();
        Ok(Response::new(CheckResponse { failures }))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusResponse>, Status> {
        self_test::verdict().map_err(Status::unavailable)?;
        Ok(Response::new(StatusResponse {
            broker_connected: self.node.hub.is_watched(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }))
    }

    async fn hand_over(
        &self,
        request: Request<HandOverRequest>,
    ) -> Result<Response<HandOverResponse>, Status> {
        let connection = request.extensions().get::<Connection>().cloned();
        let descriptors = connection
            .map(|connection| connection.preamble.take_descriptors())
            .unwrap_or_default();
        let handed_over = match request.into_inner().attachment {
            None => hand_over::host(&self.node, descriptors).await,
            key => {
                let key = attachment(key).map_err(invalid)?;
                hand_over::sandbox(&self.node, &key, descriptors).await
            }
        };
        let failed = handed_over.err().as_ref().map(Into::into);
        Ok(Response::new(HandOverResponse { failed }))
    }

    async fn gc(&self, request: Request<GcRequest>) -> Result<Response<GcResponse>, Status> {
        let request = request.into_inner();
        let network = NetworkName::parse(request.network_name).map_err(invalid)?;
        let valid = request
            .valid
            .into_iter()
            .map(|pb| attachment(Some(pb)))
            .collect::<Result<Vec<_>, _>>()
            .map_err(invalid)?;
        let surplus = self.node.registry.surplus(&network, &valid);
        for handle in &surplus {
            handle.send(Message::Remove(Reason::Gc));
        }
        let removed = u32::try_from(surplus.len()).unwrap_or(u32::MAX);
        wait_for_end(surplus.into_iter().map(|handle| handle.ended).collect()).await;
        Ok(Response::new(GcResponse { removed }))
    }
}

//! The broker's end of the executor's socket.

use std::time::Duration;

use sluice_proto::pb::executor::netns_executor_client::NetnsExecutorClient;
use sluice_proto::pb::executor::sandbox_event::Event;
use sluice_proto::pb::executor::{
    CompleteRequest, CompleteResponse, NodeStatusRequest, NodeStatusResponse, ProgramRequest,
    ProgramResponse, Sandbox, SandboxEvent, complete_request,
};
use sluice_proto::pb::types::{self, Mode};
use sluice_proto::transport::grpc::UdsChannel;
use tonic::Streaming;

use super::ambient;

pub(crate) struct Broker {
    pub(crate) client: NetnsExecutorClient<UdsChannel>,
    pub(crate) events: Streaming<SandboxEvent>,
}

impl Broker {
    /// The next event that `wanted` takes; anything else is skipped.
    pub(crate) async fn until<T>(&mut self, mut wanted: impl FnMut(Event) -> Option<T>) -> T {
        let next = async {
            loop {
                let event = self
                    .events
                    .message()
                    .await
                    .unwrap()
                    .expect("watch ended")
                    .event
                    .unwrap();
                if let Some(found) = wanted(event) {
                    return found;
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(5), next)
            .await
            .expect("event did not come")
    }

    pub(crate) async fn pending(&mut self) -> Sandbox {
        self.until(|event| {
            if let Event::Pending(sandbox) = event {
                Some(sandbox)
            } else {
                None
            }
        })
        .await
    }

    pub(crate) async fn gone(&mut self) -> (String, u64) {
        self.until(|event| {
            if let Event::Gone(gone) = event {
                Some((gone.reason, gone.generation))
            } else {
                None
            }
        })
        .await
    }

    pub(crate) async fn snapshot(&mut self) -> Vec<Sandbox> {
        let mut sandboxes = Vec::new();
        self.until(|event| match event {
            Event::Present(sandbox) => {
                sandboxes.push(sandbox);
                None
            }
            Event::SnapshotDone(_) => Some(()),
            _ => None,
        })
        .await;
        sandboxes
    }

    pub(crate) async fn status(&mut self) -> NodeStatusResponse {
        let status = self.client.node_status(NodeStatusRequest {}).await;
        status.unwrap().into_inner()
    }

    pub(crate) async fn program(&mut self, sandbox: &Sandbox, desired: types::Desired) -> ProgramResponse {
        let request = ProgramRequest {
            attachment: sandbox.attachment.clone(),
            generation: sandbox.generation,
            pod_uid: sandbox.pod.as_ref().unwrap().uid.clone(),
            desired: Some(desired),
        };
        self.client.program(request).await.unwrap().into_inner()
    }

    pub(crate) async fn admit(&mut self, sandbox: &Sandbox, mode: Mode) -> CompleteResponse {
        self.complete(sandbox, complete_request::Verdict::Admit(mode.into()))
            .await
    }

    pub(crate) async fn complete(
        &mut self,
        sandbox: &Sandbox,
        verdict: complete_request::Verdict,
    ) -> CompleteResponse {
        let request = CompleteRequest {
            attachment: sandbox.attachment.clone(),
            generation: sandbox.generation,
            verdict: Some(verdict),
        };
        self.client.complete(request).await.unwrap().into_inner()
    }

    /// Takes one ADD through as an ambient broker does.
    pub(crate) async fn enrol(&mut self) -> Sandbox {
        let sandbox = self.pending().await;
        self.program(&sandbox, ambient()).await;
        self.admit(&sandbox, Mode::Ambient).await;
        sandbox
    }
}

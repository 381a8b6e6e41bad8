//! What the executor is asked for: one call each, with a deadline.

use std::collections::BTreeMap;
use std::time::Duration;

use sluice_proto::ambient::Desired;
use sluice_proto::code::ErrorCode;
use sluice_proto::id::{PodRef, PodUid};
use sluice_proto::pb::executor::{
    AdoptRequest, CompleteRequest, Feature, ForeseeRequest, Foreseen, InspectRequest, InspectResponse,
    MissingHandoff, NodeStatusRequest, NodeStatusResponse, PodGoneRequest, PreflightRequest, ProbeAddress,
    ProgramRequest, RetireRequest, SyncHandoffsRequest, SyncProbeSetRequest, adopt_response,
    complete_request, complete_response, program_response,
};
use sluice_proto::pb::types;
use sluice_proto::sandbox::Failure;

use super::{Executor, convert};
use crate::reconcile::COMPONENT;
use crate::reconcile::effect::{ProbeEntry, Verdict};
use crate::reconcile::event::{Refused, Sandbox, SandboxId};

/// One call, unless it says otherwise.
const CALL: Duration = Duration::from_secs(5);
/// Adoption may scan all of `/proc`.
const ADOPT: Duration = Duration::from_secs(15);
/// The end of all sandboxes.
const RETIRE: Duration = Duration::from_secs(6);

impl Executor {
    /// Makes a sandbox's namespace match `desired`; returns the fingerprint of its rules.
    pub async fn program(&self, id: &SandboxId, pod: &PodUid, desired: &Desired) -> Result<String, Refused> {
        let stage = "program rules";
        let mut client = self.client(stage).map_err(Refused::Lost)?;
        let request = ProgramRequest {
            attachment: Some((&id.attachment).into()),
            generation: id.generation,
            pod_uid: pod.to_string(),
            desired: Some(desired.into()),
        };
        let response = call(stage, CALL, client.program(request))
            .await
            .map_err(Refused::Lost)?;
        match response.outcome {
            Some(program_response::Outcome::Programmed(programmed)) => Ok(programmed.fingerprint),
            Some(program_response::Outcome::TooLate(_)) => Err(Refused::TooLate),
            Some(program_response::Outcome::Failed(failure)) => Err(Refused::Failed(failure.into())),
            None => Err(Refused::Failed(malformed(stage))),
        }
    }

    /// Tells what is decided about pods without a sandbox, and which have to be asked about.
    pub async fn foresee(&self, decided: &[(PodUid, Desired)], ask: &[PodUid]) -> Result<(), Failure> {
        let stage = "foresee";
        let session = self.link().session.as_ref().map(|s| (s.id, s.client.clone()));
        let (session, mut client) =
            session.ok_or_else(|| unreachable(stage, "the executor is not connected"))?;
        let pb = |(pod, desired): &(PodUid, Desired)| Foreseen {
            pod_uid: pod.to_string(),
            desired: Some(desired.into()),
        };
        let request = ForeseeRequest {
            session,
            decided: decided.iter().map(pb).collect(),
            ask: ask.iter().map(ToString::to_string).collect(),
        };
        call(stage, CALL, client.foresee(request)).await?;
        Ok(())
    }

    /// Ends a pending ADD.
    pub async fn complete(&self, id: &SandboxId, verdict: &Verdict) -> Result<(), Refused> {
        let stage = "complete";
        let mut client = self.client(stage).map_err(Refused::Lost)?;
        let verdict = match verdict {
            Verdict::Pass => complete_request::Verdict::Admit(types::Mode::None.into()),
            Verdict::Ambient => complete_request::Verdict::Admit(types::Mode::Ambient.into()),
            Verdict::Refuse(failure) => complete_request::Verdict::Refuse(failure.into()),
        };
        let request = CompleteRequest {
            attachment: Some((&id.attachment).into()),
            generation: id.generation,
            verdict: Some(verdict),
        };
        let response = call(stage, CALL, client.complete(request))
            .await
            .map_err(Refused::Lost)?;
        match response.outcome {
            Some(complete_response::Outcome::Accepted(_)) => Ok(()),
            Some(complete_response::Outcome::TooLate(_)) => Err(Refused::TooLate),
            Some(complete_response::Outcome::Failed(failure)) => Err(Refused::Failed(failure.into())),
            None => Err(Refused::Failed(malformed(stage))),
        }
    }

    /// Finds the netns of a running pod.
    pub async fn adopt(&self, pod: &PodRef, addresses: &[std::net::IpAddr]) -> Result<Sandbox, Failure> {
        self.adopt_at(pod, addresses, None).await
    }

    /// As [`Executor::adopt`], from a path that the runtime gave.
    pub async fn adopt_at(
        &self,
        pod: &PodRef,
        addresses: &[std::net::IpAddr],
        netns_path: Option<&str>,
    ) -> Result<Sandbox, Failure> {
        let stage = "adopt";
        let mut client = self.client(stage)?;
        let request = AdoptRequest {
            pod: Some(pod.into()),
            addresses: addresses.iter().map(ToString::to_string).collect(),
            netns_path: netns_path.unwrap_or_default().to_owned(),
        };
        let response = call(stage, ADOPT, client.adopt(request)).await?;
        match response.outcome {
            Some(adopt_response::Outcome::Sandbox(sandbox)) => {
                convert::sandbox(sandbox).map_err(|error| invalid(stage, &error))
            }
            Some(adopt_response::Outcome::Failed(failure)) => Err(failure.into()),
            None => Err(malformed(stage)),
        }
    }

    /// Tells that the pod of a sandbox no longer exists; an error says who still has its namespace.
    pub async fn pod_gone(&self, id: &SandboxId, pod: &PodUid) -> Result<(), String> {
        let stage = "let go";
        let mut client = self.client(stage).map_err(|failure| failure.to_string())?;
        let request = PodGoneRequest {
            attachment: Some((&id.attachment).into()),
            generation: id.generation,
            pod_uid: pod.to_string(),
        };
        let response = call(stage, ADOPT, client.pod_gone(request)).await;
        match response.map_err(|failure| failure.to_string())?.held {
            held if held.is_empty() => Ok(()),
            held => Err(held),
        }
    }

    /// Reads a namespace back.
    pub async fn inspect(&self, id: &SandboxId) -> Result<InspectResponse, Failure> {
        let stage = "inspect";
        let mut client = self.client(stage)?;
        let request = InspectRequest {
            attachment: Some((&id.attachment).into()),
        };
        call(stage, CALL, client.inspect(request)).await
    }

    /// Changes the host's probe set.
    pub async fn sync_probes(
        &self,
        add: &[ProbeEntry],
        remove: &[ProbeEntry],
        prune: bool,
    ) -> Result<(), Failure> {
        let stage = "sync probe set";
        let mut client = self.client(stage)?;
        let pb = |entries: &[ProbeEntry]| {
            let address = |entry: &ProbeEntry| ProbeAddress {
                address: entry.address.to_string(),
                owner_uid: entry.owner.to_string(),
            };
            entries.iter().map(address).collect::<Vec<_>>()
        };
        let request = SyncProbeSetRequest {
            addresses: pb(add),
            prune,
            remove: pb(remove),
        };
        let response = call(stage, CALL, client.sync_probe_set(request)).await?;
        response.failed.map_or(Ok(()), |failure| Err(failure.into()))
    }

    /// Tells which mesh pods no proxy has.
    pub async fn sync_handoffs(&self, missing: &BTreeMap<PodUid, Failure>) -> Result<(), Failure> {
        let stage = "sync handoffs";
        let mut client = self.client(stage)?;
        let missing = missing.iter().map(|(pod, failure)| MissingHandoff {
            pod_uid: pod.to_string(),
            failure: Some(failure.into()),
        });
        let request = SyncHandoffsRequest {
            missing: missing.collect(),
        };
        call(stage, CALL, client.sync_handoffs(request)).await.map(drop)
    }

    /// The agent leaves the node: everything that was programmed goes. Returns how many sandboxes were too slow.
    pub async fn retire(&self) -> Result<u32, Failure> {
        let stage = "retire";
        let mut client = self.client(stage)?;
        let response = call(stage, RETIRE, client.retire(RetireRequest {})).await?;
        match response.failed {
            Some(failure) => Err(failure.into()),
            None => Ok(response.unfinished),
        }
    }

    /// Which kernel features are there.
    pub async fn preflight(&self) -> Result<Vec<Feature>, Failure> {
        let stage = "preflight";
        let mut client = self.client(stage)?;
        let request = PreflightRequest { ipv6: self.ipv6 };
        Ok(call(stage, CALL, client.preflight(request)).await?.features)
    }

    /// Facts about the executor itself.
    pub async fn node_status(&self) -> Result<NodeStatusResponse, Failure> {
        let stage = "node status";
        let mut client = self.client(stage)?;
        call(stage, CALL, client.node_status(NodeStatusRequest {})).await
    }
}

async fn call<T>(
    stage: &str,
    limit: Duration,
    response: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
) -> Result<T, Failure> {
    match tokio::time::timeout(limit, response).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(unreachable(
            stage,
            format!("executor answers {:?}: {}", status.code(), status.message()),
        )),
        Err(_) => Err(unreachable(
            stage,
            format!("no answer from the executor within {limit:?}"),
        )),
    }
}

pub(super) fn unreachable(stage: &str, cause: impl Into<String>) -> Failure {
    Failure::new(ErrorCode::BrokerState, COMPONENT, stage, cause)
}

fn malformed(stage: &str) -> Failure {
    Failure::new(
        ErrorCode::InvalidInput,
        COMPONENT,
        stage,
        "the executor's answer is empty",
    )
}

fn invalid(stage: &str, error: &sluice_proto::sandbox::InvalidMessage) -> Failure {
    Failure::new(ErrorCode::InvalidInput, COMPONENT, stage, error.to_string())
}

//! `NetnsExecutor`: what the broker asks. Everything is checked again here.

use std::fmt::Display;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use sluice_proto::ambient::Desired;
use sluice_proto::code::ErrorCode;
use sluice_proto::id::{NetnsPath, PodUid};
use sluice_proto::opener::OpenerRequest;
use sluice_proto::pb::executor::netns_executor_server::NetnsExecutor;
use sluice_proto::pb::executor::{
    self, AdoptRequest, AdoptResponse, CompleteRequest, CompleteResponse, ForeseeRequest, ForeseeResponse,
    Foreseen, InspectRequest, InspectResponse, MissingHandoff, NodeStatusRequest, NodeStatusResponse,
    PodGoneRequest, PodGoneResponse, PreflightRequest, PreflightResponse, ProbeAddress, ProgramRequest,
    ProgramResponse, RetireRequest, RetireResponse, SyncHandoffsRequest, SyncHandoffsResponse,
    SyncProbeSetRequest, SyncProbeSetResponse, WatchRequest, adopt_response, complete_request,
    complete_response, program_response,
};
use sluice_proto::pb::types::Mode;
use sluice_proto::sandbox::{Failure, InvalidMessage, parse_addresses};
use tokio::sync::oneshot;
use tonic::{Request, Response, Status};

use super::convert::{attachment, invalid, pod, unknown};
use crate::hub::{Broker, Subscription};
use crate::node::Node;
use crate::pool;
use crate::retire;
use crate::rules::{HostOptions, RULE_SCHEMA};
use crate::sandbox::{Completed, Message, Programmed, Verdict, adopt, unused};

/// How long an ADD waits for the host's namespace; the broker waits 5 s for the answer.
const HOST_DEADLINE: Duration = Duration::from_secs(4);

/// How the broker names itself when it watches.
const BROKER: &str = "ambient-broker";

#[derive(Debug)]
pub(super) struct Executor {
    node: Arc<Node>,
}

impl Executor {
    pub(super) fn new(node: Arc<Node>) -> Self {
        Self { node }
    }
}

fn programmed(outcome: Programmed) -> ProgramResponse {
    let outcome = match outcome {
        Programmed::Done { fingerprint, changed } => {
            program_response::Outcome::Programmed(executor::Programmed { fingerprint, changed })
        }
        Programmed::TooLate => program_response::Outcome::TooLate(executor::TooLate {}),
        Programmed::Failed(failure) => program_response::Outcome::Failed((&failure).into()),
    };
    ProgramResponse {
        outcome: Some(outcome),
    }
}

fn completed(outcome: Completed) -> CompleteResponse {
    let outcome = match outcome {
        Completed::Accepted => complete_response::Outcome::Accepted(executor::Accepted {}),
        Completed::TooLate => complete_response::Outcome::TooLate(executor::TooLate {}),
        Completed::Failed(failure) => complete_response::Outcome::Failed((&failure).into()),
    };
    CompleteResponse {
        outcome: Some(outcome),
    }
}

fn verdict(pb: Option<complete_request::Verdict>) -> Result<Verdict, Status> {
    match pb.ok_or(InvalidMessage::Missing("verdict")).map_err(invalid)? {
        complete_request::Verdict::Refuse(failure) => Ok(Verdict::Refuse(failure.into())),
        complete_request::Verdict::Admit(mode) => match Mode::try_from(mode) {
            Ok(mode @ (Mode::None | Mode::Ambient)) => Ok(Verdict::Admit(mode)),
            _ => Err(Status::invalid_argument(format!(
                "admit {mode} is not one of MODE_NONE, MODE_AMBIENT"
            ))),
        },
    }
}

fn foreseen(pb: Foreseen) -> Result<(PodUid, Desired), Status> {
    let pod = PodUid::parse(pb.pod_uid).map_err(invalid)?;
    let desired = pb
        .desired
        .map_or(Ok(Desired::None), Desired::try_from)
        .map_err(invalid)?;
    match desired {
        Desired::None | Desired::Ambient(_) => Ok((pod, desired)),
        // Joining is not for peers to ask for.
        Desired::Joining(_) | Desired::Draining(_) => Err(Status::invalid_argument(format!(
            "pod {pod}: draining cannot be foreseen, none or ambient can"
        ))),
    }
}

fn owned_addresses(pb: Vec<ProbeAddress>) -> Result<Vec<(IpAddr, PodUid)>, Status> {
    let parse = |address: ProbeAddress| {
        let parsed = parse_addresses(&[address.address]).map_err(invalid)?;
        let owner = PodUid::parse(address.owner_uid).map_err(invalid)?;
        Ok(parsed.into_iter().map(move |address| (address, owner.clone())))
    };
    let parsed = pb.into_iter().map(parse).collect::<Result<Vec<_>, Status>>()?;
    Ok(parsed.into_iter().flatten().collect())
}

/// A pod that expects probes from another address than the host gives them would fail every one.
fn mismatch(desired: &Desired, host: &HostOptions) -> Option<Failure> {
    let (Desired::Ambient(pod) | Desired::Joining(pod) | Desired::Draining(pod)) = desired else {
        return None;
    };
    let v6_differs = pod.ipv6 && (!host.ipv6 || pod.probe_ipv6 != host.probe_ipv6);
    if pod.probe_ipv4 == host.probe_ipv4 && !v6_differs {
        return None;
    }
    let words = |ipv6: bool, probe_ipv4: &dyn Display, probe_ipv6: &dyn Display| {
        if ipv6 {
            format!("{probe_ipv4} and {probe_ipv6}")
        } else {
            format!("{probe_ipv4} and no IPv6")
        }
    };
    let cause = format!(
        "broker and executor are set up differently: the pod would expect probes from {}, the host gives them {}",
        words(pod.ipv6, &pod.probe_ipv4, &pod.probe_ipv6),
        words(host.ipv6, &host.probe_ipv4, &host.probe_ipv6),
    );
    Some(Failure::new(
        ErrorCode::InvalidInput,
        pool::COMPONENT,
        "program rules",
        cause,
    ))
}

/// Addresses that no sandbox of their owner has.
fn not_theirs(foreign: &[(IpAddr, PodUid)]) -> Option<Failure> {
    if foreign.is_empty() {
        return None;
    }
    let list: Vec<_> = foreign
        .iter()
        .map(|(address, owner)| format!("{address} of pod uid {owner}"))
        .collect();
    let cause = format!(
        "not taken, since no sandbox of that pod has the address: {}",
        list.join(", ")
    );
    tracing::warn!(target: "audit", cause, "probe addresses refused");
    Some(Failure::new(
        ErrorCode::InvalidInput,
        pool::COMPONENT,
        "host probe set",
        cause,
    ))
}

#[tonic::async_trait]
impl NetnsExecutor for Executor {
    type WatchStream = Subscription;

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Subscription>, Status> {
        let asked = request.into_inner();
        let watcher: String = asked.watcher.chars().take(64).collect();
        // Others may look on, but decide nothing: an ADD must not wait for them.
        let decides = watcher.starts_with(BROKER);
        let broker = Broker {
            session: asked.session,
            own: asked.agent == self.node.settings.agent,
        };
        tracing::info!(watcher, decides, own = broker.own, "watcher connected");
        if decides {
            self.node.configurations.of_broker(&asked.config_hash);
        }
        Ok(Response::new(self.node.hub.subscribe(decides.then_some(broker))))
    }

    async fn foresee(&self, request: Request<ForeseeRequest>) -> Result<Response<ForeseeResponse>, Status> {
        let ForeseeRequest {
            session,
            decided,
            ask,
        } = request.into_inner();
        let ask: Result<Vec<_>, _> = ask.into_iter().map(PodUid::parse).collect();
        let mut decided = decided.into_iter().map(foreseen).collect::<Result<Vec<_>, _>>()?;
        // What could not be programmed is asked about; it is then told why.
        decided.retain(|(_, desired)| mismatch(desired, &self.node.settings.host).is_none());
        self.node
            .registry
            .foresee(&self.node.hub.foresight, session, decided, &ask.map_err(invalid)?)
            .map_err(|error| Status::failed_precondition(error.to_string()))?;
        Ok(Response::new(ForeseeResponse {}))
    }

    async fn program(&self, request: Request<ProgramRequest>) -> Result<Response<ProgramResponse>, Status> {
        let request = request.into_inner();
        let key = attachment(request.attachment).map_err(invalid)?;
        let desired = request
            .desired
            .ok_or(InvalidMessage::Missing("desired"))
            .map_err(invalid)?;
        let desired = Desired::try_from(desired).map_err(invalid)?;
        if let Some(failure) = mismatch(&desired, &self.node.settings.host) {
            return Ok(Response::new(programmed(Programmed::Failed(failure))));
        }
        let handle = self.node.registry.find(&key);
        let Some(handle) = handle.filter(|handle| handle.pod.uid.as_str() == request.pod_uid) else {
            return Ok(Response::new(programmed(Programmed::TooLate)));
        };
        let (reply, outcome) = oneshot::channel();
        handle.send(Message::Program {
            generation: request.generation,
            desired,
            reply,
        });
        Ok(Response::new(programmed(
            outcome.await.unwrap_or(Programmed::TooLate),
        )))
    }

    async fn complete(
        &self,
        request: Request<CompleteRequest>,
    ) -> Result<Response<CompleteResponse>, Status> {
        let request = request.into_inner();
        let key = attachment(request.attachment).map_err(invalid)?;
        let verdict = verdict(request.verdict)?;
        if matches!(verdict, Verdict::Admit(Mode::Ambient)) {
            // Right after a start the opener may still be on its way. Waiting here leaves the sandbox's task free.
            let _ = tokio::time::timeout(HOST_DEADLINE, self.node.probes.host_at_hand()).await;
        }
        let Some(handle) = self.node.registry.find(&key) else {
            return Ok(Response::new(completed(Completed::TooLate)));
        };
        let (reply, outcome) = oneshot::channel();
        handle.send(Message::Complete {
            generation: request.generation,
            verdict,
            reply,
        });
        Ok(Response::new(completed(
            outcome.await.unwrap_or(Completed::TooLate),
        )))
    }

    async fn adopt(&self, request: Request<AdoptRequest>) -> Result<Response<AdoptResponse>, Status> {
        let request = request.into_inner();
        let pod = pod(request.pod).map_err(invalid)?;
        let addresses = parse_addresses(&request.addresses).map_err(invalid)?;
        let path = match request.netns_path.as_str() {
            "" => None,
            path => Some(NetnsPath::parse(path).map_err(invalid)?),
        };
        let node = Arc::clone(&self.node);
        // Detached: a broker that goes away must not leave half a sandbox.
        let adopted = tokio::spawn(async move { adopt::adopt(&node, pod, addresses, path).await }).await;
        let outcome = match adopted.map_err(|error| Status::internal(error.to_string()))? {
            Ok(sandbox) => adopt_response::Outcome::Sandbox(sandbox),
            Err(failure) => adopt_response::Outcome::Failed((&failure).into()),
        };
        Ok(Response::new(AdoptResponse {
            outcome: Some(outcome),
        }))
    }

    async fn pod_gone(&self, request: Request<PodGoneRequest>) -> Result<Response<PodGoneResponse>, Status> {
        let request = request.into_inner();
        let key = attachment(request.attachment).map_err(invalid)?;
        let handle = self.node.registry.find(&key).filter(|handle| {
            handle.pod.uid.as_str() == request.pod_uid && handle.generation == request.generation
        });
        let held = match handle {
            Some(handle) => unused::pod_gone(&self.node, handle, request.generation)
                .await
                .err(),
            None => None,
        };
        Ok(Response::new(PodGoneResponse {
            held: held.unwrap_or_default(),
        }))
    }

    async fn inspect(&self, request: Request<InspectRequest>) -> Result<Response<InspectResponse>, Status> {
        let key = attachment(request.into_inner().attachment).map_err(invalid)?;
        let not_found = || Status::not_found(unknown("inspect", &key).cause);
        let handle = self.node.registry.find(&key).ok_or_else(not_found)?;
        let (reply, response) = oneshot::channel();
        handle.send(Message::Inspect(reply));
        response.await.map(Response::new).map_err(|_| not_found())
    }

    async fn sync_probe_set(
        &self,
        request: Request<SyncProbeSetRequest>,
    ) -> Result<Response<SyncProbeSetResponse>, Status> {
        let request = request.into_inner();
        let (wanted, foreign): (Vec<_>, Vec<_>) = owned_addresses(request.addresses)?
            .into_iter()
            .partition(|(address, owner)| self.node.registry.has_address(owner, *address));
        let unwanted = owned_addresses(request.remove)?;
        let response = match self.node.probes.sync(wanted, unwanted, request.prune).await {
            Ok(synced) => SyncProbeSetResponse {
                added: synced.added,
                removed: synced.removed,
                failed: not_theirs(&foreign).as_ref().map(Into::into),
            },
            Err(failure) => SyncProbeSetResponse {
                failed: Some((&failure).into()),
                ..SyncProbeSetResponse::default()
            },
        };
        Ok(Response::new(response))
    }

    async fn sync_handoffs(
        &self,
        request: Request<SyncHandoffsRequest>,
    ) -> Result<Response<SyncHandoffsResponse>, Status> {
        let parse = |missing: MissingHandoff| {
            let pod = PodUid::parse(missing.pod_uid).map_err(invalid)?;
            let failure = missing.failure.ok_or(InvalidMessage::Missing("failure"));
            Ok((pod, failure.map_err(invalid)?.into()))
        };
        let missing = request.into_inner().missing.into_iter().map(parse);
        self.node
            .handoffs
            .replace(missing.collect::<Result<_, Status>>()?);
        Ok(Response::new(SyncHandoffsResponse {}))
    }

    async fn retire(&self, _: Request<RetireRequest>) -> Result<Response<RetireResponse>, Status> {
        // A task of its own: what was begun is finished whatever becomes of the caller.
        let node = Arc::clone(&self.node);
        let (unfinished, outcome) = tokio::spawn(async move { retire::retire(&node).await })
            .await
            .map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(RetireResponse {
            unfinished,
            failed: outcome.err().as_ref().map(Into::into),
        }))
    }

    async fn preflight(
        &self,
        request: Request<PreflightRequest>,
    ) -> Result<Response<PreflightResponse>, Status> {
        let ipv6 = request.into_inner().ipv6;
        let scratch = self.node.opener.open(&OpenerRequest::Scratch, None).await;
        let descriptors = match scratch {
            Ok(descriptors) => Some(descriptors),
            Err(error) => {
                tracing::info!(%error, "preflight runs in the executor's own namespace");
                None
            }
        };
        let kernel = Arc::clone(&self.node.kernel);
        let features = pool::run("preflight", move || kernel.preflight(descriptors, ipv6)).await;
        let features = features.map_err(|failure: Failure| Status::unavailable(failure.to_string()))?;
        Ok(Response::new(PreflightResponse { features }))
    }

    async fn node_status(
        &self,
        _: Request<NodeStatusRequest>,
    ) -> Result<Response<NodeStatusResponse>, Status> {
        let probes = self.node.probes.status().await.unwrap_or_else(|failure| {
            tracing::warn!(error = %failure, code = %ErrorCode::HostUnreachable, "host status not read");
            crate::probe_set::ProbeStatus::default()
        });
        let (foreseen, passing) = self.node.hub.foresight.counts();
        let count = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        let limit = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE);
        let mut status = NodeStatusResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            sandboxes: count(self.node.hub.sandboxes()),
            open_descriptors: count(sluice_runtime::limits::open_files().unwrap_or_default()),
            descriptor_limit: limit.map_or(0, |(soft, _)| u32::try_from(soft).unwrap_or(u32::MAX)),
            opener_connected: self.node.opener.is_connected(),
            host_reachable: probes.reachable,
            host_differences: probes.differences,
            probe_set: probes.addresses,
            broker_connected: self.node.hub.is_watched(),
            configuration_mismatch: self.node.configurations.mismatch(),
            rule_schema: RULE_SCHEMA,
            other_rules: self.node.hub.with_other_rules(),
            foreseen_passing: count(passing),
            foreseen_programmed: count(foreseen - passing),
            ..NodeStatusResponse::default()
        };
        self.node.metrics.report(&mut status);
        Ok(Response::new(status))
    }
}

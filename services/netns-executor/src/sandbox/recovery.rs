//! Reaching sandboxes whose namespace is not at hand: after a restart, or because it does not exist yet.
//!
//! First by the recorded path, where only the same cookie counts; then by a scan of the host's processes, where a
//! candidate must hold one of the pod's addresses and belong to no other sandbox.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use sluice_proto::code::ErrorCode;
use sluice_proto::id::{Attachment, PodUid};
use sluice_proto::opener::OpenerRequest;
use sluice_proto::sandbox::{Failure, parse_addresses};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::registry::Handle;
use super::{Message, restore};
use crate::kernel::Opened;
use crate::node::Node;
use crate::opener_client::OpenerError;
use crate::pool::{self, COMPONENT};

const STAGE: &str = "find namespace";
/// A pod has a handful of processes in namespaces of their own at most.
const MAX_CANDIDATES: u32 = 16;

/// After a reboot pods come back within this time, and must not wait for the next look: until then each round scans.
const EAGER: Duration = Duration::from_mins(2);
/// The opener dials within milliseconds. Until it has, nothing is found, and each sandbox would be told to be broken.
const OPENER_DIALS: Duration = Duration::from_millis(250);
/// So long the namespaces that one round finds may wait until they are examined.
const UNEXAMINED: Duration = Duration::from_millis(250);
/// A look at every process of the host costs it some milliseconds: later it is taken ever more rarely.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Looks for every unreachable sandbox, again and again.
pub async fn run(node: Arc<Node>) {
    let mut connections = node.opener.connections();
    let mut interval = tokio::time::interval(node.settings.recovery);
    let mut pace = Pace::default();
    if !node.opener.is_connected() {
        // Whether it came or not is seen at the first question.
        let _ = tokio::time::timeout(OPENER_DIALS, connections.changed()).await;
    }
    loop {
        tokio::select! {
            _ = interval.tick() => {}
            _ = connections.changed() => pace = Pace::default(),
        }
        restore::honour_tombstones(&node);
        recover_all(&node, &mut pace).await;
    }
}

/// When the next scan may be made.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    lost: Vec<Attachment>,
    /// Since when nobody was added to `lost`.
    since: Option<Instant>,
    next: Option<Instant>,
    pause: Duration,
}

impl Pace {
    /// Somebody new to look for is looked for at once.
    fn may_scan(&mut self, lost: Vec<Attachment>, now: Instant) -> bool {
        if lost.iter().any(|attachment| !self.lost.contains(attachment)) {
            *self = Self {
                since: Some(now),
                ..Self::default()
            };
        }
        self.lost = lost;
        self.next.is_none_or(|next| now >= next)
    }

    fn scanned(&mut self, first: Duration, now: Instant) {
        if self.since.is_some_and(|since| now < since + EAGER) {
            return;
        }
        self.pause = (self.pause * 2).clamp(first, LONGEST_PAUSE.max(first));
        self.next = Some(now + self.pause);
    }
}

/// One round's scan, made when first needed.
#[derive(Debug)]
pub(crate) struct Scan {
    allowed: bool,
    outcome: Option<Result<(), Failure>>,
}

impl Default for Scan {
    fn default() -> Self {
        Self {
            allowed: true,
            outcome: None,
        }
    }
}

/// A sandbox that was not reached.
#[derive(Debug)]
pub(crate) struct Lost {
    pub(crate) failure: Failure,
    /// Its path leads nowhere and no process of the pod was found.
    vanished: bool,
    /// This round did not look everywhere.
    postponed: bool,
}

impl From<Failure> for Lost {
    fn from(failure: Failure) -> Self {
        Self {
            failure,
            vanished: false,
            postponed: false,
        }
    }
}

/// One round.
pub(crate) async fn recover_all(node: &Arc<Node>, pace: &mut Pace) {
    let lost: Vec<_> = {
        let inner = node.registry.lock();
        let lost = inner.sandboxes.values().filter(|h| !h.reachable() && !h.ending);
        lost.cloned().collect()
    };
    let mut scan = Scan {
        allowed: pace.may_scan(
            lost.iter().map(|handle| handle.attachment.clone()).collect(),
            Instant::now(),
        ),
        outcome: None,
    };
    // After a restart the broker waits for all, and nothing has changed in most of them.
    let (began, mut found) = (Instant::now(), Vec::new());
    for handle in lost {
        match recover(node, &handle, &mut scan).await {
            Ok(()) => found.push(handle),
            Err(lost) if lost.postponed => {}
            Err(Lost {
                failure, vanished, ..
            }) => {
                handle.send(Message::NotFound { failure, vanished });
            }
        }
        if began.elapsed() > UNEXAMINED {
            examine(&mut found);
        }
    }
    examine(&mut found);
    if scan.outcome.is_some() {
        pace.scanned(node.settings.recovery, Instant::now());
    }
}

fn examine(found: &mut Vec<Handle>) {
    for handle in found.drain(..) {
        handle.send(Message::Examine);
    }
}

/// Reaches one sandbox. Its task must then examine it.
pub(super) async fn recover(node: &Arc<Node>, handle: &Handle, scan: &mut Scan) -> Result<(), Lost> {
    let view = node.hub.view(&handle.attachment).unwrap_or_default();
    let mut by_path = None;
    let mut vanished = true;
    if !view.netns_path.is_empty() {
        match open(node, &OpenerRequest::Path(view.netns_path)).await {
            // Another namespace at the path: the sandbox's own is not there any more.
            Ok(opened) => match give(node, handle, opened, false).await {
                Ok(()) => return Ok(()),
                Err(failure) => by_path = Some(failure),
            },
            Err(OpenError::Opener(error @ OpenerError::NotConnected)) => {
                return Err(error.failure(STAGE).into());
            }
            Err(error) => {
                vanished = matches!(&error, OpenError::Opener(error) if error.is_not_found());
                by_path = Some(error.failure());
            }
        }
    }
    if scan.outcome.is_none() && scan.allowed {
        scan.outcome = Some(ask_scan(node).await);
    }
    if let Some(Err(failure)) = &scan.outcome {
        return Err(failure.clone().into());
    }
    let postponed = scan.outcome.is_none();
    let addresses = parse_addresses(&view.addresses).unwrap_or_default();
    for index in 0..if postponed { 0 } else { MAX_CANDIDATES } {
        let Some(opened) = candidate(node, &handle.pod.uid, index).await? else {
            break;
        };
        vanished = false;
        let same = opened.identity.is_same_netns(&handle.netns);
        let (opened, found) = interface_with(opened, addresses.clone()).await?;
        if (same || found.is_some()) && give(node, handle, opened, !same).await.is_ok() {
            return Ok(());
        }
    }
    let because = by_path.map_or_else(String::new, |failure| format!("; by its path: {}", failure.cause));
    let cause = format!(
        "netns-not-found: no process of pod {} (uid {}) lives in a namespace with one of its addresses{because}",
        handle.pod, handle.pod.uid
    );
    Err(Lost {
        failure: Failure::new(ErrorCode::SandboxGone, COMPONENT, STAGE, cause),
        vanished,
        postponed,
    })
}

/// Gives a namespace to its sandbox's task, which then examines it, unless it belongs to another one.
pub(crate) async fn offer(
    node: &Arc<Node>,
    handle: &Handle,
    opened: Opened,
    found_by_address: bool,
) -> Result<(), Failure> {
    give(node, handle, opened, found_by_address).await?;
    handle.send(Message::Examine);
    Ok(())
}

async fn give(
    node: &Arc<Node>,
    handle: &Handle,
    opened: Opened,
    found_by_address: bool,
) -> Result<(), Failure> {
    let refused = |cause: &str| Failure::new(ErrorCode::SandboxGone, COMPONENT, STAGE, cause);
    if let Some(owner) = other_owner(node, handle, &opened) {
        node.reaper.close(opened);
        return Err(refused(&format!(
            "the namespace found belongs to sandbox {owner}"
        )));
    }
    let (reply, outcome) = oneshot::channel();
    handle.send(Message::Attach {
        opened,
        found_by_address,
        reply,
    });
    outcome
        .await
        .unwrap_or_else(|_| Err(refused("the sandbox has ended meanwhile")))
}

fn other_owner(node: &Node, handle: &Handle, opened: &Opened) -> Option<String> {
    let inner = node.registry.lock();
    let owner = inner.owner_of(&opened.identity)?;
    (owner.attachment != handle.attachment).then(|| owner.attachment.to_string())
}

/// Why a namespace could not be had.
#[derive(Debug)]
pub(crate) enum OpenError {
    Opener(OpenerError),
    Refused(Failure),
}

impl OpenError {
    pub(crate) fn failure(&self) -> Failure {
        match self {
            Self::Opener(error) => error.failure(STAGE),
            Self::Refused(failure) => failure.clone(),
        }
    }
}

/// Asks the opener for a namespace and checks what comes.
pub(crate) async fn open(node: &Arc<Node>, request: &OpenerRequest) -> Result<Opened, OpenError> {
    let descriptors = node.opener.open(request, None).await.map_err(OpenError::Opener)?;
    node.kernel.open(descriptors).map_err(|refusal| {
        node.metrics.refused_descriptor(refusal.reason());
        tracing::warn!(target: "audit", error = %refusal, ?request, "descriptors of the opener refused");
        OpenError::Refused(refusal.failure(STAGE))
    })
}

pub(crate) async fn ask_scan(node: &Node) -> Result<(), Failure> {
    node.opener.scan(STAGE).await
}

/// The next candidate that may be looked at; None: there are no more.
pub(super) async fn candidate(node: &Arc<Node>, uid: &PodUid, index: u32) -> Result<Option<Opened>, Failure> {
    let request = OpenerRequest::Candidate {
        uid: uid.clone(),
        index,
    };
    match open(node, &request).await {
        Ok(opened) => Ok(Some(opened)),
        Err(OpenError::Opener(error)) if error.is_not_found() => Ok(None),
        Err(error) => Err(error.failure()),
    }
}

/// Which of a pod's addresses a namespace holds.
#[derive(Debug)]
pub(super) struct Found {
    /// The interface of the first.
    pub(super) interface: String,
    /// All that are on some interface, in the order they were asked for.
    pub(super) addresses: Vec<IpAddr>,
}

/// Looks which of `addresses` the namespace holds; None: not one.
pub(super) async fn interface_with(
    mut opened: Opened,
    addresses: Vec<IpAddr>,
) -> Result<(Opened, Option<Found>), Failure> {
    pool::run(STAGE, move || {
        let held = opened.netns.addresses()?;
        let interface = held.iter().find(|(_, address)| addresses.contains(address));
        let found = interface.map(|(interface, _)| Found {
            interface: interface.clone(),
            addresses: addresses
                .iter()
                .copied()
                .filter(|address| held.iter().any(|(_, there)| there == address))
                .collect(),
        });
        Ok((opened, found))
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::tests::record;

    const ROUND: Duration = Duration::from_secs(2);

    /// At which seconds a scan is made in so many rounds, which go on where `clock` stands.
    fn scans(pace: &mut Pace, clock: &mut Instant, lost: &[&str], rounds: u32) -> Vec<u64> {
        let began = *clock;
        let mut scans = Vec::new();
        for _ in 0..rounds {
            if pace.may_scan(lost.iter().map(|id| record(id).attachment).collect(), *clock) {
                scans.push((*clock - began).as_secs());
                pace.scanned(ROUND, *clock);
            }
            *clock += ROUND;
        }
        scans
    }

    #[test]
    fn each_round_looks_for_two_minutes_and_then_ever_more_rarely() {
        let (mut pace, mut clock) = (Pace::default(), Instant::now());
        let eager = scans(&mut pace, &mut clock, &["one"], 60);
        assert_eq!(eager, (0..60).map(|round| round * 2).collect::<Vec<_>>());
        let later = scans(&mut pace, &mut clock, &["one"], 60);
        assert_eq!(later, [0, 2, 6, 14, 30, 60, 90]);
        // Somebody new is looked for as eagerly.
        let again = scans(&mut pace, &mut clock, &["one", "two"], 10);
        assert_eq!(again.len(), 10);
        // That one was found is no reason to look more often for the other.
        let fewer = scans(&mut pace, &mut clock, &["two"], 100);
        assert!(fewer.len() < 60, "{fewer:?}");
    }
}

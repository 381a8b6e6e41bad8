//! The beginning of an ADD: which sandbox it is about, and which others it ends.

use std::net::IpAddr;
use std::sync::Arc;

use sluice_proto::code::ErrorCode;
use sluice_proto::id::{Attachment, NetnsPath, PodRef};
use sluice_proto::pb::types::Mode;
use sluice_proto::sandbox::Failure;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::registry::{Handle, Inner};
use super::task::{Predecessor, Task};
use super::{Answer, Inbox, Message, Reason, Sender, Slot, Waiter};
use crate::descriptors::DescriptorRefusal;
use crate::kernel::Opened;
use crate::node::{Node, unix_ms};
use crate::pool::{self, COMPONENT};
use crate::rules::RULE_SCHEMA;
use crate::table::{FORMAT, Record};

const STAGE: &str = "check sandbox";

/// What the runtime asked for, checked.
#[derive(Debug)]
pub struct Request {
    /// The key.
    pub attachment: Attachment,
    /// The pod.
    pub pod: PodRef,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Where the runtime mounted the namespace.
    pub netns_path: NetnsPath,
    /// The namespace.
    pub opened: Opened,
    /// When the connection was accepted.
    pub accepted: Instant,
    /// When the call came.
    pub called: Instant,
}

/// An ADD that waits for its answer. Dropping it withdraws the ADD.
#[derive(Debug)]
pub struct Waiting {
    answer: oneshot::Receiver<Answer>,
    withdraw: Option<(Sender, u64)>,
}

/// How an ADD goes on.
#[derive(Debug)]
pub enum Begun {
    /// It needs nobody's decision.
    Answered(Answer),
    /// Its sandbox's task will answer.
    Waiting(Waiting),
}

impl Waiting {
    /// The answer.
    pub async fn answer(mut self) -> Answer {
        let answer = (&mut self.answer).await;
        self.withdraw = None;
        answer.unwrap_or_else(|_| {
            let cause = "the sandbox was removed meanwhile";
            Answer::Refused(Failure::new(ErrorCode::TooLate, COMPONENT, STAGE, cause))
        })
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some((sender, id)) = self.withdraw.take() {
            // A task that has ended has nothing to withdraw.
            let _ = sender.send(Box::new(Message::Left(id)));
        }
    }
}

/// Completes an ADD of which nobody said the pod's addresses, because the plugin is no part of the chain that gave them: its
/// interface has them.
pub async fn with_addresses(mut request: Request) -> Result<Request, Failure> {
    if !request.addresses.is_empty() {
        return Ok(request);
    }
    pool::run(STAGE, move || {
        let ifname = &request.attachment.ifname;
        let netns = &mut request.opened.netns;
        let held = netns.addresses()?.into_iter();
        let own = held.filter(|(name, address)| name == ifname.as_str() && !is_link_local(address));
        request.addresses = own.map(|(_, address)| address).collect();
        if request.addresses.is_empty() && !netns.has_interface(ifname)? {
            let cause =
                format!("the namespace has no interface {ifname} yet: the primary network comes first");
            return Err(Failure::new(ErrorCode::SandboxGone, COMPONENT, STAGE, cause));
        }
        Ok(request)
    })
    .await
}

/// Every interface has one of its own, and nobody is reached by it from elsewhere.
fn is_link_local(address: &IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
}

/// Begins an ADD: joins a running one, or makes a sandbox and ends those it replaces.
pub fn begin(node: &Arc<Node>, request: Request) -> Result<Begun, Failure> {
    let mut inner = node.registry.lock();
    inner.refuse_when_retired(STAGE)?;
    if inner.deleted_since(&request.attachment, request.accepted) {
        let cause = "the runtime deleted this attachment while the ADD was on its way";
        return Err(Failure::new(ErrorCode::TooLate, COMPONENT, STAGE, cause));
    }
    let mut replaced = Vec::new();
    match place_of(&inner, &request) {
        Place::Join(handle) => return Ok(join(&mut inner, &handle, request)),
        Place::OtherInterface(first) => {
            tracing::info!(attachment = %request.attachment, %first, "further interface of a sandbox passes unchanged");
            return Ok(Begun::Answered(Answer::Admitted(Mode::None)));
        }
        Place::New(ends) => replaced.extend(ends),
        Place::Claimed(owner) => {
            let refusal = DescriptorRefusal::Claimed {
                inode: request.opened.identity.inode,
                owner,
            };
            node.metrics.refused_descriptor(refusal.reason());
            return Err(refusal.failure(STAGE));
        }
    }
    let created = create(node, &mut inner, request, &replaced);
    // The task looks itself up in the registry.
    drop(inner);
    Ok(Begun::Waiting(created.start()))
}

enum Place {
    Join(Handle),
    OtherInterface(Attachment),
    New(Vec<Handle>),
    Claimed(String),
}

fn place_of(inner: &Inner, request: &Request) -> Place {
    let Request {
        attachment,
        pod,
        opened,
        ..
    } = request;
    let mut ends = Vec::new();
    for handle in inner
        .sandboxes
        .related(&attachment.container_id, &pod.uid, &opened.identity)
    {
        let same_netns = handle.netns.is_same_netns(&opened.identity);
        let same_sandbox = handle.is_for(&attachment.container_id);
        let same_pod = handle.pod.uid == pod.uid;
        if same_sandbox && same_pod && !handle.ending {
            // The runtime may run the plugin twice, from two lists or for two interfaces.
            if handle.attachment.ifname != attachment.ifname {
                return Place::OtherInterface(handle.attachment.clone());
            }
            if same_netns {
                return Place::Join(handle.clone());
            }
        }
        if same_netns && !same_pod && !same_sandbox && !handle.ending {
            return Place::Claimed(handle.attachment.to_string());
        }
        // Retries of a sandbox come with the same pod in another namespace: only the newest counts.
        if same_netns || same_pod || handle.attachment == *attachment {
            ends.push(handle.clone());
        }
    }
    Place::New(ends)
}

fn waiter(inner: &mut Inner, sender: &Sender) -> (Waiter, Waiting) {
    let id = inner.next_waiter();
    let (answer, receiver) = oneshot::channel();
    let waiting = Waiting {
        answer: receiver,
        withdraw: Some((sender.clone(), id)),
    };
    (Waiter { id, answer }, waiting)
}

fn join(inner: &mut Inner, handle: &Handle, request: Request) -> Begun {
    let (waiter, waiting) = waiter(inner, &handle.sender);
    handle.send(Message::Join {
        waiter,
        addresses: request.addresses,
        opened: request.opened,
    });
    Begun::Waiting(waiting)
}

/// A sandbox that is in the registry and whose task does not run yet.
struct Created {
    task: Task,
    opened: Opened,
    predecessors: Vec<Predecessor>,
    waiting: Waiting,
}

impl Created {
    fn start(mut self) -> Waiting {
        self.task.attach(self.opened);
        // Nobody of ours has been in it.
        self.task.verified = self.predecessors.is_empty();
        tokio::spawn(self.task.run(self.predecessors));
        self.waiting
    }
}

fn create(node: &Arc<Node>, inner: &mut Inner, request: Request, replaced: &[Handle]) -> Created {
    for handle in replaced {
        tracing::info!(attachment = %handle.attachment, by = %request.attachment, "sandbox is replaced");
        handle.send(Message::Remove(Reason::Replaced));
    }
    let record = Record {
        format: FORMAT,
        attachment: request.attachment,
        generation: inner.next_generation(),
        pod: request.pod,
        addresses: request.addresses,
        netns: request.opened.identity.clone(),
        netns_path: request.netns_path.as_str().to_owned(),
        added_unix_ms: unix_ms(),
        programmed: None,
        rule_schema: RULE_SCHEMA,
        admitted: false,
        pending: true,
        adopted: false,
    };
    let (sender, inbox) = mpsc::unbounded_channel();
    let (waiter, waiting) = waiter(inner, &sender);
    // Used up in any case; it counts only for a namespace in which nobody of ours has been.
    let ahead = node.hub.foresight.take(&record.pod.uid);
    let mut task = register(node, inner, record, sender, inbox);
    task.start_add(waiter, request.accepted, request.called);
    task.ahead = ahead.filter(|_| replaced.is_empty());
    Created {
        task,
        opened: request.opened,
        predecessors: replaced.iter().map(Predecessor::from).collect(),
        waiting,
    }
}

/// Makes a sandbox known; its task must then be run.
pub(super) fn register(
    node: &Arc<Node>,
    inner: &mut Inner,
    record: Record,
    sender: Sender,
    inbox: Inbox,
) -> Task {
    node.hub.foresight.take(&record.pod.uid);
    let slot = Arc::<Slot>::default();
    let ended = CancellationToken::new();
    inner.raise_generation(record.generation);
    inner.sandboxes.insert(Handle {
        attachment: record.attachment.clone(),
        generation: record.generation,
        pod: record.pod.clone(),
        addresses: record.addresses.clone(),
        added_unix_ms: record.added_unix_ms,
        netns: record.netns.clone(),
        descriptor: None,
        ending: false,
        sender,
        slot: Arc::clone(&slot),
        ended: ended.clone(),
    });
    Task::new(Arc::clone(node), record, slot, inbox, ended)
}

//! Validated conversions of sandboxes, attachments, pods and failures.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::code::ErrorCode;
use crate::id::{
    Attachment, ContainerId, InterfaceName, InvalidId, Namespace, NetworkName, PodName, PodRef, PodUid,
};
use crate::pb::types;

/// A message from a peer lacks something or holds something that is not allowed.
#[derive(Debug, thiserror::Error)]
pub enum InvalidMessage {
    /// A field that must be set is not.
    #[error("field {0} is missing")]
    Missing(&'static str),
    /// A value is not of the required form.
    #[error(transparent)]
    Id(#[from] InvalidId),
    /// Not an IP address.
    #[error("address {0:?} is not an IP address")]
    Address(String),
    /// More addresses than an interface can have here.
    #[error("{0} addresses; at most 32 are allowed")]
    TooManyAddresses(usize),
}

impl TryFrom<types::Attachment> for Attachment {
    type Error = InvalidMessage;

    fn try_from(pb: types::Attachment) -> Result<Self, InvalidMessage> {
        Ok(Self {
            network_name: NetworkName::parse(pb.network_name)?,
            container_id: ContainerId::parse(pb.container_id)?,
            ifname: InterfaceName::parse(pb.ifname)?,
        })
    }
}

impl From<&Attachment> for types::Attachment {
    fn from(attachment: &Attachment) -> Self {
        Self {
            network_name: attachment.network_name.to_string(),
            container_id: attachment.container_id.to_string(),
            ifname: attachment.ifname.to_string(),
        }
    }
}

impl TryFrom<types::PodRef> for PodRef {
    type Error = InvalidMessage;

    fn try_from(pb: types::PodRef) -> Result<Self, InvalidMessage> {
        Ok(Self {
            namespace: Namespace::parse(pb.namespace)?,
            name: PodName::parse(pb.name)?,
            uid: PodUid::parse(pb.uid)?,
        })
    }
}

impl From<&PodRef> for types::PodRef {
    fn from(pod: &PodRef) -> Self {
        Self {
            namespace: pod.namespace.to_string(),
            name: pod.name.to_string(),
            uid: pod.uid.to_string(),
        }
    }
}

/// Parses the addresses of an interface; IPv4-mapped IPv6 addresses become IPv4.
pub fn parse_addresses(texts: &[String]) -> Result<Vec<IpAddr>, InvalidMessage> {
    if texts.len() > 32 {
        return Err(InvalidMessage::TooManyAddresses(texts.len()));
    }
    texts
        .iter()
        .map(|text| {
            text.parse::<IpAddr>()
                .map(|address| address.to_canonical())
                .map_err(|_| InvalidMessage::Address(text.chars().take(64).collect()))
        })
        .collect()
}

/// Identity of a network namespace.
///
/// Invariant: two identities name the same namespace exactly if boot id and cookie are equal. Device and inode
/// are re-used at once by the kernel and only compare descriptors that are open at the same time.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NetnsIdentity {
    /// `SO_NETNS_COOKIE` (socket(7), Linux 5.14).
    pub cookie: u64,
    /// Device of the nsfs inode.
    pub device: u64,
    /// Inode number on nsfs.
    pub inode: u64,
    /// `/proc/sys/kernel/random/boot_id` when it was read.
    pub boot_id: String,
}

impl NetnsIdentity {
    /// Whether both name the same namespace.
    pub fn is_same_netns(&self, other: &Self) -> bool {
        self.cookie == other.cookie && self.boot_id == other.boot_id
    }
}

impl From<&NetnsIdentity> for types::NetnsIdentity {
    fn from(id: &NetnsIdentity) -> Self {
        Self {
            cookie: id.cookie,
            device: id.device,
            inode: id.inode,
            boot_id: id.boot_id.clone(),
        }
    }
}

impl From<types::NetnsIdentity> for NetnsIdentity {
    fn from(pb: types::NetnsIdentity) -> Self {
        Self {
            cookie: pb.cookie,
            device: pb.device,
            inode: pb.inode,
            boot_id: pb.boot_id,
        }
    }
}

/// A failure a human can act on; the text form goes into the CNI error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{component}: {stage}: {cause} ({code})")]
pub struct Failure {
    /// Stable code, with a documented fix.
    pub code: ErrorCode,
    /// Which process failed.
    pub component: String,
    /// What it was doing.
    pub stage: String,
    /// Why it failed.
    pub cause: String,
}

impl Failure {
    /// A failure of `component` while doing `stage`.
    pub fn new(code: ErrorCode, component: &str, stage: &str, cause: impl Into<String>) -> Self {
        Self {
            code,
            component: component.to_owned(),
            stage: stage.to_owned(),
            cause: cause.into(),
        }
    }
}

impl From<&Failure> for types::Failure {
    fn from(failure: &Failure) -> Self {
        Self {
            code: failure.code.as_str().to_owned(),
            component: failure.component.clone(),
            stage: failure.stage.clone(),
            cause: failure.cause.clone(),
        }
    }
}

impl From<types::Failure> for Failure {
    fn from(pb: types::Failure) -> Self {
        Self {
            code: ErrorCode::parse(&pb.code),
            component: pb.component,
            stage: pb.stage,
            cause: pb.cause,
        }
    }
}

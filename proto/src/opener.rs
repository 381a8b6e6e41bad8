//! What executor and opener say to each other: fixed-size requests and replies on a `SOCK_SEQPACKET` socket,
//! descriptors beside them. The opener parses nothing of variable structure.
//!
//! The executor asks, the opener answers in order, one at a time.

use crate::id::PodUid;
use crate::transport::descriptors::TransportError;

/// Longest argument in bytes: a path or a pod UID.
pub const ARGUMENT_LEN: usize = 256;
const HEADER_LEN: usize = 16;
/// Length of every request in bytes.
pub const REQUEST_LEN: usize = HEADER_LEN + ARGUMENT_LEN;
/// Length of every reply in bytes.
pub const REPLY_LEN: usize = 32;
const MAGIC: u32 = u32::from_le_bytes(*b"SLO1");

/// What the executor wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpenerRequest {
    /// Sockets in the host's network namespace.
    Host,
    /// Sockets in the namespace whose descriptor comes with the request.
    Descriptor,
    /// Sockets in the namespace mounted at this host path; only below the netns directories the opener was
    /// started with, or `/proc/PID/ns/net`.
    Path(String),
    /// Look once at every process of the host and remember which namespaces each pod's processes live in.
    Scan,
    /// Sockets in the `index`-th namespace (oldest process first) that the last scan found for a pod.
    Candidate {
        /// The pod.
        uid: PodUid,
        /// 0-based.
        index: u32,
    },
    /// Sockets in a new, empty namespace, for preflight. Its `lo` is down: the opener may change no network.
    Scratch,
    /// One `NETLINK_SOCK_DIAG` socket, which lists sockets, in the namespace whose descriptor comes with the request;
    /// EPERM for the host's.
    Diagnostics,
}

/// Which descriptors come with a reply, in this order: netns, netfilter, route, then these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LegacyTables {
    /// The namespace has legacy IPv4 tables: a plain AF_INET datagram socket comes along.
    pub ipv4: bool,
    /// The namespace has legacy IPv6 tables: a plain AF_INET6 datagram socket comes along.
    pub ipv6: bool,
}

/// The opener's answer. `errno` 0 means success: three to five descriptors come along (none for
/// [`OpenerRequest::Scan`], one for [`OpenerRequest::Diagnostics`]). ENOENT: no such path, candidate or pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenerReply {
    /// 0, or the error number (errno.h) of the step that failed.
    pub errno: i32,
    /// Which of the optional descriptors came.
    pub legacy: LegacyTables,
    /// Processes looked at ([`OpenerRequest::Scan`]).
    pub scanned: u32,
}

impl OpenerRequest {
    fn kind(&self) -> (u32, u32, &str) {
        match self {
            Self::Host => (1, 0, ""),
            Self::Descriptor => (2, 0, ""),
            Self::Path(path) => (3, 0, path),
            Self::Scan => (4, 0, ""),
            Self::Candidate { uid, index } => (5, *index, uid.as_str()),
            Self::Scratch => (6, 0, ""),
            Self::Diagnostics => (7, 0, ""),
        }
    }

    /// The request as bytes; an argument that is too long is refused.
    pub fn encode(&self) -> Result<[u8; REQUEST_LEN], TransportError> {
        let (kind, index, argument) = self.kind();
        if argument.len() >= ARGUMENT_LEN {
            return Err(TransportError::TooLong {
                limit: ARGUMENT_LEN - 1,
            });
        }
        let mut bytes = [0; REQUEST_LEN];
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&kind.to_le_bytes());
        bytes[8..12].copy_from_slice(&index.to_le_bytes());
        bytes[HEADER_LEN..HEADER_LEN + argument.len()].copy_from_slice(argument.as_bytes());
        Ok(bytes)
    }

    /// Reads a request; everything that is not exactly one is refused.
    pub fn decode(bytes: &[u8]) -> Result<Self, TransportError> {
        let malformed = |what: &str| TransportError::Malformed(format!("opener request: {what}"));
        if bytes.len() != REQUEST_LEN || word(bytes, 0) != MAGIC {
            return Err(malformed("wrong length or magic"));
        }
        let argument = bytes[HEADER_LEN..]
            .split(|byte| *byte == 0)
            .next()
            .unwrap_or_default();
        let argument = std::str::from_utf8(argument).map_err(|_| malformed("argument is not UTF-8"))?;
        match word(bytes, 4) {
            1 => Ok(Self::Host),
            2 => Ok(Self::Descriptor),
            3 => Ok(Self::Path(argument.to_owned())),
            4 => Ok(Self::Scan),
            5 => Ok(Self::Candidate {
                uid: PodUid::parse(argument).map_err(|e| malformed(&e.to_string()))?,
                index: word(bytes, 8),
            }),
            6 => Ok(Self::Scratch),
            7 => Ok(Self::Diagnostics),
            other => Err(malformed(&format!("kind {other} is not known"))),
        }
    }
}

impl OpenerReply {
    /// The reply as bytes.
    pub fn encode(&self) -> [u8; REPLY_LEN] {
        let mut bytes = [0; REPLY_LEN];
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.errno.to_le_bytes());
        bytes[8] = u8::from(self.legacy.ipv4);
        bytes[9] = u8::from(self.legacy.ipv6);
        bytes[12..16].copy_from_slice(&self.scanned.to_le_bytes());
        bytes
    }

    /// Reads a reply.
    pub fn decode(bytes: &[u8]) -> Result<Self, TransportError> {
        if bytes.len() != REPLY_LEN || word(bytes, 0) != MAGIC {
            return Err(TransportError::Malformed(
                "opener reply: wrong length or magic".into(),
            ));
        }
        Ok(Self {
            errno: word(bytes, 4).cast_signed(),
            legacy: LegacyTables {
                ipv4: bytes[8] != 0,
                ipv6: bytes[9] != 0,
            },
            scanned: word(bytes, 12),
        })
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_request_survives_the_wire() {
        for request in [
            OpenerRequest::Host,
            OpenerRequest::Descriptor,
            OpenerRequest::Path("/run/netns/cni-1".into()),
            OpenerRequest::Scan,
            OpenerRequest::Candidate {
                uid: PodUid::parse("abc-1").unwrap(),
                index: 3,
            },
            OpenerRequest::Scratch,
            OpenerRequest::Diagnostics,
        ] {
            assert_eq!(
                OpenerRequest::decode(&request.encode().unwrap()).unwrap(),
                request
            );
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = OpenerRequest::decode(&bytes);
            let _ = OpenerReply::decode(&bytes);
        }
    }
}

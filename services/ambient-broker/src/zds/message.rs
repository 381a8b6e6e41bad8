//! The bytes of ZDS: one protobuf message a packet, at most 1,024 bytes.

use prost::Message;
use sluice_proto::id::PodUid;
use sluice_proto::pb::zds::workload_request::Payload;
use sluice_proto::pb::zds::{
    AddWorkload, DelWorkload, SnapshotSent, Version, WorkloadInfo as PbInfo, WorkloadRequest,
    WorkloadResponse, ZdsHello, workload_response,
};

use crate::reconcile::effect::WorkloadInfo;

/// A packet that is not what the protocol says.
#[derive(Debug, thiserror::Error)]
pub enum InvalidPacket {
    /// Not a protobuf message of the kind expected.
    #[error("packet cannot be decoded")]
    Decode(#[from] prost::DecodeError),
    /// A response without a payload.
    #[error("response without an ack")]
    NoAck,
}

/// `Add`; the netns descriptor goes along in the same packet.
pub(super) fn add(uid: &PodUid, info: &WorkloadInfo) -> Vec<u8> {
    request(Payload::Add(AddWorkload {
        uid: uid.to_string(),
        workload_info: Some(PbInfo {
            name: info.name.clone(),
            namespace: info.namespace.clone(),
            service_account: info.service_account.clone(),
        }),
    }))
}

/// `Del`.
pub(super) fn del(uid: &PodUid) -> Vec<u8> {
    request(Payload::Del(DelWorkload { uid: uid.to_string() }))
}

/// `SnapshotSent`.
pub(super) fn snapshot_sent() -> Vec<u8> {
    request(Payload::SnapshotSent(SnapshotSent {}))
}

fn request(payload: Payload) -> Vec<u8> {
    WorkloadRequest {
        payload: Some(payload),
    }
    .encode_to_vec()
}

/// The version of a hello; anything but 1 is not spoken here.
pub(super) fn parse_hello(bytes: &[u8]) -> Result<i32, InvalidPacket> {
    Ok(ZdsHello::decode(bytes)?.version)
}

/// The version spoken here.
pub(super) const VERSION: i32 = Version::V1 as i32;

/// An answer: `Ok(None)` is success, `Ok(Some(text))` a refusal.
pub(super) fn parse_ack(bytes: &[u8]) -> Result<Option<String>, InvalidPacket> {
    match WorkloadResponse::decode(bytes)?.payload {
        Some(workload_response::Payload::Ack(ack)) => Ok(Some(ack.error).filter(|error| !error.is_empty())),
        None => Err(InvalidPacket::NoAck),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn uid(text: &str) -> PodUid {
        PodUid::parse(text).unwrap()
    }

    #[test]
    fn bytes_are_those_of_istio() {
        let info = WorkloadInfo {
            name: "n".into(),
            namespace: "s".into(),
            service_account: "a".into(),
        };
        let expected = [
            0x0a, 0x0e, 0x0a, 0x01, 0x75, 0x12, 0x09, 0x0a, 0x01, 0x6e, 0x12, 0x01, 0x73, 0x1a, 0x01, 0x61,
        ];
        assert_eq!(add(&uid("u"), &info), expected);
        assert_eq!(
            del(&uid("u")),
            [0x12, 0x03, 0x12, 0x01, 0x75],
            "uid is field 2 of DelWorkload"
        );
        assert_eq!(snapshot_sent(), [0x1a, 0x00]);
        assert_eq!(parse_hello(&[0x08, 0x01]).unwrap(), VERSION);
        assert_eq!(parse_ack(&[0x0a, 0x00]).unwrap(), None);
        let nack = [0x0a, 0x06, 0x0a, 0x04, 0x62, 0x6f, 0x6f, 0x6d];
        assert_eq!(parse_ack(&nack).unwrap().as_deref(), Some("boom"));
    }

    #[test]
    fn the_longest_names_fit_one_packet() {
        let info = WorkloadInfo {
            name: "n".repeat(253),
            namespace: "s".repeat(63),
            service_account: "a".repeat(253),
        };
        assert!(add(&uid(&"u".repeat(64)), &info).len() <= 1024);
    }

    proptest! {
        #[test]
        fn arbitrary_packets_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..1024)) {
            let _ = parse_hello(&bytes);
            let _ = parse_ack(&bytes);
        }
    }
}

//! What the kernel says about a request: done, refused and why, or nothing yet (`struct nlmsgerr`, linux/netlink.h).

use std::io;

use super::bytes::{Attributes, HEADER, Message, u32_ne};
use super::error::NetlinkError;

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const FLAG_CAPPED: u16 = 0x100;
const FLAG_EXT_ACK: u16 = 0x200;
const NLMSGERR_ATTR_MSG: u16 = 1;

/// The kernel's verdict on one message.
#[derive(Debug)]
pub struct Refusal {
    /// Sequence number of the message.
    pub sequence: u32,
    /// Error number, positive.
    pub errno: i32,
    /// The kernel's text, if it gave one.
    pub text: String,
}

impl Refusal {
    /// As an error about `request`.
    pub fn into_error(self, request: impl Into<String>) -> NetlinkError {
        let detail = if self.text.is_empty() {
            String::new()
        } else {
            format!(" ({})", self.text)
        };
        NetlinkError::Refused {
            request: request.into(),
            detail,
            source: io::Error::from_raw_os_error(self.errno),
        }
    }
}

/// What a message says about a request: done or refused, or nothing because it carries data.
pub(super) fn verdict(message: &Message<'_>) -> Option<Result<(), Refusal>> {
    if message.ty != NLMSG_ERROR && message.ty != NLMSG_DONE {
        return None;
    }
    let code = u32_ne(message.payload, 0).map_or(0, u32::cast_signed);
    if code == 0 {
        return Some(Ok(()));
    }
    let mut text = String::new();
    if message.flags & FLAG_EXT_ACK != 0 {
        // struct nlmsgerr: error, the request's header, and its payload unless capped.
        let request = u32_ne(message.payload, 4).unwrap_or(0) as usize;
        let skip = match (message.ty, message.flags & FLAG_CAPPED != 0) {
            (NLMSG_DONE, _) => 4,
            (_, true) => 4 + HEADER,
            (_, false) => 4 + request.next_multiple_of(4),
        };
        let attributes = Attributes(message.payload.get(skip..).unwrap_or_default());
        text.push_str(attributes.string(NLMSGERR_ATTR_MSG).unwrap_or_default());
    }
    Some(Err(Refusal {
        sequence: message.sequence,
        errno: code.saturating_neg(),
        text,
    }))
}

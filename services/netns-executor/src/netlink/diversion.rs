//! Whether policy routing works, as the kernel itself would use it (`linux/rtnetlink.h`).

use super::bytes::{Message, Writer};
use super::error::NetlinkError;
use super::route::{FIXED, GETROUTE, family_number, is_our_route};
use super::socket::{REQUEST, RouteSocket};
use crate::rules::{Family, MARK_LOCAL_REPLY, MARK_MASK};

const RTA_DST: u16 = 1;
const RTA_MARK: u16 = 16;
const RTM_F_LOOKUP_TABLE: u32 = 0x1000;
const RTM_F_FIB_MATCH: u32 = 0x2000;

/// Whether a reply of the proxy is routed by our rule and our route, in each of these families: the kernel is asked how it
/// would route a packet with their mark (`RTM_GETROUTE` with `RTM_F_FIB_MATCH`), which costs a fifth of reading all rules
/// and routes.
///
/// "Yes" can be wrong only where somebody has put something in their place that acts alike for this one packet; "no"
/// also where a family is switched off, or the pod itself owns the address asked for.
pub(super) fn works(socket: &RouteSocket, families: &[Family]) -> Result<bool, NetlinkError> {
    let build = |first: u32| {
        let mut writer = Writer::new();
        for (sequence, &family) in (first..).zip(families) {
            lookup(&mut writer, sequence, family);
        }
        writer.into_bytes()
    };
    let ours = |message: &Message<'_>| Some(families.iter().any(|&family| is_our_route(message, family)));
    for answer in socket.ask_all("the route of marked packets", families.len(), build, ours)? {
        match answer {
            Ok(true) => {}
            // No route, or no such family.
            Ok(false) | Err(NetlinkError::Refused { .. }) => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

fn lookup(writer: &mut Writer, sequence: u32, family: Family) {
    // Addresses for documentation (RFC 5737, RFC 3849) are nobody's.
    let (destination, flags): (&[u8], u32) = match family {
        Family::V4 => (&[192, 0, 2, 1], RTM_F_FIB_MATCH | RTM_F_LOOKUP_TABLE),
        // IPv6 tells the table always, and refuses to be asked for it.
        Family::V6 => (
            &[0x20, 0x01, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
            RTM_F_FIB_MATCH,
        ),
    };
    let mut header = [0; FIXED];
    header[0] = family_number(family);
    header[1] = u8::try_from(destination.len() * 8).unwrap_or_default();
    header[8..].copy_from_slice(&flags.to_ne_bytes());
    writer.message(GETROUTE, REQUEST, sequence, &header, |w| {
        w.attribute(RTA_DST, destination);
        // With the bits that our rule does not look at, which one with a wider mask would miss.
        w.ne32(RTA_MARK, MARK_LOCAL_REPLY | !MARK_MASK);
    });
}

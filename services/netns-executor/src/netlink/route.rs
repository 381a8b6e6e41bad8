//! Policy routing in a pod: one rule and one route per IP family (`linux/fib_rules.h`, `linux/rtnetlink.h`).

use super::bytes::{AF_INET, AF_INET6, Message, Writer, u32_ne};
use super::error::NetlinkError;
use super::socket::{ACK, CREATE, DUMP, EXCLUSIVE, REPLACE, REQUEST, RouteSocket};
use super::verdict::Refusal;
use crate::rules::{Family, MARK_LOCAL_REPLY, MARK_MASK, PolicyRouting};

const NEWROUTE: u16 = 24;
const DELROUTE: u16 = 25;
pub(super) const GETROUTE: u16 = 26;
const NEWRULE: u16 = 32;
const DELRULE: u16 = 33;
const GETRULE: u16 = 34;

/// Length of `struct rtmsg` and of `struct fib_rule_hdr`.
pub(super) const FIXED: usize = 12;
/// lo is the first interface of every namespace (`LOOPBACK_IFINDEX`).
const LOOPBACK_INDEX: u32 = 1;
const ACTION_TO_TABLE: u8 = 1;
const TYPE_LOCAL: u8 = 2;
const PROTOCOL_BOOT: u8 = 3;
const SCOPE_HOST: u8 = 254;
const GETLINK: u16 = 18;
/// Length of `struct ifinfomsg`.
const LINK_FIXED: usize = 16;
const IFLA_AF_SPEC: u16 = 26;
const IFLA_INET6_CONF: u16 = 2;
const DEVCONF_DISABLE_IPV6: usize = 26;
const FRA_PRIORITY: u16 = 6;
const FRA_FWMARK: u16 = 10;
const FRA_TABLE: u16 = 15;
const FRA_FWMASK: u16 = 16;
/// Selectors that narrow a rule: destination, source, interfaces, tunnel, uid range, protocol, ports, DS field.
const FRA_NARROWING: [u16; 11] = [1, 2, 3, 12, 13, 17, 19, 20, 22, 23, 24];
const RTA_OIF: u16 = 4;
const RTA_TABLE: u16 = 15;

/// One of the objects we keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Object {
    /// The rule that sends marked packets to our table.
    Rule(Family),
    /// The route that makes everything in our table local.
    Route(Family),
}

impl Object {
    /// In the words of `ip`.
    pub fn words(self) -> String {
        match self {
            Self::Rule(family) => format!("ip rule {}", PolicyRouting::rule_words(family)),
            Self::Route(family) => format!("ip route {}", PolicyRouting::route_words(family)),
        }
    }
}

/// Wanted objects that are not there.
#[derive(Debug, Clone, Default)]
pub struct Lacking {
    /// What can be added.
    pub objects: Vec<Object>,
    /// The IPv6 route is not among them, because lo has IPv6 switched off or the kernel has none.
    pub without_ipv6: bool,
}

/// What adding objects did.
#[derive(Debug, Clone, Default)]
pub struct Added {
    /// Objects that were not there before.
    pub added: Vec<Object>,
    /// The kernel refused IPv6 objects because IPv6 is switched off.
    pub without_ipv6: bool,
}

/// Which of the wanted objects are missing.
pub fn missing(socket: &RouteSocket, families: &[Family]) -> Result<Lacking, NetlinkError> {
    let present = existing(socket, families)?;
    let objects = of_families(families)
        .into_iter()
        .filter(|object| !present.contains(object))
        .collect();
    let mut lacking = Lacking {
        objects,
        without_ipv6: false,
    };
    if lacking.objects.contains(&Object::Route(Family::V6)) && !loopback_has_ipv6(socket)? {
        lacking
            .objects
            .retain(|object| *object != Object::Route(Family::V6));
        lacking.without_ipv6 = true;
    }
    Ok(lacking)
}

/// Which of our objects of these families are there.
pub fn existing(socket: &RouteSocket, families: &[Family]) -> Result<Vec<Object>, NetlinkError> {
    let mut present = Vec::new();
    for &family in families {
        if rule_exists(socket, family)? {
            present.push(Object::Rule(family));
        }
        if route_exists(socket, family)? {
            present.push(Object::Route(family));
        }
    }
    Ok(present)
}

/// Adds objects in one datagram. Existing ones, and IPv6 ones where IPv6 is switched off, are no error.
pub fn add(socket: &RouteSocket, objects: &[Object]) -> Result<Added, NetlinkError> {
    let mut result = Added {
        added: objects.to_vec(),
        without_ipv6: false,
    };
    let mut occupied = Vec::new();
    for (object, refusal) in send(socket, objects, CREATE | EXCLUSIVE)? {
        result.added.retain(|added| *added != object);
        match (object, refusal.errno) {
            (_, libc::EEXIST) => occupied.push(object),
            _ if lacks_ipv6(object, refusal.errno) => result.without_ipv6 = true,
            _ => {
                let _ = remove(socket, &result.added);
                return Err(refusal.into_error(object.words()));
            }
        }
    }
    for object in occupied {
        let (ours, flags) = match object {
            // The kernel takes one that is narrowed to some packets for the same (rule_exists, net/core/fib_rules.c).
            Object::Rule(family) => (rule_exists(socket, family)?, CREATE),
            // A default route of somebody else in our table is replaced.
            Object::Route(family) => (route_exists(socket, family)?, CREATE | REPLACE),
        };
        if ours {
            continue;
        }
        if let Some((_, refusal)) = send(socket, &[object], flags)?.into_iter().next() {
            return Err(refusal.into_error(object.words()));
        }
        result.added.push(object);
    }
    Ok(result)
}

/// Removes objects in one datagram; whether any of them was there. Missing ones are no error.
pub fn remove(socket: &RouteSocket, objects: &[Object]) -> Result<bool, NetlinkError> {
    let refusals = send(socket, objects, 0)?;
    let removed = refusals.len() < objects.len();
    for (object, refusal) in refusals {
        let gone = matches!(
            refusal.errno,
            libc::ENOENT | libc::ESRCH | libc::ENODEV | libc::ENETDOWN
        );
        if !gone && !lacks_ipv6(object, refusal.errno) {
            return Err(refusal.into_error(format!("removal of {}", object.words())));
        }
    }
    Ok(removed)
}

/// The objects of these families.
pub fn of_families(families: &[Family]) -> Vec<Object> {
    families
        .iter()
        .flat_map(|family| [Object::Rule(*family), Object::Route(*family)])
        .collect()
}

/// All objects of both families.
pub fn all() -> Vec<Object> {
    of_families(&[Family::V4, Family::V6])
}

/// Whether an error means that IPv6 is off: on the device (EACCES, EINVAL before Linux 5.9), or in the kernel.
fn lacks_ipv6(object: Object, errno: i32) -> bool {
    match object {
        Object::Route(Family::V6) => {
            matches!(
                errno,
                libc::EACCES | libc::EINVAL | libc::EAFNOSUPPORT | libc::EOPNOTSUPP
            )
        }
        Object::Rule(Family::V6) => matches!(errno, libc::EAFNOSUPPORT | libc::EOPNOTSUPP),
        _ => false,
    }
}

/// Sends one message per object, creating with `flags` or deleting without; returns refusals.
fn send(
    socket: &RouteSocket,
    objects: &[Object],
    flags: u16,
) -> Result<Vec<(Object, Refusal)>, NetlinkError> {
    if objects.is_empty() {
        return Ok(Vec::new());
    }
    let mut writer = Writer::new();
    let mut last = 0;
    for object in objects {
        last += 1;
        let create = flags != 0;
        match object {
            Object::Rule(family) => {
                let ty = if create { NEWRULE } else { DELRULE };
                let header = rule_header(*family);
                writer.message(ty, REQUEST | ACK | flags, last, &header, |w| {
                    w.ne32(FRA_PRIORITY, PolicyRouting::PRIORITY);
                    w.ne32(FRA_FWMARK, MARK_LOCAL_REPLY);
                    w.ne32(FRA_FWMASK, MARK_MASK);
                    w.ne32(FRA_TABLE, PolicyRouting::TABLE);
                });
            }
            Object::Route(family) => {
                let ty = if create { NEWROUTE } else { DELROUTE };
                let header = route_header(*family);
                writer.message(ty, REQUEST | ACK | flags, last, &header, |w| {
                    w.ne32(RTA_TABLE, PolicyRouting::TABLE);
                    w.ne32(RTA_OIF, LOOPBACK_INDEX);
                });
            }
        }
    }
    let refusals = socket.transact(&writer.into_bytes(), last)?;
    Ok(refusals
        .into_iter()
        .filter_map(|refusal| {
            let index = (refusal.sequence as usize).checked_sub(1)?;
            Some((*objects.get(index)?, refusal))
        })
        .collect())
}

fn rule_exists(socket: &RouteSocket, family: Family) -> Result<bool, NetlinkError> {
    let mut header = [0; FIXED];
    header[0] = family_number(family);
    let found = socket.query(
        "the routing rules",
        |sequence| dump(GETRULE, sequence, &header, |_| {}),
        || false,
        |found, message| {
            let attributes = message.attributes(FIXED);
            let as_ours = message.ty == NEWRULE
                && message.payload.get(..FIXED).is_some_and(|header| {
                    header[0] == family_number(family)
                        && header[1..4] == [0; 3]
                        && header[7] == ACTION_TO_TABLE
                        && header[8..12] == [0; 4]
                })
                && attributes.ne32(FRA_PRIORITY) == Some(PolicyRouting::PRIORITY)
                && attributes.ne32(FRA_FWMARK) == Some(MARK_LOCAL_REPLY)
                && attributes.ne32(FRA_FWMASK) == Some(MARK_MASK)
                && attributes.ne32(FRA_TABLE) == Some(PolicyRouting::TABLE)
                && !attributes.into_iter().any(|(ty, _)| FRA_NARROWING.contains(&ty));
            *found |= as_ours;
        },
    );
    absent_family(found)
}

fn route_exists(socket: &RouteSocket, family: Family) -> Result<bool, NetlinkError> {
    let mut header = [0; FIXED];
    header[0] = family_number(family);
    let found = socket.query(
        "the routes of our table",
        |sequence| {
            dump(GETROUTE, sequence, &header, |w| {
                w.ne32(RTA_TABLE, PolicyRouting::TABLE);
            })
        },
        || false,
        |found, message| *found |= is_our_route(message, family),
    );
    absent_family(found)
}

/// Whether a message is about our route of this family.
pub(super) fn is_our_route(message: &Message<'_>, family: Family) -> bool {
    let attributes = message.attributes(FIXED);
    message.ty == NEWROUTE
        && message.payload.get(..FIXED).is_some_and(|header| {
            header[0] == family_number(family) && header[1] == 0 && header[7] == TYPE_LOCAL
        })
        && attributes.ne32(RTA_TABLE) == Some(PolicyRouting::TABLE)
        && attributes.ne32(RTA_OIF) == Some(LOOPBACK_INDEX)
}

/// Whether lo has IPv6: `net.ipv6.conf.lo.disable_ipv6` of the socket's namespace, as `RTM_GETLINK` tells it.
///
/// An array of 32-bit values in `IFLA_AF_SPEC`, `AF_INET6`, `IFLA_INET6_CONF` (`linux/ipv6.h`, `DEVCONF_*`).
fn loopback_has_ipv6(socket: &RouteSocket) -> Result<bool, NetlinkError> {
    let mut header = [0; LINK_FIXED];
    header[4..8].copy_from_slice(&LOOPBACK_INDEX.to_ne_bytes());
    socket.ask(
        "the loopback interface",
        |sequence| {
            let mut writer = Writer::new();
            writer.message(GETLINK, REQUEST, sequence, &header, |_| {});
            writer.into_bytes()
        },
        |message| {
            let values = message
                .attributes(LINK_FIXED)
                .nested(IFLA_AF_SPEC)
                .nested(u16::from(AF_INET6));
            let values = values.find(IFLA_INET6_CONF).unwrap_or_default();
            Some(u32_ne(values, DEVCONF_DISABLE_IPV6 * 4) == Some(0))
        },
    )
}

/// No such table, or no such family in this kernel: then nothing of it exists.
fn absent_family(found: Result<bool, NetlinkError>) -> Result<bool, NetlinkError> {
    match found {
        Err(error)
            if matches!(
                error.errno(),
                Some(libc::ENOENT | libc::EAFNOSUPPORT | libc::EOPNOTSUPP)
            ) =>
        {
            Ok(false)
        }
        other => other,
    }
}

fn dump(ty: u16, sequence: u32, header: &[u8; FIXED], body: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let mut writer = Writer::new();
    writer.message(ty, REQUEST | DUMP, sequence, header, body);
    writer.into_bytes()
}

fn rule_header(family: Family) -> [u8; FIXED] {
    let mut header = [0; FIXED];
    header[0] = family_number(family);
    header[7] = ACTION_TO_TABLE;
    header
}

fn route_header(family: Family) -> [u8; FIXED] {
    let mut header = [0; FIXED];
    header[0] = family_number(family);
    // Table ids above 255 do not fit here, ours does; the attribute says it again.
    header[4] = 100;
    header[5] = PROTOCOL_BOOT;
    header[6] = SCOPE_HOST;
    header[7] = TYPE_LOCAL;
    header
}

pub(super) fn family_number(family: Family) -> u8 {
    match family {
        Family::V4 => AF_INET,
        Family::V6 => AF_INET6,
    }
}

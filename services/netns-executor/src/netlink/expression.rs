//! Rules as nf_tables expressions (`linux/netfilter/nf_tables.h`).
//!
//! The expressions, their order and registers are those `nft` itself generates, so that every version of it lists them.
//! Marks are in host byte order, ports and addresses in network order, attribute integers big-endian.

use std::net::IpAddr;

use super::bytes::Writer;
use crate::rules::{Action, Family, Is, MARK_MASK, Match, Protocol, Rule};

const LIST_ELEM: u16 = 1;
const EXPR_NAME: u16 = 1;
const EXPR_DATA: u16 = 2;
const DATA_VALUE: u16 = 1;
const DATA_VERDICT: u16 = 2;
const VERDICT_CODE: u16 = 1;
const REGISTER: u32 = 1;
const VERDICT_REGISTER: u32 = 0;
const INTERFACE_NAME: usize = 16;

const META_MARK: u32 = 3;
const META_IIFNAME: u32 = 6;
const META_OIFNAME: u32 = 7;
const META_SKUID: u32 = 10;
const META_NFPROTO: u32 = 15;
const META_L4PROTO: u32 = 16;
const CT_MARK: u32 = 3;
const CT_ZONE: u32 = 17;
const CMP_EQUAL: u32 = 0;
const CMP_NOT: u32 = 1;
const CMP_AT_LEAST: u32 = 5;
/// Flags of a TCP header (RFC 9293, section 3.1).
const TCP_FLAGS_OFFSET: u32 = 13;
const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const ACK: u8 = 0x10;
const NETWORK_HEADER: u32 = 1;
const TRANSPORT_HEADER: u32 = 2;
/// `NF_NAT_RANGE_PROTO_SPECIFIED`.
const PORT_GIVEN: u32 = 2;

/// The content of `NFTA_RULE_EXPRESSIONS`.
pub(super) fn encode(rule: &Rule) -> Vec<u8> {
    let mut list = List {
        writer: Writer::new(),
        family: None,
        protocol: None,
    };
    for condition in &rule.matches {
        list.condition(condition);
    }
    if rule.counter {
        list.expression("counter", |_| {});
    }
    list.action(&rule.action);
    list.writer.into_bytes()
}

/// Expressions so far, and what they already established about the packet.
struct List {
    writer: Writer,
    family: Option<Family>,
    protocol: Option<Protocol>,
}

impl List {
    fn condition(&mut self, condition: &Match) {
        match condition {
            Match::Family(family) => self.require_family(*family),
            Match::Protocol(protocol) => self.require_protocol(*protocol),
            Match::Source(is, address) => self.address(*is, *address, 12, 8),
            Match::Destination(is, address) => self.address(*is, *address, 16, 24),
            Match::DestinationIn(family, set) => {
                self.require_family(*family);
                match family {
                    Family::V4 => self.payload(NETWORK_HEADER, 16, 4),
                    Family::V6 => self.payload(NETWORK_HEADER, 24, 16),
                }
                self.expression("lookup", |w| {
                    w.string(1, set);
                    w.be32(2, REGISTER);
                });
            }
            Match::SourcePort(protocol, is, port) => self.port(*protocol, *is, *port, 0),
            Match::DestinationPort(protocol, is, port) => self.port(*protocol, *is, *port, 2),
            Match::InInterface(is, name) => self.interface(META_IIFNAME, *is, name.as_str()),
            Match::OutLoopback(is) => self.interface(META_OIFNAME, *is, "lo"),
            Match::Mark(is, value) => {
                self.meta(META_MARK);
                self.bitwise(MARK_MASK, 0);
                self.compare(operator(*is), &value.to_ne_bytes());
            }
            Match::CtMark(is, value) => {
                self.ct(CT_MARK);
                self.bitwise(MARK_MASK, 0);
                self.compare(operator(*is), &value.to_ne_bytes());
            }
            Match::OpensTcp(is) => {
                self.require_protocol(Protocol::Tcp);
                self.payload(TRANSPORT_HEADER, TCP_FLAGS_OFFSET, 1);
                self.mask(1, &[FIN | SYN | RST | ACK], &[0]);
                self.compare(operator(*is), &[SYN]);
            }
            Match::LocalSocket => {
                self.meta(META_SKUID);
                // nft compares orders of host-order values in network order and lists nothing else.
                self.expression("byteorder", |w| {
                    w.be32(1, REGISTER);
                    w.be32(2, REGISTER);
                    w.be32(3, 1);
                    w.be32(4, 4);
                    w.be32(5, 4);
                });
                self.compare(CMP_AT_LEAST, &[0; 4]);
            }
        }
    }

    fn action(&mut self, action: &Action) {
        match action {
            Action::Redirect(port) => {
                self.immediate(&port.to_be_bytes());
                self.expression("redir", |w| {
                    w.be32(1, REGISTER);
                    w.be32(3, PORT_GIVEN);
                });
            }
            Action::SnatTo(address) => {
                let family = match address {
                    IpAddr::V4(v4) => {
                        self.immediate(&v4.octets());
                        libc::AF_INET
                    }
                    IpAddr::V6(v6) => {
                        self.immediate(&v6.octets());
                        libc::AF_INET6
                    }
                };
                self.expression("nat", |w| {
                    w.be32(1, 0); // NFT_NAT_SNAT
                    w.be32(2, family.cast_unsigned());
                    w.be32(3, REGISTER);
                });
            }
            Action::SetCtMark(value) => {
                self.ct(CT_MARK);
                self.bitwise(!MARK_MASK, *value);
                self.set_ct(CT_MARK);
            }
            Action::RestoreMark => {
                self.ct(CT_MARK);
                self.expression("meta", |w| {
                    w.be32(2, META_MARK);
                    w.be32(3, REGISTER);
                });
            }
            Action::SetZone(zone) => {
                self.immediate(&zone.to_ne_bytes());
                self.set_ct(CT_ZONE);
            }
            Action::Accept => self.expression("immediate", |w| {
                w.be32(1, VERDICT_REGISTER);
                w.nest(2, |w| w.nest(DATA_VERDICT, |w| w.be32(VERDICT_CODE, 1)));
            }),
        }
    }

    fn expression(&mut self, name: &str, data: impl FnOnce(&mut Writer)) {
        self.writer.nest(LIST_ELEM, |w| {
            w.string(EXPR_NAME, name);
            w.nest(EXPR_DATA, data);
        });
    }

    fn require_family(&mut self, family: Family) {
        if self.family.replace(family) != Some(family) {
            let number: u8 = match family {
                Family::V4 => 2,
                Family::V6 => 10,
            };
            self.meta(META_NFPROTO);
            self.compare(CMP_EQUAL, &[number]);
        }
    }

    fn require_protocol(&mut self, protocol: Protocol) {
        if self.protocol.replace(protocol) != Some(protocol) {
            self.meta(META_L4PROTO);
            self.compare(CMP_EQUAL, &[protocol.number()]);
        }
    }

    fn address(&mut self, is: Is, address: IpAddr, offset_v4: u32, offset_v6: u32) {
        self.require_family(Family::of(address));
        match address {
            IpAddr::V4(v4) => {
                self.payload(NETWORK_HEADER, offset_v4, 4);
                self.compare(operator(is), &v4.octets());
            }
            IpAddr::V6(v6) => {
                self.payload(NETWORK_HEADER, offset_v6, 16);
                self.compare(operator(is), &v6.octets());
            }
        }
    }

    fn port(&mut self, protocol: Protocol, is: Is, port: u16, offset: u32) {
        self.require_protocol(protocol);
        self.payload(TRANSPORT_HEADER, offset, 2);
        self.compare(operator(is), &port.to_be_bytes());
    }

    fn interface(&mut self, key: u32, is: Is, name: &str) {
        let mut padded = [0; INTERFACE_NAME];
        for (to, from) in padded.iter_mut().zip(name.bytes()) {
            *to = from;
        }
        self.meta(key);
        self.compare(operator(is), &padded);
    }

    fn meta(&mut self, key: u32) {
        self.expression("meta", |w| {
            w.be32(2, key);
            w.be32(1, REGISTER);
        });
    }

    fn ct(&mut self, key: u32) {
        self.expression("ct", |w| {
            w.be32(1, REGISTER);
            w.be32(2, key);
        });
    }

    fn set_ct(&mut self, key: u32) {
        self.expression("ct", |w| {
            w.be32(4, REGISTER);
            w.be32(2, key);
        });
    }

    fn payload(&mut self, base: u32, offset: u32, length: u32) {
        self.expression("payload", |w| {
            w.be32(1, REGISTER);
            w.be32(2, base);
            w.be32(3, offset);
            w.be32(4, length);
        });
    }

    fn compare(&mut self, operator: u32, value: &[u8]) {
        self.expression("cmp", |w| {
            w.be32(1, REGISTER);
            w.be32(2, operator);
            w.nest(3, |w| w.attribute(DATA_VALUE, value));
        });
    }

    /// register = (register & mask) ^ xor
    fn bitwise(&mut self, mask: u32, xor: u32) {
        self.mask(4, &mask.to_ne_bytes(), &xor.to_ne_bytes());
    }

    /// The same for a value of `length` bytes.
    fn mask(&mut self, length: u32, mask: &[u8], xor: &[u8]) {
        self.expression("bitwise", |w| {
            w.be32(1, REGISTER);
            w.be32(2, REGISTER);
            w.be32(3, length);
            w.nest(4, |w| w.attribute(DATA_VALUE, mask));
            w.nest(5, |w| w.attribute(DATA_VALUE, xor));
        });
    }

    fn immediate(&mut self, value: &[u8]) {
        self.expression("immediate", |w| {
            w.be32(1, REGISTER);
            w.nest(2, |w| w.attribute(DATA_VALUE, value));
        });
    }
}

fn operator(is: Is) -> u32 {
    match is {
        Is::Equal => CMP_EQUAL,
        Is::Not => CMP_NOT,
    }
}

//! Just enough rtnetlink to wire pods: synchronous, one request and its answer at a time. A socket stays in the
//! netns it was opened in, whichever thread uses it.

use std::io;
use std::net::IpAddr;
use std::os::fd::AsRawFd;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::address::{
    AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage, AddressScope,
};
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use nix::sys::socket::{AddressFamily as Af, MsgFlags, SockFlag, SockProtocol, SockType};

use crate::netns::Netns;

/// A route socket in one netns.
#[derive(Debug)]
pub struct RouteSocket(std::os::fd::OwnedFd);

/// One end of a veth pair that is to be made.
#[derive(Debug, Clone)]
pub struct VethEnd<'a> {
    /// Interface name.
    pub name: &'a str,
    /// MAC address.
    pub mac: [u8; 6],
}

impl RouteSocket {
    /// Opens a socket in the calling thread's netns.
    pub fn open() -> io::Result<Self> {
        let socket = nix::sys::socket::socket(
            Af::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkRoute,
        )?;
        Ok(Self(socket))
    }

    fn request(&self, message: RouteNetlinkMessage, flags: u16) -> io::Result<Option<RouteNetlinkMessage>> {
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        let mut packet = NetlinkMessage::new(header, NetlinkPayload::from(message));
        packet.finalize();
        let mut bytes = vec![0; packet.buffer_len()];
        packet.serialize(&mut bytes);
        nix::sys::socket::send(self.0.as_raw_fd(), &bytes, MsgFlags::empty())?;
        let mut buffer = vec![0; 16 * 1024];
        let len = nix::sys::socket::recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        let reply =
            NetlinkMessage::<RouteNetlinkMessage>::deserialize(&buffer[..len]).map_err(io::Error::other)?;
        match reply.payload {
            NetlinkPayload::Error(error) => match error.code {
                None => Ok(None),
                Some(code) => Err(io::Error::from_raw_os_error(-code.get())),
            },
            NetlinkPayload::InnerMessage(message) => Ok(Some(message)),
            _ => Ok(None),
        }
    }

    fn create(&self, message: RouteNetlinkMessage) -> io::Result<()> {
        self.request(message, NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL)
            .map(drop)
    }

    /// Index of an interface; `NotFound` (ENODEV) if there is none.
    pub fn index_of(&self, name: &str) -> io::Result<u32> {
        let mut link = LinkMessage::default();
        link.attributes.push(LinkAttribute::IfName(name.to_owned()));
        match self.request(RouteNetlinkMessage::GetLink(link), 0)? {
            Some(RouteNetlinkMessage::NewLink(link)) => Ok(link.header.index),
            _ => Err(io::Error::other(format!("no answer about interface {name}"))),
        }
    }

    /// Makes a bridge and sets it up.
    pub fn create_bridge(&self, name: &str) -> io::Result<u32> {
        let mut link = up_link(name);
        link.attributes
            .push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Bridge)]));
        self.create(RouteNetlinkMessage::NewLink(link))?;
        self.index_of(name)
    }

    /// Makes a veth pair: `host` here, up and attached to bridge `controller`; `pod` in netns `netns`, still down.
    pub fn create_veth(
        &self,
        host: &VethEnd<'_>,
        controller: u32,
        pod: &VethEnd<'_>,
        netns: &Netns,
    ) -> io::Result<()> {
        use std::os::fd::AsFd;
        // Neither end can be born up: the driver refuses to open an end that has no peer yet (ENOTCONN).
        let mut peer = named_link(pod.name);
        peer.attributes.push(LinkAttribute::Address(pod.mac.to_vec()));
        peer.attributes
            .push(LinkAttribute::NetNsFd(netns.as_fd().as_raw_fd()));
        let mut link = named_link(host.name);
        link.attributes.push(LinkAttribute::Address(host.mac.to_vec()));
        link.attributes.push(LinkAttribute::Controller(controller));
        link.attributes.push(LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Veth),
            LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))),
        ]));
        self.create(RouteNetlinkMessage::NewLink(link))?;
        self.request(RouteNetlinkMessage::SetLink(up_link(host.name)), NLM_F_ACK)
            .map(drop)
    }

    /// Makes an interface of a kind that needs no parameters (`dummy`, `ifb`, ...) and sets it up.
    pub fn create_link(&self, name: &str, kind: InfoKind) -> io::Result<u32> {
        let mut link = up_link(name);
        link.attributes
            .push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind)]));
        self.create(RouteNetlinkMessage::NewLink(link))?;
        self.index_of(name)
    }

    /// Sets an interface up or down.
    pub fn set_up(&self, index: u32, up: bool) -> io::Result<()> {
        let mut link = LinkMessage::default();
        link.header.index = index;
        link.header.change_mask = LinkFlags::Up;
        link.header.flags = if up { LinkFlags::Up } else { LinkFlags::empty() };
        self.request(RouteNetlinkMessage::SetLink(link), NLM_F_ACK)
            .map(drop)
    }

    /// Removes an interface.
    pub fn delete_link(&self, name: &str) -> io::Result<()> {
        let mut link = LinkMessage::default();
        link.attributes.push(LinkAttribute::IfName(name.to_owned()));
        self.request(RouteNetlinkMessage::DelLink(link), NLM_F_ACK)
            .map(drop)
    }

    /// Adds an address; IPv6 without duplicate address detection, so that it is usable at once.
    pub fn add_address(&self, index: u32, address: IpAddr, prefix_len: u8) -> io::Result<()> {
        let mut message = AddressMessage::default();
        message.header.family = family(address);
        message.header.prefix_len = prefix_len;
        message.header.index = index;
        message.header.scope = AddressScope::Universe;
        message.attributes.push(AddressAttribute::Local(address));
        message.attributes.push(AddressAttribute::Address(address));
        if address.is_ipv6() {
            message.header.flags = AddressHeaderFlags::Nodad;
            message
                .attributes
                .push(AddressAttribute::Flags(AddressFlags::Nodad));
        }
        self.create(RouteNetlinkMessage::NewAddress(message))
    }

    /// Adds a default route through `gateway` on interface `index`.
    pub fn add_default_route(&self, index: u32, gateway: IpAddr) -> io::Result<()> {
        let mut message = RouteMessage::default();
        message.header.address_family = family(gateway);
        message.header.table = RouteHeader::RT_TABLE_MAIN;
        message.header.protocol = RouteProtocol::Boot;
        message.header.scope = RouteScope::Universe;
        message.header.kind = RouteType::Unicast;
        message
            .attributes
            .push(RouteAttribute::Gateway(RouteAddress::from(gateway)));
        message.attributes.push(RouteAttribute::Oif(index));
        self.create(RouteNetlinkMessage::NewRoute(message))
    }
}

fn family(address: IpAddr) -> AddressFamily {
    if address.is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    }
}

fn named_link(name: &str) -> LinkMessage {
    let mut link = LinkMessage::default();
    link.attributes.push(LinkAttribute::IfName(name.to_owned()));
    link
}

fn up_link(name: &str) -> LinkMessage {
    let mut link = named_link(name);
    link.header.flags = LinkFlags::Up;
    link.header.change_mask = LinkFlags::Up;
    link
}

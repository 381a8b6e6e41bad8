//! Netlink sockets that were handed over, and one request-and-reply exchange on them.
//!
//! The kernel works on a request within `sendto`, so every answer is there when it returns and reading never waits.
//! Always an explicit destination: then only the sender's present capabilities count, not those of whoever opened the
//! socket (`netlink_ns_capable`).

use std::cell::Cell;
use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recvmsg, sendto, socket,
};

use super::bytes::{Message, Messages};
use super::error::NetlinkError;
use super::verdict::{Refusal, verdict};
use crate::sys;

/// `NLM_F_REQUEST`.
pub const REQUEST: u16 = 1;
/// `NLM_F_ACK`.
pub const ACK: u16 = 4;
/// `NLM_F_ROOT | NLM_F_MATCH`.
pub const DUMP: u16 = 0x300;
/// `NLM_F_CREATE`.
pub const CREATE: u16 = 0x400;
/// `NLM_F_EXCL`.
pub const EXCLUSIVE: u16 = 0x200;
/// `NLM_F_REPLACE`.
pub const REPLACE: u16 = 0x100;
/// `NLM_F_APPEND`.
pub const APPEND: u16 = 0x800;

const FLAG_DUMP_INTERRUPTED: u16 = 0x10;
/// Larger than any part of a dump (the kernel uses at most 32 KiB).
const BUFFER: usize = 32 * 1024;
const DUMP_ATTEMPTS: u32 = 5;

/// A netlink socket and its sequence numbers.
#[derive(Debug)]
struct Channel {
    fd: OwnedFd,
    sequence: AtomicU32,
    /// The last exchange was read to its end, so nothing of it can be taken for an answer to the next one.
    is_empty: AtomicBool,
}

impl Channel {
    fn new(fd: OwnedFd, protocol: libc::c_int, expected: &'static str) -> Result<Self, NetlinkError> {
        let wrong = |found: String| NetlinkError::WrongSocket { expected, found };
        let (domain, found) = sys::family_and_protocol(&fd).map_err(|error| wrong(format!(": {error}")))?;
        if (domain, found) != (libc::AF_NETLINK, protocol) {
            return Err(wrong(format!(": domain {domain}, protocol {found}")));
        }
        for option in [
            libc::NETLINK_CAP_ACK,
            libc::NETLINK_EXT_ACK,
            libc::NETLINK_GET_STRICT_CHK,
        ] {
            sys::enable(&fd, libc::SOL_NETLINK, option)
                .map_err(|source| NetlinkError::socket("setsockopt", source))?;
        }
        Ok(Self {
            fd,
            sequence: AtomicU32::new(1),
            is_empty: AtomicBool::new(false),
        })
    }

    fn open(protocol: SockProtocol) -> Result<OwnedFd, NetlinkError> {
        socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            protocol,
        )
        .map_err(|source| NetlinkError::socket("socket", source))
    }

    fn next_sequence(&self) -> u32 {
        self.sequence.fetch_add(1, Ordering::Relaxed)
    }

    fn cookie(&self) -> Result<u64, NetlinkError> {
        sys::netns_cookie(&self.fd)
            .map_err(|source| NetlinkError::socket("getsockopt SO_NETNS_COOKIE", source))
    }

    fn netns_fd(&self) -> Result<OwnedFd, NetlinkError> {
        sys::netns_of_socket(&self.fd).map_err(|source| NetlinkError::socket("ioctl SIOCGSKNS", source))
    }

    fn send(&self, bytes: &[u8]) -> Result<(), NetlinkError> {
        let kernel = NetlinkAddr::new(0, 0);
        loop {
            match sendto(self.fd.as_raw_fd(), bytes, &kernel, MsgFlags::empty()) {
                Ok(_) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(source) => return Err(NetlinkError::socket("sendto", source)),
            }
        }
    }

    /// One datagram from the kernel, or none if there is none.
    fn receive<'a>(&self, buffer: &'a mut [u8]) -> Result<Option<&'a [u8]>, NetlinkError> {
        loop {
            // MSG_TRUNC makes recvmsg return the true length, so a cut datagram cannot pass for a whole one.
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_TRUNC;
            let mut parts = [IoSliceMut::new(buffer)];
            let (length, from) = match recvmsg::<NetlinkAddr>(self.fd.as_raw_fd(), &mut parts, None, flags) {
                Ok(received) => (
                    received.bytes,
                    received.address.map_or(0, |address| address.pid()),
                ),
                Err(Errno::EAGAIN) => return Ok(None),
                Err(Errno::EINTR) => continue,
                Err(source) => return Err(NetlinkError::socket("recvmsg", source)),
            };
            // Only port 0 is the kernel: others in the namespace may write to our port.
            if from != 0 {
                continue;
            }
            if length > buffer.len() {
                return Err(NetlinkError::Incomplete {
                    request: "a netlink request (datagram cut)",
                });
            }
            return Ok(Some(&buffer[..length]));
        }
    }

    /// Begins an exchange: throws away what an earlier, failed one or an earlier owner left.
    fn begin(&self, buffer: &mut [u8]) {
        if !self.is_empty.swap(false, Ordering::Relaxed) {
            // Bounded, since a socket can also fail for good.
            let _ = (0..4096).find(|_| matches!(self.receive(buffer), Ok(None)));
        }
    }

    /// The kernel's last message of an exchange has come.
    fn end(&self) {
        self.is_empty.store(true, Ordering::Relaxed);
    }

    /// Sends messages that change something; returns what was refused.
    ///
    /// `last` is the sequence number of the message that asked for an acknowledgement.
    fn transact(&self, bytes: &[u8], last: u32) -> Result<Vec<Refusal>, NetlinkError> {
        with_buffer(|buffer| self.transact_in(bytes, last, buffer))
    }

    fn transact_in(&self, bytes: &[u8], last: u32, buffer: &mut [u8]) -> Result<Vec<Refusal>, NetlinkError> {
        self.begin(buffer);
        self.send(bytes)?;
        let mut refusals = Vec::new();
        let mut answered = false;
        // Verdicts come in the order of the messages, so that of the last one ends them.
        while !answered && let Some(datagram) = self.receive(buffer)? {
            for message in Messages(datagram) {
                let Some(verdict) = verdict(&message) else {
                    continue;
                };
                answered |= message.sequence == last;
                refusals.extend(verdict.err());
            }
        }
        if answered {
            self.end();
        } else if refusals.is_empty() {
            return Err(NetlinkError::Incomplete {
                request: "a transaction",
            });
        }
        Ok(refusals)
    }

    /// Sends `count` requests in one datagram, numbered from the sequence number that `build` gets, each of which is answered
    /// by exactly one message, with data or with a refusal; gives what became of each, in their order.
    fn ask_all<T>(
        &self,
        request: &'static str,
        count: usize,
        build: impl FnOnce(u32) -> Vec<u8>,
        read: impl Fn(&Message<'_>) -> Option<T>,
    ) -> Result<Vec<Result<T, NetlinkError>>, NetlinkError> {
        with_buffer(|buffer| {
            self.begin(buffer);
            let first = self
                .sequence
                .fetch_add(u32::try_from(count).unwrap_or(u32::MAX), Ordering::Relaxed);
            self.send(&build(first))?;
            // Each is answered before the next one is begun (netlink_rcv_skb).
            let mut answers = Vec::with_capacity(count);
            while answers.len() < count
                && let Some(datagram) = self.receive(buffer)?
            {
                for message in Messages(datagram) {
                    if message.sequence.wrapping_sub(first) as usize == answers.len() {
                        answers.push(match verdict(&message) {
                            Some(Err(refusal)) => Err(refusal.into_error(request)),
                            Some(Ok(())) => Err(NetlinkError::Incomplete { request }),
                            None => read(&message).ok_or(NetlinkError::Incomplete { request }),
                        });
                    }
                }
            }
            if answers.len() < count {
                return Err(NetlinkError::Incomplete { request });
            }
            self.end();
            Ok(answers)
        })
    }

    /// Sends one request and hands every message of the answer to `each`.
    ///
    /// `build` gets the sequence number. A dump that changes interrupted is asked for again, after `restart`.
    fn query<S>(
        &self,
        request: &'static str,
        build: impl Fn(u32) -> Vec<u8>,
        start: impl Fn() -> S,
        each: impl Fn(&mut S, &Message<'_>),
    ) -> Result<S, NetlinkError> {
        with_buffer(|buffer| self.query_in(request, build, start, each, buffer))
    }

    fn query_in<S>(
        &self,
        request: &'static str,
        build: impl Fn(u32) -> Vec<u8>,
        start: impl Fn() -> S,
        each: impl Fn(&mut S, &Message<'_>),
        buffer: &mut [u8],
    ) -> Result<S, NetlinkError> {
        for _ in 0..DUMP_ATTEMPTS {
            self.begin(buffer);
            let sequence = self.next_sequence();
            self.send(&build(sequence))?;
            let mut state = start();
            let (mut interrupted, mut finished) = (false, false);
            while !finished && let Some(datagram) = self.receive(buffer)? {
                for message in Messages(datagram).filter(|message| message.sequence == sequence) {
                    interrupted |= message.flags & FLAG_DUMP_INTERRUPTED != 0;
                    match verdict(&message) {
                        Some(Ok(())) => finished = true,
                        Some(Err(refusal)) if refusal.errno == libc::EINTR => {
                            (interrupted, finished) = (true, true);
                        }
                        Some(Err(refusal)) => {
                            self.end();
                            return Err(refusal.into_error(request));
                        }
                        None => each(&mut state, &message),
                    }
                }
            }
            if finished {
                self.end();
            }
            if !interrupted {
                return if finished {
                    Ok(state)
                } else {
                    Err(NetlinkError::Incomplete { request })
                };
            }
        }
        Err(NetlinkError::Interrupted {
            request,
            attempts: DUMP_ATTEMPTS,
        })
    }
}

/// Runs `f` with this thread's receive buffer: to zero a new one would cost more than most exchanges.
fn with_buffer<T>(f: impl FnOnce(&mut [u8]) -> T) -> T {
    thread_local! {
        static KEPT: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
    }
    let mut buffer = KEPT.take();
    buffer.resize(BUFFER, 0);
    let outcome = f(&mut buffer);
    KEPT.set(buffer);
    outcome
}

macro_rules! socket_type {
    ($(#[$doc:meta])* $name:ident, $protocol:expr, $sock_protocol:expr, $expected:literal) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name(Channel);

        impl $name {
            /// Takes a socket that was handed over, after a look at what it is.
            pub fn from_fd(fd: OwnedFd) -> Result<Self, NetlinkError> {
                Ok(Self(Channel::new(fd, $protocol, $expected)?))
            }

            /// Opens one in the calling thread's network namespace.
            pub fn open() -> Result<Self, NetlinkError> {
                Self::from_fd(Channel::open($sock_protocol)?)
            }

            /// Cookie of the socket's namespace (`SO_NETNS_COOKIE`, Linux 5.14); never re-used within a boot.
            pub fn cookie(&self) -> Result<u64, NetlinkError> {
                self.0.cookie()
            }

            /// A new descriptor of the socket's namespace. Needs CAP_NET_ADMIN.
            pub fn netns_fd(&self) -> Result<OwnedFd, NetlinkError> {
                self.0.netns_fd()
            }

            /// Sends messages that change something; `last` is the sequence number that asked for an acknowledgement.
            pub fn transact(&self, bytes: &[u8], last: u32) -> Result<Vec<Refusal>, NetlinkError> {
                self.0.transact(bytes, last)
            }

            /// Sends a request built for a sequence number that the kernel answers with one message (not a dump, and
            /// without an acknowledgement besides), and reads that.
            pub fn ask<T>(
                &self,
                request: &'static str,
                build: impl FnOnce(u32) -> Vec<u8>,
                read: impl Fn(&Message<'_>) -> Option<T>,
            ) -> Result<T, NetlinkError> {
                let answer = self.0.ask_all(request, 1, build, read)?.pop();
                answer.unwrap_or(Err(NetlinkError::Incomplete { request }))
            }

            /// [`Self::ask`] with `count` requests in one datagram, numbered from the sequence number that `build` gets;
            /// what became of each.
            pub fn ask_all<T>(
                &self,
                request: &'static str,
                count: usize,
                build: impl FnOnce(u32) -> Vec<u8>,
                read: impl Fn(&Message<'_>) -> Option<T>,
            ) -> Result<Vec<Result<T, NetlinkError>>, NetlinkError> {
                self.0.ask_all(request, count, build, read)
            }

            /// Sends a query built for a sequence number, and folds the messages of the answer into a state.
            ///
            /// A dump that was interrupted by changes is repeated from `start`, five times at most.
            pub fn query<S>(
                &self,
                request: &'static str,
                build: impl Fn(u32) -> Vec<u8>,
                start: impl Fn() -> S,
                each: impl Fn(&mut S, &Message<'_>),
            ) -> Result<S, NetlinkError> {
                self.0.query(request, build, start, each)
            }

            /// The descriptor back, for whoever closes it.
            pub fn into_fd(self) -> OwnedFd {
                self.0.fd
            }
        }

        impl AsFd for $name {
            fn as_fd(&self) -> BorrowedFd<'_> {
                self.0.fd.as_fd()
            }
        }
    };
}

socket_type!(
    /// An `NETLINK_NETFILTER` socket. Closing it soon after deletions can take tens of milliseconds (RCU).
    NetfilterSocket,
    libc::NETLINK_NETFILTER,
    SockProtocol::NetlinkNetFilter,
    "NETLINK_NETFILTER"
);
socket_type!(
    /// An `NETLINK_ROUTE` socket.
    RouteSocket,
    libc::NETLINK_ROUTE,
    SockProtocol::NetlinkRoute,
    "NETLINK_ROUTE"
);
socket_type!(
    /// A `NETLINK_SOCK_DIAG` socket, which lists sockets.
    DiagnosticSocket,
    libc::NETLINK_SOCK_DIAG,
    SockProtocol::NetlinkSockDiag,
    "NETLINK_SOCK_DIAG"
);

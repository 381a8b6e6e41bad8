//! Istio's rules in iptables-legacy, through a plain datagram socket made in the namespace.
//!
//! The tables live behind socket options of IP and IPv6 sockets and CAP_NET_ADMIN of the caller is enough. A table is
//! read and replaced as a whole; counters are read with the old table's last breath and added to the new one.

mod sys;
mod table;

use std::os::fd::{AsFd as _, OwnedFd};

use super::{Findings, Scope};
use crate::rules::Family;
use table::{Layout, Table};

/// Where Istio's rules are; `nat` always has some, so it is asked first and cleared last.
const POD_TABLES: [&str; 3] = ["mangle", "raw", "nat"];
const HOST_TABLES: [&str; 1] = ["nat"];
/// Somebody may change the table between reading and replacing.
const ATTEMPTS: usize = 5;

/// A legacy table could not be read or replaced.
#[derive(Debug, thiserror::Error)]
pub enum LegacyError {
    /// Not a datagram socket of IP or IPv6.
    #[error("descriptor is not an AF_INET or AF_INET6 datagram socket")]
    WrongSocket,
    /// A socket option failed.
    #[error("cannot {action} the legacy {family} table {table}")]
    Table {
        /// What was being done.
        action: &'static str,
        /// ip or ip6.
        family: &'static str,
        /// Which table.
        table: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The table's bytes make no sense.
    #[error("legacy {family} table {table} is malformed: {what}")]
    Malformed {
        /// ip or ip6.
        family: &'static str,
        /// Which table.
        table: &'static str,
        /// Where.
        what: &'static str,
    },
}

/// A datagram socket that reaches a namespace's legacy tables. It is never bound, connected or sent on.
#[derive(Debug)]
pub struct LegacySocket {
    fd: OwnedFd,
    family: Family,
}

impl LegacySocket {
    /// Takes a socket that was handed over, after a look at what it is.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, LegacyError> {
        let option = |option| crate::sys::integer_option(&fd, option).map_err(|_| LegacyError::WrongSocket);
        let family = match (option(libc::SO_DOMAIN)?, option(libc::SO_TYPE)?) {
            (libc::AF_INET, libc::SOCK_DGRAM) => Family::V4,
            (libc::AF_INET6, libc::SOCK_DGRAM) => Family::V6,
            _ => return Err(LegacyError::WrongSocket),
        };
        Ok(Self { fd, family })
    }

    /// Which family's tables it reaches.
    pub fn family(&self) -> Family {
        self.family
    }

    /// The descriptor back, for whoever closes it.
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }

    fn layout(&self) -> &'static Layout {
        match self.family {
            Family::V4 => &table::IPV4,
            Family::V6 => &table::IPV6,
        }
    }

    fn failed(
        &self,
        action: &'static str,
        table: &'static str,
    ) -> impl FnOnce(std::io::Error) -> LegacyError {
        let family = self.layout().name;
        move |source| LegacyError::Table {
            action,
            family,
            table,
            source,
        }
    }

    /// Reads a table; none if the kernel has no such table.
    fn read(&self, name: &'static str) -> Result<Option<Table>, LegacyError> {
        let layout = self.layout();
        for _ in 0..ATTEMPTS {
            let info = match sys::info(self.fd.as_fd(), layout.level, name) {
                Ok(info) => info,
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOPROTOOPT)) => {
                    return Ok(None);
                }
                Err(error) => return Err(self.failed("read", name)(error)),
            };
            match sys::entries(self.fd.as_fd(), layout.level, name, info.size) {
                // The size changed in between.
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
                Err(error) => return Err(self.failed("read", name)(error)),
                Ok(bytes) => {
                    let malformed = |what| LegacyError::Malformed {
                        family: layout.name,
                        table: name,
                        what,
                    };
                    return Table::decode(layout, &info, &bytes).map(Some).map_err(malformed);
                }
            }
        }
        Err(self.failed("read", name)(std::io::Error::from_raw_os_error(
            libc::EAGAIN,
        )))
    }
}

/// What is to be removed from one table.
#[derive(Debug)]
pub(super) struct Plan {
    name: &'static str,
    family: &'static str,
    scope: Scope,
    istio: Vec<String>,
    foreign: Vec<String>,
}

/// Finds what is Istio's. Creates a `nat` table where the namespace has none, and no other.
pub(super) fn plan(socket: &LegacySocket, scope: Scope) -> Result<Vec<Plan>, LegacyError> {
    let tables: &[&'static str] = match scope {
        Scope::Pod => &POD_TABLES,
        Scope::Host => &HOST_TABLES,
    };
    let mut plans = Vec::new();
    if !socket.read("nat")?.is_some_and(|nat| nat.has_istio_chain(scope)) {
        return Ok(plans);
    }
    for &name in tables {
        let Some(table) = socket.read(name)? else { continue };
        let (istio, foreign) = table.istio_and_foreign(scope);
        if !istio.is_empty() || !foreign.is_empty() {
            plans.push(Plan {
                name,
                family: socket.layout().name,
                scope,
                istio,
                foreign,
            });
        }
    }
    Ok(plans)
}

impl Plan {
    /// Adds what it is about.
    pub(super) fn describe(&self, findings: &mut Findings) {
        let label = |what: &String| format!("{what} of legacy {} table {}", self.family, self.name);
        findings.istio.extend(self.istio.iter().map(label));
        findings.foreign.extend(self.foreign.iter().map(label));
    }

    /// Replaces the table by one without Istio's rules.
    pub(super) fn execute(&self, socket: &LegacySocket) -> Result<(), LegacyError> {
        let (fd, level) = (socket.fd.as_fd(), socket.layout().level);
        for _ in 0..ATTEMPTS {
            let Some(table) = socket.read(self.name)? else {
                return Ok(());
            };
            let Some(slimmer) = table.without_istio(self.scope) else {
                return Ok(());
            };
            match sys::replace(fd, level, self.name, &slimmer.info, &slimmer.bytes, table.len()) {
                // It has another number of entries by now.
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
                Err(error) => return Err(socket.failed("replace", self.name)(error)),
                Ok(counters) => {
                    let kept: Vec<_> = slimmer
                        .kept
                        .iter()
                        .map(|index| counters.get(*index).copied().unwrap_or_default())
                        .collect();
                    return sys::add_counters(fd, level, self.name, &kept)
                        .map_err(socket.failed("restore the counters of", self.name));
                }
            }
        }
        Err(socket.failed("replace", self.name)(
            std::io::Error::from_raw_os_error(libc::EAGAIN),
        ))
    }
}

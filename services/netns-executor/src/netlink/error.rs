//! What can go wrong between us and the kernel.

use std::io;

/// A request to the kernel failed.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// A descriptor that is not the socket it should be.
    #[error("descriptor is not a {expected} socket{found}")]
    WrongSocket {
        /// Which socket was expected.
        expected: &'static str,
        /// What it is, where that can be told; begins with a separator.
        found: String,
    },
    /// A socket call failed.
    #[error("{call} on netlink socket failed")]
    Socket {
        /// Which call.
        call: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The kernel refused a request.
    #[error("kernel refused {request}{detail}")]
    Refused {
        /// What was asked, in words.
        request: String,
        /// The kernel's own text where it gave one; begins with a separator.
        detail: String,
        /// The error number.
        #[source]
        source: io::Error,
    },
    /// State changed during every attempt to read it.
    #[error("{request} was interrupted by changes {attempts} times")]
    Interrupted {
        /// What was being read.
        request: &'static str,
        /// How often it was tried.
        attempts: u32,
    },
    /// The kernel answered less than it must, or what cannot be understood.
    #[error("answer to {request} is incomplete")]
    Incomplete {
        /// What was asked.
        request: &'static str,
    },
}

impl NetlinkError {
    /// The kernel's error number, if it refused.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Refused { source, .. } | Self::Socket { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }

    pub(crate) fn socket(call: &'static str, source: impl Into<io::Error>) -> Self {
        Self::Socket {
            call,
            source: source.into(),
        }
    }
}

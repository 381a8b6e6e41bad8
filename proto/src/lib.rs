//! Contracts between the processes of Sluice, and nothing else: what two processes must agree on
//! byte for byte. Generated messages ([`pb`]), typed ids ([`id`]), validated conversions
//! ([`ambient`], [`sandbox`]), stable error codes ([`code`]), socket paths and modes ([`paths`]) and the
//! transports that carry messages and descriptors ([`transport`], [`opener`]).
//!
//! Needs no privilege, no Kubernetes and no state of its own.
#![warn(missing_docs)]

pub mod ambient;
pub mod code;
pub mod id;
pub mod opener;
pub mod paths;
pub mod sandbox;
pub mod transport;

/// Generated from the `.proto` files beside this crate.
#[allow(missing_docs, missing_debug_implementations, unreachable_pub, clippy::all, clippy::pedantic, clippy::expect_used, clippy::allow_attributes_without_reason, reason = "generated code")]
pub mod pb {
    /// Types that several contracts share.
    pub mod types {
        tonic::include_proto!("sluice.types.v1");
    }
    /// Plugin to executor.
    pub mod cni {
        tonic::include_proto!("sluice.cni.v1");
    }
    /// Broker to executor, and the descriptor socket.
    pub mod executor {
        tonic::include_proto!("sluice.executor.v1");
    }
    /// Broker to node-local tools.
    pub mod workload {
        tonic::include_proto!("sluice.workload.v1");
    }
    /// Broker to ztunnel.
    pub mod zds {
        tonic::include_proto!("istio.workload.zds");
    }
}

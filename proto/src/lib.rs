//! Contracts between the processes of Sluice, and nothing else: what two processes must agree on
//! byte for byte. Generated messages ([`pb`]), typed ids ([`id`]), validated conversions
//! ([`ambient`], [`sandbox`]), stable error codes ([`code`]), socket paths and modes ([`paths`]), the plugin's
//! tombstones ([`tombstone`]), what the executor lacks ([`wanted`]), what can come of a question to the broker (`broker`,
//! feature `client`) and the transports that carry messages and descriptors ([`transport`], [`opener`]).
//!
//! Needs no privilege, no Kubernetes and no state of its own.
#![warn(missing_docs)]

pub mod ambient;
#[cfg(feature = "client")]
pub mod broker;
pub mod code;
pub mod id;
pub mod opener;
pub mod paths;
pub mod sandbox;
pub mod tombstone;
pub mod transport;
pub mod wanted;

/// Generated from the `.proto` files beside this crate.
#[allow(
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    clippy::all,
    clippy::pedantic,
    clippy::expect_used,
    clippy::allow_attributes_without_reason,
    reason = "generated code"
)]
pub mod pb {
    // The nesting mirrors the packages, because generated code refers to other packages by relative paths.
    mod sluice {
        pub mod types {
            pub mod v1 {
                tonic::include_proto!("sluice.types.v1");
            }
        }
        pub mod cni {
            pub mod v1 {
                tonic::include_proto!("sluice.cni.v1");
            }
        }
        pub mod executor {
            pub mod v1 {
                tonic::include_proto!("sluice.executor.v1");
            }
        }
        pub mod workload {
            pub mod v1 {
                tonic::include_proto!("sluice.workload.v1");
            }
        }
        pub mod node {
            pub mod v1 {
                tonic::include_proto!("sluice.node.v1");
            }
        }
    }
    /// Plugin to executor.
    pub use sluice::cni::v1 as cni;
    /// Broker to executor, and the descriptor socket.
    pub use sluice::executor::v1 as executor;
    /// Installer to broker.
    pub use sluice::node::v1 as node;
    /// Types that several contracts share.
    pub use sluice::types::v1 as types;
    /// Broker to node-local tools.
    pub use sluice::workload::v1 as workload;
    /// Broker to ztunnel.
    pub mod zds {
        tonic::include_proto!("istio.workload.zds");
    }
}

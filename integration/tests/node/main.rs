//! The real processes on real namespaces: every process apart, under its production user and capabilities. Needs root.
//!
//! One binary, so that it is linked once.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a failed step is a failed test"
)]

mod add;
mod add_failures;
mod add_kills;
mod adopt;
mod adopt_istio;
mod basics;
mod capabilities;
mod cni;
mod cni_chain;
mod cycles;
mod descriptors;
mod descriptors_let_go;
mod drift;
mod foresight;
mod installer;
mod keep;
mod keep_kills;
mod leave;
mod leave_gone;
mod named_api;
mod observe;
mod occupied;
mod privileges;
mod probes;
mod restart;
mod restart_identity;
mod rule_schema;
mod rules;
mod rules_icmp;
mod rules_pods;
mod stand_alone;
mod standby;
mod without_opener;
mod zds;
mod zds_misbehaviour;
mod ztunnel;

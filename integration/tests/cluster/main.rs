//! Sluice on a real cluster: API server, kubelet and container runtime are the real ones, ztunnel is a stand-in.
//! `make test-cluster` starts it and runs these; they are built with the feature `cluster` only.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::unused_self,
    reason = "a failed step is a failed test; figures are printed; only who holds the cluster may use it"
)]

mod api;
mod harness;
mod incumbent;
mod load;
mod pods;
mod sandbox;
mod scenario;
mod sluice;
mod ztunnel;

mod api_load;
mod credentials;
mod down;
mod drift;
mod enrol;
mod kubectl;
mod label;
mod moving;
mod primaries;
mod profile;
mod refusal;
mod scale;
mod second_network;
mod speed;
mod uninstall;
mod upgrade;

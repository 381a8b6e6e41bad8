//! The whole broker in process, between a directory of manifests, a stand-in executor and a scripted ztunnel: every
//! socket is a real one.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a step that fails fails the test"
)]

#[path = "../cluster/api.rs"]
#[allow(dead_code, reason = "shared with the tests of the source")]
mod api;
mod executor;
mod harness;
mod http;
mod installer;
mod kubernetes;
mod life;
mod restart;
mod standby;

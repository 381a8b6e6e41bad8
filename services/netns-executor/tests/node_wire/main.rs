//! Sandboxes seen through the executor's real sockets, with a kernel that only remembers.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed step is a failed test"
)]

#[path = "../node_harness/harness.rs"]
mod harness;
#[path = "../node_harness/opener.rs"]
mod opener;

mod add;
mod keep;
mod letting_go;
mod recovery;
mod sandbox;
mod setup;

//! The installer as a process, on a node that is a directory, beside a broker that says what a test wants.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a step that fails fails the test"
)]

mod lifecycle;
mod support;

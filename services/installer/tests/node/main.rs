//! The installer as a process, on a node that is a directory, beside a broker that says what a test wants.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a step that fails fails the test"
)]

mod adversity;
mod commands;
mod counts;
mod follow;
mod lifecycle;
mod logs;
mod prepare;
mod privileges;
mod purge;
mod stand_alone;
mod support;
mod take_over;
mod wars;
mod writes;

//! The manifest directory on a real directory: what is told, when, and what is not.

#![allow(clippy::expect_used, reason = "a failed step is a failed test")]

mod changes;
mod damage;
mod fixture;
mod writers;

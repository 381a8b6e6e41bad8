//! The seccomp filters of this crate's processes, compiled from their reviewed files when this crate is built.
#![allow(
    clippy::unreadable_literal,
    reason = "generated; instructions of the kernel's filter machine"
)]

include!(concat!(env!("OUT_DIR"), "/seccomp.rs"));

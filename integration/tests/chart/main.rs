//! The chart and the image: rendered by real helm, and compared with what runs on a cluster.
//!
//! helm is taken from `HELM`, else from `PATH`, else from where `make cluster` puts it.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a failed step is a failed test"
)]
#![allow(
    clippy::disallowed_methods,
    reason = "helm, kubectl, make and tar are what is tested, or are asked as independent tools"
)]

mod admission;
mod effects;
mod golden;
mod helm;
mod image;
mod objects;
mod pages;
mod platforms;
mod privileges;
mod refusals;
mod release;
mod running;

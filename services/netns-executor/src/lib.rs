//! Placeholder.

pub mod opener;
pub mod netlink;
pub mod rules;

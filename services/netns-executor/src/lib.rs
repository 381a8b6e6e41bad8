//! netns-executor: programs redirection rules in pod network namespaces.
//!
//! Needs CAP_NET_ADMIN. Never enters a namespace, opens a TCP or UDP socket, executes a program, or dials anybody.

pub mod config;
pub mod configuration;
pub mod descriptors;
pub mod drift;
pub mod foresight;
pub mod handoff;
pub mod host;
pub mod hub;
pub mod kernel;
pub mod metrics;
pub mod netlink;
pub mod node;
pub mod opener;
pub mod opener_client;
pub mod pool;
pub mod preflight;
pub mod probe_set;
pub mod reaper;
pub mod retire;
pub mod rules;
pub mod sandbox;
pub mod seccomp;
pub mod self_test;
pub mod server;
pub mod start;
mod sys;
pub mod table;
pub mod takeover;
pub mod wanted;

//! Everything that runs the processes of Sluice together: the demo, the node tests and the benchmarks. The processes
//! are started as they run in production, each apart, with its own user, capabilities and network namespace
//! ([`mesh`]), on a simulated node of the testkit.

pub mod add_client;
pub mod adds;
pub mod as_user;
pub mod bench;
pub mod cni_error;
pub mod demo;
pub mod descriptors;
pub mod kernel_state;
pub mod manifests;
pub mod mesh;
pub mod netns_state;
pub mod proxies;
pub mod raw_ztunnel;
pub mod rule_monitor;
pub mod scene;
pub mod table_owner;
pub mod tracing_tool;
pub mod uds_http;
pub mod watch;

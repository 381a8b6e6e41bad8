//! Everything that runs the processes of Sluice together: the demo, the node tests and the benchmarks. The processes
//! are started as they run in production, each apart, with its own user, capabilities and network namespace
//! ([`mesh`]), on a simulated node of the testkit.

pub mod manifests;
pub mod mesh;

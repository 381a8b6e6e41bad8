//! Test fixtures of Sluice: simulated nodes and pods in network namespaces of their own ([`node`], [`pod`]), the
//! processes under test under their production identity ([`process`]), a runner for CNI chains ([`cni`]), traffic
//! ([`traffic`]) and a stand-in for ztunnel ([`standin`]).
//!
//! Needs root. Touches no link, route or rule of the machine's own netns, and leaves nothing behind: namespaces end
//! with their last descriptor, processes with this one, mounts with the node's mount namespace.

pub mod cgroup;
pub mod cni;
pub mod incumbent;
pub mod netlink;
pub mod netns;
pub mod node;
pub mod pod;
pub mod process;
pub mod rundir;
pub mod standin;
pub mod traffic;
pub mod wait;

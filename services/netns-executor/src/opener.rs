//! The opener: turns a netns descriptor, a path or a pod UID into sockets made inside that network namespace.
//!
//! It changes nothing anywhere. It needs CAP_SYS_ADMIN to enter namespaces and CAP_SYS_PTRACE to find those of
//! running processes; each is held by a process of its own, and both are caged ([`cage`]).

pub mod arguments;
pub mod cage;
mod cgroup;
mod enter;
pub mod health;
mod keyhole;
pub mod log;
mod path;
mod scan;
mod serve;

pub use keyhole::{Keyhole, KeyholeError};
pub use path::NETNS_DIRECTORIES;
pub use serve::{Opener, OpenerError, Options};

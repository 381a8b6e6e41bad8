//! What every Sluice service needs to run, and nothing of what it does: a process 1, telemetry, limits, privileges,
//! seccomp, shutdown, the right to serve a node, pauses between attempts to reach each other.
//!
//! Start-up order of a service (capabilities and seccomp are per thread, so all of it happens in a synchronous
//! `main` before a second thread exists): parse and validate configuration; [`telemetry::init`]; [`init::run`];
//! [`limits::raise_open_files`]; open what needs privilege; [`privileges::drop_to`]; [`seccomp::install`]; only
//! then build the tokio runtime and accept requests.
#![warn(missing_docs)]

pub mod init;
pub mod lease;
pub mod limits;
pub mod privileges;
pub mod redial;
pub mod seccomp;
pub mod shutdown;
pub mod telemetry;

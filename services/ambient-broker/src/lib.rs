//! Decides which pods are in the mesh, drives the executor, and serves ztunnel.
pub mod reconcile;
pub mod source;
pub mod zds;
pub mod executor;
pub mod driver;
pub mod metrics;
pub mod registry;
pub mod status;
mod compat;
pub mod health;
mod http;
pub mod workload;
pub mod config;
pub mod service;

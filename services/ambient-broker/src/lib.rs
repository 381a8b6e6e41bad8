//! Decides which pods are in the mesh, drives the executor, and serves ztunnel.
pub mod cluster;
mod compat;
pub mod config;
mod door;
pub mod driver;
pub mod executor;
mod handoff;
pub mod health;
mod http;
pub mod lifecycle;
pub mod metrics;
pub mod reconcile;
pub mod registry;
pub mod service;
pub mod source;
pub mod status;
pub mod workload;
pub mod zds;

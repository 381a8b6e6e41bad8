//! Decides which pods are in the mesh, drives the executor, and serves ztunnel.
pub mod reconcile;
pub mod source;
pub mod zds;
pub mod executor;

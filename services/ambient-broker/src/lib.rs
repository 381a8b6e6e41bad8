//! The ambient broker: decides who is in the mesh and sees to it.

pub mod source;

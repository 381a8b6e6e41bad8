//! `sluice-cni`, executed by the container runtime once per command (CNI spec section 2).
//!
//! The C library's start calls [`main`] directly. What Rust's own start does before `fn main` costs a fifth of executing
//! an empty program (it reads `/proc/self/maps` to tell a stack overflow from other faults); the two steps of it that the
//! plugin needs are [`start`].
#![no_main]
#![expect(unsafe_code, reason = "a C entry point, and signal(2)")]

mod start;

/// The entry point that the C library looks for; what it passes is read through `std::env`.
// SAFETY: nothing else in the program has this name, and the type is that of C's `main`.
#[unsafe(no_mangle)]
extern "C" fn main(_count: i32, _arguments: *const *const u8) -> i32 {
    start::replace_closed_descriptors();
    start::ignore_broken_pipes();
    sluice_cni::output::install_panic_hook();
    // Ends the process itself: nothing that could still write or wait is dropped after the answer is out.
    std::process::exit(sluice_cni::run());
}

//! `sluice-cni`, executed by the container runtime once per command (CNI spec section 2).

fn main() {
    sluice_cni::output::install_panic_hook();
    // Ends the process itself: nothing that could still write or wait is dropped after the answer is out.
    std::process::exit(sluice_cni::run());
}

//! `sluicectl`, also as `kubectl-sluice`.

fn main() -> std::process::ExitCode {
    std::process::ExitCode::from(sluicectl::run(std::env::args_os()))
}

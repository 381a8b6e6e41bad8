//! Seccomp filters as reviewed data: a JSON file a service, compiled at start or when the service is built.

use seccompiler::{BpfMap, TargetArch, apply_filter, compile_from_json};

/// One instruction of a compiled filter (`struct sock_filter`, linux/filter.h).
pub use seccompiler::sock_filter as Instruction;

/// Name of the one filter in a service's JSON file.
const FILTER: &str = "process";

/// A filter could not be compiled or installed.
#[derive(Debug, thiserror::Error)]
pub enum SeccompError {
    /// This machine's architecture has no filter.
    #[error("no seccomp filter for architecture {0}")]
    Architecture(String),
    /// The JSON is not a filter.
    #[error("seccomp filter does not compile")]
    Compile(#[source] seccompiler::Error),
    /// The JSON lacks the filter `process`.
    #[error("seccomp file holds no filter named {FILTER:?}")]
    Missing,
    /// The kernel refused it.
    #[error("seccomp filter was refused by the kernel")]
    Install(#[source] seccompiler::Error),
}

/// Compiles the filter named `process` in `json` (seccompiler's format) and installs it for this thread and all
/// threads it will start. Sets no_new_privs. Call it before any other thread exists.
pub fn install(json: &str) -> Result<(), SeccompError> {
    let architecture = std::env::consts::ARCH;
    let target = TargetArch::try_from(architecture)
        .map_err(|_| SeccompError::Architecture(architecture.to_owned()))?;
    let filters: BpfMap = compile_from_json(json.as_bytes(), target).map_err(SeccompError::Compile)?;
    let filter = filters.get(FILTER).ok_or(SeccompError::Missing)?;
    apply_filter(filter).map_err(SeccompError::Install)
}

/// As [`install`], for a filter that was compiled when the service was built. An empty one is none at all: the build
/// was for an architecture that the file has no filter for.
pub fn install_compiled(filter: &[Instruction]) -> Result<(), SeccompError> {
    if filter.is_empty() {
        return Err(SeccompError::Architecture(std::env::consts::ARCH.to_owned()));
    }
    apply_filter(filter).map_err(SeccompError::Install)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_denied_call_fails_and_others_work() {
        const DENY_MKDIR: &str = r#"{"process": {"mismatch_action": "allow", "match_action": {"errno": 1},
            "filter": [{"syscall": "mkdir"}, {"syscall": "mkdirat"}]}}"#;
        std::thread::spawn(|| {
            install(DENY_MKDIR).unwrap();
            let inside = tempfile::tempdir_in("/nonexistent");
            assert!(inside.is_err());
            let denied = std::fs::create_dir("/tmp/never-made-by-a-test").unwrap_err();
            assert_eq!(denied.raw_os_error(), Some(libc::EPERM));
            assert!(std::fs::read_dir("/").is_ok());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_compiled_filter_works_as_its_file_and_an_empty_one_is_refused() {
        const DENY_MKDIR: &str = r#"{"process": {"mismatch_action": "allow", "match_action": {"errno": 1},
            "filter": [{"syscall": "mkdir"}, {"syscall": "mkdirat"}]}}"#;
        let target = TargetArch::try_from(std::env::consts::ARCH).unwrap();
        let filters: BpfMap = compile_from_json(DENY_MKDIR.as_bytes(), target).unwrap();
        std::thread::spawn(move || {
            install_compiled(&filters[FILTER]).unwrap();
            let denied = std::fs::create_dir("/tmp/never-made-by-a-test").unwrap_err();
            assert_eq!(denied.raw_os_error(), Some(libc::EPERM));
        })
        .join()
        .unwrap();
        assert!(matches!(
            install_compiled(&[]),
            Err(SeccompError::Architecture(_))
        ));
    }

    #[test]
    fn a_file_without_the_filter_is_refused() {
        assert!(matches!(install("{}"), Err(SeccompError::Missing)));
        assert!(matches!(install("nonsense"), Err(SeccompError::Compile(_))));
    }
}

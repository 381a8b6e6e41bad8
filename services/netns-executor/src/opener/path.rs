//! Which paths the executor may name: a file directly in an allow-listed netns directory, or a process's `ns/net`.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, open, openat};
use nix::sys::stat::Mode;

use super::enter::require_nsfs;

/// Where container runtimes mount network namespaces.
pub const NETNS_DIRECTORIES: [&str; 3] = ["/run/netns", "/var/run/netns", "/var/run/docker/netns"];

/// A path that may be opened.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Allowed<'a> {
    /// The namespace of this process, by the host's count.
    Process(u32),
    /// The file `name` in `directory`.
    File { directory: &'a Path, name: &'a str },
}

/// Checks a requested path against `directories`.
pub(super) fn check<'a>(path: &'a str, directories: &'a [PathBuf]) -> Option<Allowed<'a>> {
    if let Some(pid) = path
        .strip_prefix("/proc/")
        .and_then(|rest| rest.strip_suffix("/ns/net"))
    {
        let digits = pid.bytes().all(|byte| byte.is_ascii_digit());
        return digits.then(|| pid.parse().ok().map(Allowed::Process)).flatten();
    }
    let (directory, name) = path.rsplit_once('/')?;
    let directory = directories
        .iter()
        .find(|allowed| allowed.as_os_str() == directory)?;
    (!matches!(name, "" | "." | "..")).then_some(Allowed::File { directory, name })
}

/// Opens the namespace mounted at `name` in `directory`; never follows a link there.
///
/// The directory is opened each time: it may have been made, or mounted over, after the opener started.
pub(super) fn open_netns(directory: &Path, name: &str) -> Result<OwnedFd, Errno> {
    let path_only = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let directory = openat(AT_FDCWD, directory, path_only, Mode::empty())?;
    let no_surprise = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
    let netns = openat(&directory, name, no_surprise, Mode::empty())?;
    require_nsfs(&netns)?;
    Ok(netns)
}

/// Opens a path of our own configuration.
pub(super) fn open_trusted(path: &Path) -> Result<OwnedFd, Errno> {
    let netns = open(
        path,
        OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC,
        Mode::empty(),
    )?;
    require_nsfs(&netns)?;
    Ok(netns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_directly_in_a_listed_directory_and_processes_are_allowed() {
        let directories: Vec<PathBuf> = NETNS_DIRECTORIES.iter().map(PathBuf::from).collect();
        let allowed = |path: &str| check(path, &directories).is_some();
        assert_eq!(check("/proc/42/ns/net", &directories), Some(Allowed::Process(42)));
        assert_eq!(
            check("/run/netns/cni-1", &directories),
            Some(Allowed::File {
                directory: Path::new("/run/netns"),
                name: "cni-1"
            })
        );
        assert!(allowed("/var/run/docker/netns/default"));
        for path in [
            "/run/netns/..",
            "/run/netns/",
            "/run/netns/a/b",
            "/run/netns/../../etc/passwd",
            "/run/netns",
            "/etc/passwd",
            "run/netns/a",
            "/proc/self/ns/net",
            "/proc/1/ns/mnt",
            "/proc/1/root/run/netns/a",
            "/proc/+1/ns/net",
            "/proc//ns/net",
            "/proc/99999999999/ns/net",
            "",
        ] {
            assert!(!allowed(path), "{path}");
        }
    }
}

//! Paths of a host whose root directory is mounted below ours, as in a debug container of kubectl. A symbolic link of the host
//! means a path from the host's root, so it is followed there: in ours it leads nowhere, or to another directory.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2};
use rustix::io::Errno;

use crate::config::Flags;

/// A path below the host's root cannot be followed.
#[derive(Debug, thiserror::Error)]
#[error("cannot follow {} on the host", path.display())]
pub(crate) struct HostRootError {
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// The flags with every directory that is below `root` followed as the host would.
pub(crate) fn followed(flags: &Flags, root: &Path) -> Result<Flags, HostRootError> {
    let mut flags = flags.clone();
    flags.kubeconfig = Some(follow(root, &flags.kubeconfig())?);
    flags.run_dir = follow(root, &flags.run_dir)?;
    flags.cni_net_dir = follow(root, &flags.cni_net_dir)?;
    for directory in &mut flags.cni_bin_dir {
        *directory = follow(root, directory)?;
    }
    Ok(flags)
}

/// The path without symbolic links, as far as it exists. One that is not below `root` stays as it is.
pub(crate) fn follow(root: &Path, path: &Path) -> Result<PathBuf, HostRootError> {
    let Ok(inside) = path.strip_prefix(root) else {
        return Ok(path.to_owned());
    };
    let fail = |errno: Errno| HostRootError {
        path: path.to_owned(),
        source: errno.into(),
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match openat(CWD, root, flags, Mode::empty()) {
        Ok(root) => real_path(rustix::fd::AsFd::as_fd(&root), inside).map_err(fail),
        Err(Errno::NOENT) => Ok(path.to_owned()),
        Err(errno) => Err(fail(errno)),
    }
}

fn real_path(root: BorrowedFd<'_>, inside: &Path) -> Result<PathBuf, Errno> {
    let path = if inside.as_os_str().is_empty() {
        Path::new(".")
    } else {
        inside
    };
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    match openat2(root, path, flags, Mode::empty(), ResolveFlags::IN_ROOT) {
        // What the kernel calls it, seen from our root.
        Ok(found) => std::fs::read_link(format!("/proc/self/fd/{}", found.as_raw_fd()))
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO)),
        Err(Errno::NOENT) => match (path.parent(), path.file_name()) {
            (Some(parent), Some(name)) => Ok(real_path(root, parent)?.join(name)),
            _ => Err(Errno::NOENT),
        },
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_of_the_host_mean_the_hosts_root() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        fs::create_dir_all(root.join("usr/libexec/cni")).unwrap();
        fs::create_dir_all(root.join("opt")).unwrap();
        symlink("/usr/libexec/cni", root.join("opt/cni")).unwrap();
        symlink("../../../../../usr", root.join("up")).unwrap();
        let follow = |path: &str| follow(root, &root.join(path)).unwrap();
        let real = root.canonicalize().unwrap();
        assert_eq!(follow("opt/cni"), real.join("usr/libexec/cni"));
        assert_eq!(
            follow("opt/cni/sluice-cni"),
            real.join("usr/libexec/cni/sluice-cni")
        );
        assert_eq!(
            follow("up/libexec/none/at/all"),
            real.join("usr/libexec/none/at/all")
        );
        assert_eq!(follow(""), real);
    }

    #[test]
    fn what_is_elsewhere_stays_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let link = directory.path().join("link");
        symlink("/nowhere", &link).unwrap();
        assert_eq!(follow(&directory.path().join("host"), &link).unwrap(), link);
        let below = directory.path().join("no-such-root/opt/cni");
        assert_eq!(
            follow(&directory.path().join("no-such-root"), &below).unwrap(),
            below
        );
    }
}

//! The run directories, made by the installer before it does anything else; the broker waits for its own, and the executor makes
//! those that are of nobody else.
//!
//! Each socket has a directory of its own, whose owner and mode say who may make the socket and who may reach it.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::process::Gid;
use sluice_proto::paths::RunDir;

use crate::config::RunDirFlags;

/// `f_type` of a tmpfs (linux/magic.h).
const TMPFS: u64 = 0x0102_1994;

/// A directory is not, or cannot be made, as it must be.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunDirError {
    #[error("cannot {action} {}{hint}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        hint: &'static str,
        #[source]
        source: std::io::Error,
    },
    #[error("{} is a symbolic link or no directory; it must be a directory", path.display())]
    NotADirectory { path: PathBuf },
    #[error("{} is not on a tmpfs: what it holds must not survive a reboot (mount the host's /run, or allow it with --allow-disk)", path.display())]
    NotTmpfs { path: PathBuf },
    #[error("{} belongs to uid {uid}, mode {mode:04o}; it must be uid {allowed_uid}, and nobody else may write (chown it, or remove it and it is made anew)", path.display())]
    Owner {
        path: PathBuf,
        uid: u32,
        mode: u32,
        allowed_uid: u32,
    },
}

/// A directory as it is to be. Its owner is whoever runs the installer.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Wanted {
    path: PathBuf,
    gid: u32,
    mode: u32,
}

/// The directories that the executor does not make for itself. The broker is no more than a member of the group of its own, and
/// set-group-ID gives its sockets that group, through which root without CAP_DAC_OVERRIDE reaches them.
fn table(run: &RunDir, options: &RunDirFlags, istio: Option<&Path>) -> Vec<Wanted> {
    let parent = |socket: PathBuf| socket.parent().map(PathBuf::from).unwrap_or_default();
    let (own, broker) = (rustix::process::getegid().as_raw(), options.broker());
    let mut wanted = vec![
        (parent(run.kubeconfig()), own, 0o700),
        (parent(run.workload_socket()), broker, 0o2770),
        (parent(run.node_socket()), broker, 0o2770),
    ];
    let ztunnel = options.ztunnel_dir.clone();
    wanted.extend(ztunnel.map(|path| (path, options.ztunnel_gid, 0o2770)));
    // The broker replaces one socket in it, we another, and the agent that it belongs to still runs.
    wanted.extend(istio.map(|path| (path.to_owned(), broker, 0o770)));
    wanted
        .into_iter()
        .map(|(path, gid, mode)| Wanted { path, gid, mode })
        .collect()
}

/// The directories below the run directory.
pub(crate) fn all(run: &RunDir) -> Vec<PathBuf> {
    let within = [
        run.cni_socket(),
        run.executor_socket(),
        run.opener_socket(),
        run.sandboxes(),
        run.workload_socket(),
        run.node_socket(),
        run.kubeconfig(),
    ];
    within
        .iter()
        .filter_map(|path| Some(path.parent()?.to_owned()))
        .collect()
}

/// Makes every directory, or gives an existing one group and mode. Needs no capability, but has to be a member of the groups;
/// the directories that are there, as the kubelet makes them for a hostPath, belong to root, which is us.
pub(crate) fn prepare(
    run: &RunDir,
    options: &RunDirFlags,
    istio: Option<&Path>,
    allow_disk: bool,
) -> Result<(), RunDirError> {
    match std::fs::create_dir_all(run.root()) {
        // What is in the way is told below.
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(RunDirError::Io {
                action: "make",
                hint: "",
                path: run.root().to_owned(),
                source: error,
            });
        }
        _ => {}
    }
    open(CWD, run.root().as_os_str(), OFlags::PATH, run.root())?;
    for wanted in table(run, options, istio) {
        let directory = ensure(&wanted)?;
        if wanted.path.starts_with(run.root()) && !allow_disk {
            check_tmpfs(&directory, &wanted.path)?;
        }
    }
    Ok(())
}

fn fail(action: &'static str, path: &Path) -> impl Fn(Errno) -> RunDirError {
    let path = path.to_owned();
    move |errno| RunDirError::Io {
        action,
        hint: if action == "set the group of" && errno == Errno::PERM {
            " (a group of this process, or CAP_CHOWN, is needed)"
        } else {
            ""
        },
        path: path.clone(),
        source: errno.into(),
    }
}

fn ensure(wanted: &Wanted) -> Result<OwnedFd, RunDirError> {
    let path = &wanted.path;
    let (parent, name) = match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => (parent, name),
        _ => (Path::new("/"), OsStr::new(".")),
    };
    let parent = rustix::fs::open(parent, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(fail("open the parent of", path))?;
    match rustix::fs::mkdirat(&parent, name, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(fail("make", path)(errno)),
    }
    // Somebody else's may not be ours to open, but to name.
    let named = open(&parent, name, OFlags::PATH, path)?;
    let found = rustix::fs::fstat(&named).map_err(fail("look at", path))?;
    let ours = rustix::process::geteuid().as_raw();
    if found.st_uid != ours {
        return Err(RunDirError::Owner {
            path: path.clone(),
            uid: found.st_uid,
            mode: found.st_mode & 0o7777,
            allowed_uid: ours,
        });
    }
    if (found.st_gid, found.st_mode & 0o7777) == (wanted.gid, wanted.mode) {
        return Ok(named);
    }
    let directory = open(&parent, name, OFlags::RDONLY, path)?;
    // The mode while the group is ours: without CAP_FSETID, set-group-ID is kept only for a group that we are in. Another group
    // keeps a directory's mode.
    let group = |gid: u32| {
        rustix::fs::fchown(&directory, None, Some(Gid::from_raw(gid))).map_err(fail("set the group of", path))
    };
    let own = rustix::process::getegid().as_raw();
    if found.st_gid != own {
        group(own)?;
    }
    rustix::fs::fchmod(&directory, Mode::from_raw_mode(wanted.mode))
        .map_err(fail("set the mode of", path))?;
    if wanted.gid != own {
        group(wanted.gid)?;
    }
    tracing::info!(target: "audit", path = %path.display(), gid = wanted.gid, mode = format!("{:04o}", wanted.mode), "prepared a directory");
    Ok(directory)
}

fn open(parent: impl AsFd, name: &OsStr, how: OFlags, path: &Path) -> Result<OwnedFd, RunDirError> {
    let flags = how | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(parent, name, flags, Mode::empty()).map_err(|errno| match errno {
        Errno::LOOP | Errno::NOTDIR => RunDirError::NotADirectory {
            path: path.to_owned(),
        },
        errno => fail("open", path)(errno),
    })
}

fn check_tmpfs(directory: &OwnedFd, path: &Path) -> Result<(), RunDirError> {
    let found = rustix::fs::fstatfs(directory).map_err(fail("look at", path))?;
    if u64::try_from(found.f_type).ok() == Some(TMPFS) {
        Ok(())
    } else {
        Err(RunDirError::NotTmpfs {
            path: path.to_owned(),
        })
    }
}

/// Checks the directory that the installer itself uses: where the plugin's credentials and its log socket are.
pub(crate) fn check(run: &RunDir, allow_disk: bool) -> Result<(), RunDirError> {
    let path = run.kubeconfig().parent().map(PathBuf::from).unwrap_or_default();
    let directory = open(CWD, path.as_os_str(), OFlags::PATH, &path)?;
    let found: Stat =
        rustix::fs::statat(&directory, "", AtFlags::EMPTY_PATH).map_err(fail("look at", &path))?;
    let ours = rustix::process::geteuid().as_raw();
    if found.st_uid != ours || found.st_mode & 0o022 != 0 {
        return Err(RunDirError::Owner {
            uid: found.st_uid,
            mode: found.st_mode & 0o7777,
            allowed_uid: ours,
            path,
        });
    }
    if allow_disk {
        Ok(())
    } else {
        check_tmpfs(&directory, &path)
    }
}

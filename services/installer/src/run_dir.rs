//! The run directories: made once, before any other container of the agent starts, and checked by whoever relies on them.
//!
//! Each socket has a directory of its own, whose owner and mode say who may make the socket and who may reach it.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::process::{Gid, Uid};
use sluice_proto::paths::RunDir;

use crate::config::PrepareOptions;

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
    #[error("{} belongs to uid {uid}, mode {mode:04o}; it must be uid {allowed_uid}, and nobody else may write (run `installer prepare` first)", path.display())]
    Owner {
        path: PathBuf,
        uid: u32,
        mode: u32,
        allowed_uid: u32,
    },
}

/// A directory as it is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Wanted {
    path: PathBuf,
    uid: u32,
    gid: u32,
    mode: u32,
}

/// Who makes and who reaches each socket, as owner, group and mode of its directory.
fn table(run: &RunDir, options: &PrepareOptions) -> Vec<Wanted> {
    let parent = |socket: PathBuf| socket.parent().map(PathBuf::from).unwrap_or_default();
    let broker = options.broker_uid;
    let mut wanted = vec![
        (run.root().to_owned(), 0, 0, 0o755),
        (parent(run.cni_socket()), 0, 0, 0o700),
        // Set-group-ID: the executor may not give its sockets to the broker's group, so the directory does.
        (parent(run.executor_socket()), 0, broker, 0o2750),
        (parent(run.opener_socket()), 0, 0, 0o700),
        (parent(run.sandboxes()), 0, 0, 0o700),
        // The other way round: root without CAP_DAC_OVERRIDE reaches the broker's sockets through its group.
        (parent(run.workload_socket()), broker, 0, 0o2750),
        (parent(run.node_socket()), broker, 0, 0o2750),
        (parent(run.kubeconfig()), 0, 0, 0o700),
    ];
    wanted.extend(
        options
            .ztunnel_dir
            .clone()
            .map(|path| (path, broker, options.ztunnel_gid, 0o2750)),
    );
    wanted
        .into_iter()
        .map(|(path, uid, gid, mode)| Wanted { path, uid, gid, mode })
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

/// Makes every directory, or gives an existing one owner and mode. Needs CAP_CHOWN, because some are the broker's.
pub(crate) fn prepare(
    run: &RunDir,
    options: &PrepareOptions,
    istio: Option<&Path>,
    allow_disk: bool,
) -> Result<(), RunDirError> {
    let mut table = table(run, options);
    // The broker replaces one socket in it, we another, and the agent that it belongs to still runs.
    table.extend(istio.map(|path| Wanted {
        path: path.to_owned(),
        uid: 0,
        gid: options.broker_uid,
        mode: 0o770,
    }));
    for wanted in &table {
        let directory = ensure(wanted)?;
        if wanted.path == run.root() && !allow_disk {
            check_tmpfs(&directory, &wanted.path)?;
        }
    }
    Ok(())
}

fn fail(action: &'static str, path: &Path) -> impl Fn(Errno) -> RunDirError {
    let path = path.to_owned();
    move |errno| RunDirError::Io {
        action,
        hint: if action == "give away" && errno == Errno::PERM {
            " (CAP_CHOWN is needed)"
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
    // A directory that was given away already may not be ours to open, but to name.
    let named = open(&parent, name, OFlags::PATH, path)?;
    let found = rustix::fs::fstat(&named).map_err(fail("look at", path))?;
    if (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (wanted.uid, wanted.gid, wanted.mode) {
        return Ok(named);
    }
    // Mode first, while owner and group are ours: without CAP_FOWNER and CAP_FSETID nobody else's directory can be
    // changed, and set-group-ID is kept only for a group that we are in. Giving a directory away keeps its mode.
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    if (found.st_uid, found.st_gid) != (uid.as_raw(), gid.as_raw()) {
        own(&named, uid, gid, path)?;
    }
    let directory = open(&parent, name, OFlags::RDONLY, path)?;
    let opened = rustix::fs::fstat(&directory).map_err(fail("look at", path))?;
    if (opened.st_dev, opened.st_ino) != (found.st_dev, found.st_ino) {
        return Err(RunDirError::NotADirectory { path: path.clone() });
    }
    rustix::fs::fchmod(&directory, Mode::from_raw_mode(wanted.mode))
        .map_err(fail("set the mode of", path))?;
    if (uid.as_raw(), gid.as_raw()) != (wanted.uid, wanted.gid) {
        own(
            &directory,
            Uid::from_raw(wanted.uid),
            Gid::from_raw(wanted.gid),
            path,
        )?;
    }
    tracing::info!(target: "audit", path = %path.display(), uid = wanted.uid, gid = wanted.gid, mode = format!("{:04o}", wanted.mode), "prepared a directory");
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

fn own(directory: &OwnedFd, uid: Uid, gid: Gid, path: &Path) -> Result<(), RunDirError> {
    rustix::fs::chownat(directory, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH)
        .map_err(fail("give away", path))
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

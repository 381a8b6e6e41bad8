//! The run directories as a node has them: one a socket, each with the owner and mode its peers need.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use anyhow::Context;
use nix::unistd::{Gid, Uid};
use sluice_proto::paths::{BROKER_UID, RunDir};

/// Makes all directories below `run`. The setgid bit gives sockets the broker's group.
pub fn prepare(run: &RunDir) -> anyhow::Result<()> {
    let parent = |path: PathBuf| path.parent().map(PathBuf::from).unwrap_or_default();
    let (root, broker) = ((0, 0), (0, BROKER_UID));
    let directories = [
        (run.root().to_owned(), root, 0o755),
        (parent(run.cni_socket()), root, 0o700),
        (run.tombstones(), root, 0o700),
        (parent(run.executor_socket()), broker, 0o2750),
        (parent(run.opener_socket()), root, 0o700),
        (parent(run.sandboxes()), root, 0o700),
        (run.sandboxes(), root, 0o700),
        (parent(run.workload_socket()), broker, 0o2770),
        (parent(run.zds_socket()), broker, 0o2770),
        (parent(run.compatibility_socket()), broker, 0o2770),
    ];
    for (path, (uid, gid), mode) in directories {
        std::fs::create_dir_all(&path).with_context(|| format!("making {}", path.display()))?;
        nix::unistd::chown(&path, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode))?;
    }
    Ok(())
}

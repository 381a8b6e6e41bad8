//! The directories of the broker's sockets, which are root's: the installer of the same agent makes them and gives them to the
//! broker's group.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::unistd::{AccessFlags, access};

use crate::service::Config;

/// The installer starts with us, and makes them before anything else.
const PATIENCE: Duration = Duration::from_secs(30);

/// Between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// The broker could not make a socket.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to {}, where the broker's sockets are to be, after {PATIENCE:?}; the installer makes it and gives it to group {group} (its log says why not), or run `installer prepare`", path.display())]
pub struct DirectoryError {
    path: PathBuf,
    group: u32,
    #[source]
    source: nix::Error,
}

/// Waits until every directory is there and may be written to; `with_installer`: also that of the socket for an installer.
pub fn wait(config: &Config, with_installer: bool) -> Result<(), DirectoryError> {
    let run = &config.run;
    let sockets = [
        Some(run.workload_socket()),
        with_installer.then(|| run.node_socket()),
        Some(config.zds.socket.clone()),
        config.istio_cni.map(|_| run.compatibility_socket()),
    ];
    let end = Instant::now() + PATIENCE;
    for directory in sockets.iter().flatten().filter_map(|socket| socket.parent()) {
        wait_for(directory, end)?;
    }
    Ok(())
}

fn wait_for(directory: &Path, end: Instant) -> Result<(), DirectoryError> {
    let mut said = false;
    loop {
        let Err(source) = access(directory, AccessFlags::W_OK | AccessFlags::X_OK) else {
            return Ok(());
        };
        if Instant::now() >= end {
            return Err(DirectoryError {
                path: directory.to_owned(),
                group: nix::unistd::getegid().as_raw(),
                source,
            });
        }
        if !said {
            tracing::info!(path = %directory.display(), "waiting for the installer to make a directory");
            said = true;
        }
        std::thread::sleep(LOOK);
    }
}

//! Removes what an uninstall leaves on purpose: the stand-in for the plugin, once nobody can call it any more, and the
//! directories that were ours.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::config::{Flags, PurgeOptions};
use crate::entry::{PLUGIN, QUOTED};
use crate::files::{self, FileError};
use crate::health;
use crate::host_root::{self, HostRootError};
use crate::observe;
use crate::run_dir;

/// The stand-in for the plugin cannot be removed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PurgeError {
    #[error("an installer runs on this node and needs all of it: take its DaemonSet off the node first")]
    Running,
    #[error("{name} still names the plugin: uninstall first, or say --force")]
    Named { name: String },
    #[error("{} is the result of an ADD through the plugin whose DEL is still to come: wait until its pod is gone, or say --force", path.display())]
    Pending { path: PathBuf },
    #[error("cannot look for results below {}", path.display())]
    Cache {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is no directory, so that nothing is known of the plugin: name the directory of the runtime's plugins (--cni-bin-dir)", path.display())]
    NoBinDir { path: PathBuf },
    #[error(transparent)]
    HostRoot(#[from] HostRootError),
    #[error(transparent)]
    File(#[from] FileError),
}

/// Removes the stand-in that answers DEL, if nobody can call it any more, and directories of ours that are empty then.
/// The flags are those that were followed already.
pub(crate) fn purge(flags: &Flags, options: &PurgeOptions) -> Result<(), PurgeError> {
    if let Some(path) = flags.cni_bin_dir.iter().find(|path| !path.is_dir()) {
        return Err(PurgeError::NoBinDir { path: path.clone() });
    }
    if !options.force {
        if health::ask(&flags.run()).is_ok() {
            return Err(PurgeError::Running);
        }
        if let Some(name) = named_in(&flags.cni_net_dir) {
            return Err(PurgeError::Named { name });
        }
        if let Some(cache) = &options.cni_cache_dir
            && let Some(path) = pending(&host_root::follow(&options.host_root, cache)?)?
        {
            return Err(PurgeError::Pending { path });
        }
    }
    for directory in &flags.cni_bin_dir {
        let path = directory.join(PLUGIN);
        if fs::symlink_metadata(&path).is_ok() {
            files::delete(&path, None)?;
            tracing::info!(target: "audit", path = %path.display(), "removed the plugin's stand-in");
        }
    }
    for directory in run_dir::all(&flags.run()) {
        remove_empty_within(&directory);
    }
    remove_empty(flags.run().root());
    if let Some(directory) = flags.kubeconfig().parent() {
        remove_empty(directory);
    }
    tracing::info!("purged");
    Ok(())
}

/// A configuration that names the plugin.
fn named_in(net_dir: &Path) -> Option<String> {
    let net = observe::net_dir(net_dir);
    let nested = net.drop_ins.into_iter().flat_map(|(network, files)| {
        let within = move |(name, file)| (format!("{network}/{name}"), file);
        files.into_iter().map(within)
    });
    net.files
        .into_iter()
        .chain(nested)
        .find(|(_, file)| file.mentions(QUOTED))
        .map(|(name, _)| name)
}

/// A result that libcni keeps (`results/` or `cache/results/` below its cache directory) and that names the plugin in
/// the network configuration it was made with.
fn pending(cache: &Path) -> Result<Option<PathBuf>, PurgeError> {
    for (directory, may_lack) in [
        (cache.join("results"), true),
        (cache.join("cache/results"), true),
        (cache.to_owned(), false),
    ] {
        let entries = match fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(error) if may_lack && error.kind() == io::ErrorKind::NotFound => continue,
            Err(source) => {
                return Err(PurgeError::Cache {
                    path: directory,
                    source,
                });
            }
        };
        for entry in entries.flatten() {
            let path = entry.path();
            if entry.file_type().is_ok_and(|kind| kind.is_file()) && names_plugin(&path) {
                return Ok(Some(path));
            }
        }
    }
    Ok(None)
}

/// libcni keeps the configuration in base64 (`config`), so that its text is not there to be searched.
fn names_plugin(path: &Path) -> bool {
    use base64::Engine;
    #[derive(serde::Deserialize)]
    struct Cached {
        config: Option<String>,
    }
    let Ok((bytes, _)) = files::read(path) else {
        return false;
    };
    let mentions = |bytes: &[u8]| {
        bytes
            .windows(QUOTED.len())
            .any(|window| window == QUOTED.as_bytes())
    };
    let config = serde_json::from_slice::<Cached>(&bytes)
        .ok()
        .and_then(|cached| cached.config);
    let config = config.and_then(|config| base64::engine::general_purpose::STANDARD.decode(config).ok());
    mentions(&bytes) || config.is_some_and(|config| mentions(&config))
}

/// Removes a directory of ours if there is nothing in it but such directories.
fn remove_empty_within(path: &Path) {
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_empty_within(&entry.path());
        }
    }
    remove_empty(path);
}

/// Removes a directory if there is nothing in it. Otherwise it stays, as does one that is mounted in our container.
fn remove_empty(path: &Path) {
    if fs::remove_dir(path).is_ok() {
        tracing::info!(target: "audit", path = %path.display(), "removed an empty directory");
    }
}

//! Looks at the node. Every read is bounded, and what cannot be read is a fact like any other.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::entry::PLUGIN;
use crate::files;
use crate::network::has_extension;
use crate::node::{BinDir, Binary, File, Kubeconfig, NetDir, is_ours};

/// More files than this in one directory are not looked at.
const MOST_FILES: usize = 1000;
/// Mode bit of a directory whose files get its group.
const SET_GROUP_ID: u32 = 0o2000;
/// Mode of the plugin.
pub(crate) const PLUGIN_MODE: u32 = 0o755;

/// Looks at the network configuration directory.
pub(crate) fn net_dir(path: &Path) -> NetDir {
    let mut net = NetDir::default();
    let entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return net,
        Err(error) => {
            net.unreadable = Some(sluice_runtime::telemetry::chain(&error));
            return net;
        }
    };
    net.group = fs::metadata(path)
        .ok()
        .filter(|metadata| metadata.mode() & SET_GROUP_ID != 0)
        .map(|metadata| metadata.gid());
    for entry in entries.flatten().take(MOST_FILES) {
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() {
            let files = drop_ins(&entry.path());
            if !files.is_empty() {
                net.drop_ins.insert(name, files);
            }
        } else if is_configuration(&name) {
            // A name that is gone by now is not there.
            if let Some(file) = file(&entry.path(), kind.is_symlink()) {
                net.files.insert(name, file);
            }
        }
    }
    net
}

/// Directories of drop-ins, as far as they are looked at.
pub(crate) fn directories_in(path: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let nested = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    nested.take(32).map(|entry| entry.path()).collect()
}

/// Whether some runtime, or we, would take a file of this name for a configuration.
pub(crate) fn is_configuration(name: &str) -> bool {
    is_ours(name)
        || ["conf", "conflist", "json"]
            .iter()
            .any(|extension| has_extension(name, extension))
}

fn drop_ins(directory: &Path) -> BTreeMap<String, File> {
    let Ok(entries) = fs::read_dir(directory) else {
        return BTreeMap::new();
    };
    let found = entries.flatten().take(MOST_FILES).filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let kind = entry.file_type().ok()?;
        let wanted = has_extension(&name, "conf") && !kind.is_dir();
        wanted
            .then(|| file(&entry.path(), kind.is_symlink()))
            .flatten()
            .map(|file| (name, file))
    });
    found.collect()
}

fn file(path: &Path, link: bool) -> Option<File> {
    match files::read(path) {
        Ok((bytes, metadata)) => Some(File {
            content: Ok(bytes),
            mode: metadata.mode() & 0o7777,
            uid: metadata.uid(),
            gid: metadata.gid(),
            link,
        }),
        Err(error) if error.kind() == io::ErrorKind::NotFound && !link => None,
        Err(error) => {
            let metadata = fs::symlink_metadata(path).ok();
            Some(File {
                content: Err(sluice_runtime::telemetry::chain(&error)),
                mode: metadata.as_ref().map_or(0, |metadata| metadata.mode() & 0o7777),
                uid: metadata.as_ref().map_or(0, MetadataExt::uid),
                gid: metadata.as_ref().map_or(0, MetadataExt::gid),
                link,
            })
        }
    }
}

/// Looks at the plugin's credentials.
pub(crate) fn kubeconfig(path: &Path) -> Kubeconfig {
    match files::read(path) {
        Ok((bytes, metadata)) => Kubeconfig::Present(bytes, metadata.mode() & 0o7777),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Kubeconfig::Missing,
        Err(error) => Kubeconfig::Unreadable(sluice_runtime::telemetry::chain(&error)),
    }
}

/// Looks at plugin directories; remembers which files it has compared, byte for byte, with the plugin to be installed.
#[derive(Debug, Default)]
pub(crate) struct BinDirs {
    compared: HashMap<PathBuf, (Identity, Identity)>,
}

/// Changes whenever the content of a file does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl From<&fs::Metadata> for Identity {
    fn from(metadata: &fs::Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

impl BinDirs {
    /// Looks at one, where `source` is what should be in it.
    pub(crate) fn look(&mut self, path: &Path, host: &Path, source: &Path) -> BinDir {
        let mut names = BTreeSet::new();
        let ours = match fs::read_dir(path) {
            Ok(entries) => {
                names.extend(
                    entries
                        .flatten()
                        .filter_map(|entry| entry.file_name().into_string().ok()),
                );
                self.compare(&path.join(PLUGIN), source)
            }
            Err(error) => Err(error),
        };
        BinDir {
            host: host.to_owned(),
            ours: ours.map_err(|error| sluice_runtime::telemetry::chain(&error)),
            names,
        }
    }

    fn compare(&mut self, installed: &Path, source: &Path) -> io::Result<Binary> {
        let metadata = match fs::symlink_metadata(installed) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Binary::Missing),
            Err(error) => return Err(error),
        };
        if !metadata.is_file() || metadata.mode() & 0o7777 != PLUGIN_MODE {
            return Ok(Binary::Differs);
        }
        let identities = (Identity::from(&metadata), Identity::from(&fs::metadata(source)?));
        if self.compared.get(installed) == Some(&identities) {
            return Ok(Binary::Current);
        }
        if !files::same(installed, source)? {
            return Ok(Binary::Differs);
        }
        self.compared.insert(installed.to_owned(), identities);
        Ok(Binary::Current)
    }
}

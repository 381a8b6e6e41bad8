//! Tombstones: what the plugin leaves behind when DEL finds no executor, so that the executor lets go of the
//! sandbox before it restores anything. One JSON file an attachment in [`RunDir::tombstones`].
//!
//! [`RunDir::tombstones`]: crate::paths::RunDir::tombstones

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::id::Attachment;

/// Longest file that is read; a tombstone with the longest names is shorter.
const MAX_BYTES: u64 = 4096;

/// An attachment that the runtime has deleted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tombstone {
    /// Which one.
    pub attachment: Attachment,
    /// When DEL came, Unix time in milliseconds. An ADD that was recorded later is not meant.
    pub deleted_unix_ms: u64,
}

/// A file in the tombstone directory that is not a tombstone, or cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("tombstone {} cannot be read", path.display())]
pub struct UnreadableTombstone {
    /// The file.
    pub path: PathBuf,
    /// Why.
    #[source]
    pub source: io::Error,
}

impl Tombstone {
    /// Name of an attachment's file: a hash, because the names in it may be longer than a file name can be.
    pub fn file_name(attachment: &Attachment) -> String {
        // FNV-1a, 128 bit. '/' occurs in none of the three names.
        let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
        for byte in attachment.to_string().bytes() {
            hash = (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
        format!("{hash:032x}.json")
    }

    /// Writes the file in one step: it is there completely or not at all.
    pub fn write(&self, directory: &Path) -> io::Result<()> {
        let path = directory.join(Self::file_name(&self.attachment));
        let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
        std::fs::write(&temporary, serde_json::to_vec(self)?)?;
        std::fs::rename(&temporary, &path).inspect_err(|_| {
            let _ = std::fs::remove_file(&temporary);
        })
    }

    /// Removes the file of an attachment; one that is not there is no error.
    pub fn remove(directory: &Path, attachment: &Attachment) -> io::Result<()> {
        match std::fs::remove_file(directory.join(Self::file_name(attachment))) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        }
    }

    /// Reads every tombstone of a directory; a directory that does not exist has none.
    pub fn read_all(directory: &Path) -> io::Result<Vec<Result<Self, UnreadableTombstone>>> {
        let entries = match std::fs::read_dir(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut tombstones = Vec::new();
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "json") {
                tombstones.push(read(&path).map_err(|source| UnreadableTombstone { path, source }));
            }
        }
        Ok(tombstones)
    }
}

fn read(path: &Path) -> io::Result<Tombstone> {
    use std::io::Read;
    let mut bytes = Vec::new();
    std::fs::File::open(path)?
        .take(MAX_BYTES)
        .read_to_end(&mut bytes)?;
    Ok(serde_json::from_slice(&bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{ContainerId, InterfaceName, NetworkName};

    fn attachment(container: &str) -> Attachment {
        Attachment {
            network_name: NetworkName::parse("k8s-pod-network").unwrap(),
            container_id: ContainerId::parse(container).unwrap(),
            ifname: InterfaceName::parse("eth0").unwrap(),
        }
    }

    #[test]
    fn what_was_written_is_read_once_and_gone_after_remove() {
        let directory = tempfile::tempdir().unwrap();
        let tombstone = Tombstone {
            attachment: attachment(&"c".repeat(253)),
            deleted_unix_ms: 7,
        };
        tombstone.write(directory.path()).unwrap();
        tombstone.write(directory.path()).unwrap();
        let all = Tombstone::read_all(directory.path()).unwrap();
        assert_eq!(all.len(), 1);
        assert_eq!(all[0].as_ref().unwrap(), &tombstone);
        Tombstone::remove(directory.path(), &tombstone.attachment).unwrap();
        Tombstone::remove(directory.path(), &tombstone.attachment).unwrap();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn garbage_is_reported_with_its_path_and_hides_nothing() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("x.json"), "{").unwrap();
        let good = Tombstone {
            attachment: attachment("c1"),
            deleted_unix_ms: 1,
        };
        good.write(directory.path()).unwrap();
        let all = Tombstone::read_all(directory.path()).unwrap();
        assert_eq!(all.len(), 2);
        let bad = all.iter().find_map(|read| read.as_ref().err()).unwrap();
        assert!(bad.to_string().contains("x.json"));
        assert!(all.iter().flatten().any(|read| *read == good));
    }

    #[test]
    fn a_missing_directory_holds_no_tombstones() {
        assert!(
            Tombstone::read_all(Path::new("/nonexistent/tombstones"))
                .unwrap()
                .is_empty()
        );
    }
}

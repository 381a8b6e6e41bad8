//! The sandbox table on disk: one file a sandbox, written completely before the runtime is answered.
//!
//! The directory is a tmpfs that survives the executor but not the machine. A file that cannot be read is moved
//! aside and reported; it never keeps the others from being served.

use std::fs;
use std::io::{self, Write};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sluice_proto::ambient::Desired;
use sluice_proto::id::{Attachment, PodRef};
use sluice_proto::sandbox::NetnsIdentity;

pub mod probes;

/// Version of the file format; another one is moved aside.
pub const FORMAT: u32 = 1;

/// What is known about a sandbox for ever.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// [`FORMAT`].
    pub format: u32,
    /// Its key.
    pub attachment: Attachment,
    /// Grows with each new ADD.
    pub generation: u64,
    /// The pod.
    pub pod: PodRef,
    /// Its addresses, from prevResult.
    pub addresses: Vec<IpAddr>,
    /// Its network namespace.
    pub netns: NetnsIdentity,
    /// Where the runtime mounted it; empty for an adopted one.
    pub netns_path: String,
    /// When its last ADD came, Unix time in milliseconds: a tombstone that is older is not about it.
    pub added_unix_ms: u64,
    /// What was programmed last; written before the kernel is asked, so that a crash in between is mended.
    pub programmed: Option<Desired>,
    /// [`RULE_SCHEMA`](crate::rules::RULE_SCHEMA) of the executor by whose rules the namespace was last seen or made right.
    #[serde(default)]
    pub rule_schema: u32,
    /// The runtime was told that the pod may start.
    pub admitted: bool,
    /// An ADD waits for the broker.
    pub pending: bool,
    /// Found in a running pod.
    pub adopted: bool,
}

/// The table could not be changed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}", path.display())]
pub struct TableError {
    /// What was being done.
    pub action: &'static str,
    /// Which file.
    pub path: PathBuf,
    /// Why.
    #[source]
    pub source: io::Error,
}

/// A file that could not be used and was moved aside.
#[derive(Debug)]
pub struct Unreadable {
    /// Where it is now.
    pub path: PathBuf,
    /// Why.
    pub reason: String,
}

/// The directory of sandbox files.
#[derive(Debug, Clone)]
pub struct Table {
    directory: PathBuf,
}

impl Table {
    /// The table in `directory`, which is made if it is not there.
    pub fn open(directory: impl Into<PathBuf>) -> Result<Self, TableError> {
        let directory = directory.into();
        make_directory(&directory)?;
        Ok(Self { directory })
    }

    /// Writes a sandbox, replacing what was there.
    pub fn write(&self, record: &Record) -> Result<(), TableError> {
        let path = self.path_of(&record.attachment);
        let bytes = serde_json::to_vec(record).map_err(|error| TableError {
            action: "encode",
            path: path.clone(),
            source: io::Error::other(error),
        })?;
        write_whole(&path, &bytes)
    }

    /// Removes a sandbox; one that is not there is not an error.
    pub fn remove(&self, attachment: &Attachment) -> Result<(), TableError> {
        remove_file(&self.path_of(attachment))
    }

    /// Every sandbox, and the files that had to be moved aside.
    pub fn load(&self) -> Result<(Vec<Record>, Vec<Unreadable>), TableError> {
        let mut records = Vec::new();
        let mut unreadable = Vec::new();
        for path in list(&self.directory, "json")? {
            match read(&path).and_then(|record| self.named_rightly(&path, record)) {
                Ok(record) => records.push(record),
                Err(reason) => unreadable.push(set_aside(path, reason)),
            }
        }
        Ok((records, unreadable))
    }

    fn named_rightly(&self, path: &Path, record: Record) -> Result<Record, String> {
        if path == self.path_of(&record.attachment) {
            return Ok(record);
        }
        Err(format!(
            "it is about {}, which has another file",
            record.attachment
        ))
    }

    fn path_of(&self, attachment: &Attachment) -> PathBuf {
        self.directory.join(format!("{}.json", file_stem(attachment)))
    }
}

/// File name of an attachment. The ids exclude `/`; names too long for a file (255 bytes) are cut and told apart by
/// a hash.
pub fn file_stem(attachment: &Attachment) -> String {
    // '@' is in neither a network name nor a container id, so the parts cannot run together.
    let whole = format!(
        "{}@{}@{}",
        attachment.network_name, attachment.container_id, attachment.ifname
    );
    if whole.len() <= 200 {
        return whole;
    }
    let hash = whole.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let start: String = whole.chars().take(180).collect();
    format!("{start}@{hash:016x}")
}

fn read(path: &Path) -> Result<Record, String> {
    let bytes = fs::read(path).map_err(|error| error.to_string())?;
    let record: Record = serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
    if record.format == FORMAT {
        Ok(record)
    } else {
        Err(format!("format {} is not {FORMAT}", record.format))
    }
}

fn set_aside(path: PathBuf, reason: String) -> Unreadable {
    let aside = path.with_extension("unreadable");
    match fs::rename(&path, &aside) {
        Ok(()) => Unreadable { path: aside, reason },
        Err(error) => Unreadable {
            path,
            reason: format!("{reason}; and it cannot be moved aside: {error}"),
        },
    }
}

/// Makes a directory that only root can look into.
pub(crate) fn make_directory(directory: &Path) -> Result<(), TableError> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(|source| TableError {
            action: "create directory",
            path: directory.to_owned(),
            source,
        })
}

/// Files of a directory with one extension, in name order.
pub(crate) fn list(directory: &Path, extension: &str) -> Result<Vec<PathBuf>, TableError> {
    let failed = |source| TableError {
        action: "list",
        path: directory.to_owned(),
        source,
    };
    let mut paths = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|e| e == extension) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// A file appears with all its bytes or not at all. No fsync: tmpfs has no disk, and after a power loss nothing
/// that the table speaks of exists any more.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), TableError> {
    let temporary = path.with_extension("new");
    let failed = |action| {
        move |source| TableError {
            action,
            path: path.to_owned(),
            source,
        }
    };
    let mut file = fs::File::create(&temporary).map_err(failed("create"))?;
    file.write_all(bytes).map_err(failed("write"))?;
    drop(file);
    fs::rename(&temporary, path).map_err(failed("replace"))
}

/// Removes a file; one that is not there is not an error.
pub(crate) fn remove_file(path: &Path) -> Result<(), TableError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(TableError {
            action: "remove",
            path: path.to_owned(),
            source: error,
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
pub(crate) mod tests;

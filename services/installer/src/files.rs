//! Files that others read while we write: they see the old one or the new one, each complete.
//!
//! The new file is made under a temporary name in the same directory and renamed. That also is what wakes container
//! runtimes: containerd reloads on the rename away from the temporary name, and would not notice a file that is moved in
//! from another directory. No runtime takes a temporary name for a configuration, because of how it ends.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{CWD, OFlags, RenameFlags, XattrFlags};
use rustix::io::Errno;
use rustix::process::Gid;

use crate::plan::FileMode;

/// What stands between a file's name and a number in the name of its successor.
const TEMPORARY: &str = ".sluice-tmp.";
/// Longest configuration that is read, in bytes.
const LONGEST: u64 = 1024 * 1024;

/// A file could not be changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileError {
    #[error("cannot {action} {}{hint}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        /// Who could, where that is known.
        hint: String,
        #[source]
        source: io::Error,
    },
    #[error("{} was changed by somebody else in the meantime", path.display())]
    Changed { path: PathBuf },
}

impl FileError {
    fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io {
            action,
            hint: hint(&path, &source),
            path,
            source,
        }
    }
}

/// What an operator has to know about the directory.
fn hint(path: &Path, error: &io::Error) -> String {
    let Some(directory) = path.parent() else {
        return String::new();
    };
    match error.kind() {
        io::ErrorKind::PermissionDenied => fs::metadata(directory).map_or_else(
            |_| String::new(),
            |metadata| {
                format!(
                    " (the directory belongs to uid {}, mode {:04o}; we are uid {} without CAP_DAC_OVERRIDE)",
                    metadata.uid(),
                    metadata.mode() & 0o7777,
                    rustix::process::geteuid().as_raw()
                )
            },
        ),
        io::ErrorKind::ReadOnlyFilesystem => {
            " (read-only: on GKE, k3s, Talos, Bottlerocket and others the directory is elsewhere; set the platform)".into()
        }
        _ => String::new(),
    }
}

/// Whether the name is one of our temporary ones.
pub(crate) fn is_temporary(name: &OsStr) -> bool {
    let Some(name) = name.to_str() else { return false };
    name.rsplit_once(TEMPORARY).is_some_and(|(stem, number)| {
        !stem.is_empty() && !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit())
    })
}

/// Removes what a killed process left under temporary names; gives what could not be removed.
pub(crate) fn sweep(directory: &Path) -> Vec<(PathBuf, io::Error)> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter(|entry| is_temporary(&entry.file_name()))
        .filter_map(|entry| Some((entry.path(), fs::remove_file(entry.path()).err()?)))
        .collect()
}

/// Reads a regular file of bounded size; neither a pipe nor a device can make it wait.
pub(crate) fn read(path: &Path) -> io::Result<(Vec<u8>, fs::Metadata)> {
    let mut file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut bytes = Vec::new();
    (&mut file).take(LONGEST + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LONGEST {
        return Err(io::Error::other(format!("it is longer than {LONGEST} bytes")));
    }
    Ok((bytes, metadata))
}

/// Replaces `path`, if it still holds `expect` (where given), by a file with `content`.
pub(crate) fn write(
    path: &Path,
    content: &[u8],
    mode: FileMode,
    expect: Option<&[u8]>,
) -> Result<(), FileError> {
    let new = Successor::of(path, mode, |file| file.write_all(content))?;
    match expect {
        None => new.publish(),
        Some(expect) => new.exchange(expect, Successor::swap),
    }
}

/// Replaces `path` by a copy of `source`, in pieces so that its size does not become ours.
pub(crate) fn copy(source: &Path, path: &Path, mode: u32) -> Result<(), FileError> {
    let mut from = File::open(source).map_err(FileError::io("read", source))?;
    let new = Successor::of(path, FileMode::Exactly(mode), |file| {
        let mut buffer = vec![0; 64 * 1024];
        loop {
            match from.read(&mut buffer)? {
                0 => return Ok(()),
                count => file.write_all(&buffer[..count])?,
            }
        }
    })?;
    new.publish()
}

/// Removes `path`, if it still holds `expect` (where given). One that is gone is as it should be.
pub(crate) fn delete(path: &Path, expect: Option<&[u8]>) -> Result<(), FileError> {
    if let Some(expect) = expect
        && let Ok((found, _)) = read(path)
        && found != expect
    {
        return Err(FileError::Changed {
            path: path.to_owned(),
        });
    }
    match fs::remove_file(path) {
        Ok(()) => sync_directory(path).map_err(FileError::io("remove", path)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(FileError::io("remove", path)(error)),
    }
}

/// Whether both files have the same bytes.
pub(crate) fn same(one: &Path, other: &Path) -> io::Result<bool> {
    let (mut one, mut other) = (File::open(one)?, File::open(other)?);
    if one.metadata()?.len() != other.metadata()?.len() {
        return Ok(false);
    }
    let (mut left, mut right) = (vec![0; 64 * 1024], vec![0; 64 * 1024]);
    loop {
        let count = one.read(&mut left)?;
        if count == 0 {
            return Ok(other.read(&mut right[..1])? == 0);
        }
        match other.read_exact(&mut right[..count]) {
            Ok(()) if left[..count] == right[..count] => {}
            Ok(()) => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
            Err(error) => return Err(error),
        }
    }
}

/// A complete file under a temporary name, on disk; removed if it does not take its place.
struct Successor<'a> {
    path: &'a Path,
    temporary: PathBuf,
    published: bool,
}

impl<'a> Successor<'a> {
    fn of(
        path: &'a Path,
        mode: FileMode,
        fill: impl FnOnce(&mut File) -> io::Result<()>,
    ) -> Result<Self, FileError> {
        let number = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_nanos();
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(format!("{TEMPORARY}{number}"));
        let temporary = PathBuf::from(temporary);
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&temporary)
            .map_err(FileError::io("create a file to replace", path))?;
        let new = Self {
            path,
            temporary,
            published: false,
        };
        new.give_group(&file, mode)?;
        let write = || {
            fill(&mut file)?;
            match mode {
                FileMode::Exactly(mode) | FileMode::Like { mode, .. } => {
                    file.set_permissions(Permissions::from_mode(mode))?;
                }
                FileMode::Kept | FileMode::KeptButGroup => keep_attributes(path, &file)?,
            }
            file.sync_all()
        };
        write().map_err(FileError::io("write a file to replace", path))?;
        Ok(new)
    }

    /// Before the mode is set, so that it is never given to another group than the one it is meant for.
    fn give_group(&self, file: &File, mode: FileMode) -> Result<(), FileError> {
        let wanted = match mode {
            FileMode::Exactly(_) => return Ok(()),
            FileMode::Like { gid, .. } => Ok(gid),
            FileMode::Kept | FileMode::KeptButGroup => {
                fs::symlink_metadata(self.path).map(|found| found.gid())
            }
        };
        match wanted.and_then(|gid| give_to_group(file, gid)) {
            Err(error) if mode == FileMode::KeptButGroup => {
                tracing::warn!(path = %self.path.display(), %error, "the group of the file cannot be kept");
                Ok(())
            }
            given => given.map_err(|source| FileError::Io {
                action: "keep the group of",
                path: self.path.to_owned(),
                hint: String::new(),
                source,
            }),
        }
    }

    fn publish(mut self) -> Result<(), FileError> {
        fs::rename(&self.temporary, self.path).map_err(FileError::io("replace", self.path))?;
        self.published = true;
        sync_directory(self.path).map_err(FileError::io("replace", self.path))
    }

    /// Swaps the two files, so that what was replaced is at hand and can be put back if it was not what the new one was
    /// made from: of what others write meanwhile, the newest is in place in the end.
    ///
    /// `swap` is [`Self::swap`] but for tests, in which others write just before it.
    fn exchange(
        self,
        expect: &[u8],
        mut swap: impl FnMut(&Self) -> Result<(), Errno>,
    ) -> Result<(), FileError> {
        let ours = Identity::of(&self.temporary);
        match swap(&self) {
            Ok(()) => {}
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {
                // A file system without it: the window is between this look and the rename.
                let unchanged = read(self.path).is_ok_and(|(found, _)| found == expect);
                return if unchanged {
                    self.publish()
                } else {
                    Err(self.changed())
                };
            }
            Err(Errno::NOENT) => return Err(self.changed()),
            Err(errno) => return Err(FileError::io("replace", self.path)(errno.into())),
        }
        if read(&self.temporary).is_ok_and(|(found, _)| found == expect) {
            return sync_directory(self.path).map_err(FileError::io("replace", self.path));
        }
        self.put_back(ours, swap);
        Err(self.changed())
    }

    fn swap(&self) -> Result<(), Errno> {
        rustix::fs::renameat_with(CWD, &self.temporary, CWD, self.path, RenameFlags::EXCHANGE)
    }

    /// Puts back what was taken out, and then whatever comes out that is newer, until what comes out is what was put in:
    /// nobody wrote in between. Who removes the file meanwhile has the last word, too.
    fn put_back(&self, mut placed: Identity, mut swap: impl FnMut(&Self) -> Result<(), Errno>) {
        loop {
            let taken = Identity::of(&self.temporary);
            if swap(self).is_err() || Identity::of(&self.temporary) == placed {
                return;
            }
            placed = taken;
        }
    }

    fn changed(&self) -> FileError {
        FileError::Changed {
            path: self.path.to_owned(),
        }
    }
}

impl Drop for Successor<'_> {
    fn drop(&mut self) {
        if !self.published {
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// What is under a name: which file, and what it holds.
struct Identity {
    /// Kept, so that the inode's number is not given to another file.
    inode: Option<File>,
    content: Option<Vec<u8>>,
}

impl Identity {
    fn of(path: &Path) -> Self {
        let inode = OpenOptions::new()
            .read(true)
            .custom_flags((OFlags::PATH | OFlags::NOFOLLOW).bits().cast_signed())
            .open(path);
        Self {
            inode: inode.ok(),
            content: read(path).map(|(bytes, _)| bytes).ok(),
        }
    }
}

impl PartialEq for Identity {
    fn eq(&self, other: &Self) -> bool {
        let number = |identity: &Self| {
            let metadata = identity.inode.as_ref()?.metadata().ok()?;
            Some((metadata.dev(), metadata.ino()))
        };
        number(self) == number(other) && self.content == other.content
    }
}

/// Not asked for where it is so already: the directory may give a group that we could not.
fn give_to_group(file: &File, gid: u32) -> io::Result<()> {
    if file.metadata()?.gid() != gid {
        rustix::fs::fchown(file, None, Some(Gid::from_raw(gid)))?;
    }
    Ok(())
}

/// Gives `file` the mode and the extended attributes (SELinux label, ACL) of the file at `path`.
fn keep_attributes(path: &Path, file: &File) -> io::Result<()> {
    let found = fs::symlink_metadata(path)?;
    file.set_permissions(Permissions::from_mode(found.mode() & 0o7777))?;
    let mut names = vec![0; 4096];
    let length = match rustix::fs::llistxattr(path, names.as_mut_slice()) {
        Ok(length) => length,
        Err(Errno::NOTSUP | Errno::NOSYS) => return Ok(()),
        Err(errno) => return Err(errno.into()),
    };
    for name in names[..length]
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty())
    {
        let name = OsStr::new(std::str::from_utf8(name).map_err(io::Error::other)?);
        let mut value = vec![0; 64 * 1024];
        let length = rustix::fs::lgetxattr(path, name, value.as_mut_slice())?;
        match rustix::fs::fsetxattr(file, name, &value[..length], XattrFlags::empty()) {
            Ok(()) => {}
            // The file already has the label that the directory gives; the policy decides who may set another one.
            Err(Errno::PERM | Errno::ACCESS | Errno::NOTSUP)
                if name.as_encoded_bytes().starts_with(b"security.") => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Makes a rename or removal in the directory of `path` survive a power failure.
fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
}

#[cfg(test)]
mod tests;

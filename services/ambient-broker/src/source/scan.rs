//! The files of the directory: what each held when it was last whole.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::Problem;
use super::diff::View;
use super::manifest::{self, Object};

/// A manifest is a few kilobytes; what is larger is not one.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// What tells a changed file from an unchanged one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl From<&Metadata> for Stamp {
    fn from(meta: &Metadata) -> Self {
        Self {
            device: meta.dev(),
            inode: meta.ino(),
            size: meta.size(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
        }
    }
}

#[derive(Debug, Default)]
struct File {
    /// When last read; `None`: must be read again.
    stamp: Option<Stamp>,
    /// A stamp seen once, which may belong to a half-written file (polling only).
    unsettled: Option<Stamp>,
    /// As of the last time the file was valid.
    objects: Vec<Object>,
    /// It was valid once: what it defines is known.
    known: bool,
    problems: Vec<Problem>,
}

/// Which files a scan reads.
#[derive(Debug, Default)]
pub(super) struct Scope<'a> {
    /// Read these even if they look unchanged: a write within the clock's resolution leaves no trace in a stamp.
    pub(super) touched: Option<&'a BTreeSet<OsString>>,
    /// Look at no others than these.
    pub(super) only_touched: bool,
    /// Read a changed file only when it looks the same in two scans: nobody tells when a write is complete.
    pub(super) settle: bool,
    /// Read at least what was never read before.
    pub(super) eager: bool,
}

/// All files, by name.
#[derive(Debug)]
pub(super) struct Files {
    directory: PathBuf,
    by_name: BTreeMap<OsString, File>,
    /// Somebody is writing to these; they are left as they are.
    busy: BTreeSet<OsString>,
    problem: Option<Problem>,
}

impl Files {
    pub(super) fn new(directory: PathBuf) -> Self {
        Self {
            directory,
            by_name: BTreeMap::new(),
            busy: BTreeSet::new(),
            problem: None,
        }
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(super) fn set_busy(&mut self, busy: BTreeSet<OsString>) {
        self.busy = busy;
    }

    /// Forgets a file, unless there is one of that name.
    pub(super) fn forget_if_gone(&mut self, name: &OsStr) {
        if std::fs::symlink_metadata(self.directory.join(name)).is_err() {
            self.by_name.remove(name);
        }
    }

    /// Reads what changed. While the directory cannot be listed, everything stays as it was.
    pub(super) fn scan(&mut self, scope: &Scope<'_>) -> io::Result<()> {
        let result = self.try_scan(scope);
        self.problem = result.as_ref().err().map(|error| {
            self.directory_problem(format!("cannot be read: {error}; its objects stay as they were"))
        });
        result
    }

    fn try_scan(&mut self, scope: &Scope<'_>) -> io::Result<()> {
        let names = match scope.touched {
            Some(touched) if scope.only_touched => touched.clone(),
            _ => {
                let listed = list(&self.directory)?;
                self.by_name.retain(|name, _| listed.contains(name));
                listed
            }
        };
        for name in names {
            if self.busy.contains(&name) {
                continue;
            }
            let path = self.directory.join(&name);
            let unheard = scope.only_touched || !self.by_name.contains_key(&name);
            if unheard && std::fs::symlink_metadata(&path).is_err() {
                self.by_name.remove(&name);
                continue;
            }
            let touched = scope.touched.is_some_and(|touched| touched.contains(&name));
            let file = self.by_name.entry(name).or_default();
            let settle = scope.settle && !(scope.eager && file.stamp.is_none());
            file.refresh(&path, touched, settle);
        }
        Ok(())
    }

    /// What all files together say.
    pub(super) fn view(&self) -> View {
        let mut view = View::default();
        for (name, file) in &self.by_name {
            let place = self.directory.join(name).display().to_string();
            view.add(&place, &file.objects);
            for problem in &file.problems {
                view.report(problem.clone());
            }
            view.undetermined |= !file.known && !file.problems.is_empty();
        }
        if let Some(problem) = &self.problem {
            view.report(problem.clone());
        }
        view
    }

    /// Somebody is writing a file that was never whole.
    pub(super) fn is_being_written(&self) -> bool {
        let known = |name| self.by_name.get(name).is_some_and(|file| file.known);
        self.busy.iter().any(|name| !known(name))
    }

    pub(super) fn directory_problem(&self, message: String) -> Problem {
        Problem {
            place: self.directory.display().to_string(),
            line: None,
            field: None,
            message,
        }
    }
}

impl File {
    fn refresh(&mut self, path: &Path, touched: bool, settle: bool) {
        let stamp = match std::fs::metadata(path) {
            Ok(meta) if meta.is_file() => Stamp::from(&meta),
            Ok(_) => return self.fail(path, "not a regular file".into()),
            // Between listing and looking; the next scan no longer lists it.
            Err(error) if error.kind() == io::ErrorKind::NotFound && !path.is_symlink() => return,
            Err(error) => return self.fail(path, format!("cannot be read: {error}")),
        };
        if self.stamp == Some(stamp) && !touched {
            self.unsettled = None;
            return;
        }
        if settle && self.unsettled != Some(stamp) {
            self.unsettled = Some(stamp);
            return;
        }
        self.unsettled = None;
        if stamp.size > MAX_FILE_BYTES {
            return self.fail(path, format!("larger than {MAX_FILE_BYTES} bytes"));
        }
        self.stamp = Some(stamp);
        self.read(path);
    }

    fn read(&mut self, path: &Path) {
        let text = match std::fs::read(path).map(String::from_utf8) {
            Ok(Ok(text)) => text,
            Ok(Err(error)) => {
                let at = error.utf8_error().valid_up_to();
                return self.fail(path, format!("not UTF-8 text, from byte {at} on"));
            }
            Err(error) => {
                self.stamp = None;
                return self.fail(path, format!("cannot be read: {error}"));
            }
        };
        let json = path.extension().is_some_and(|extension| extension == "json");
        match manifest::parse(&text, &path.display().to_string(), json) {
            Ok(objects) => {
                self.objects = objects;
                self.known = true;
                self.problems.clear();
            }
            Err(problems) => self.problems = problems,
        }
    }

    /// The file's objects stay; what is wrong with it is told.
    fn fail(&mut self, path: &Path, message: String) {
        let place = path.display().to_string();
        self.problems = vec![Problem {
            place,
            line: None,
            field: None,
            message,
        }];
    }
}

fn list(directory: &Path) -> io::Result<BTreeSet<OsString>> {
    let names = std::fs::read_dir(directory)?.map(|entry| entry.map(|entry| entry.file_name()));
    Ok(names
        .collect::<io::Result<Vec<_>>>()?
        .into_iter()
        .filter(|name| is_manifest_name(name))
        .collect())
}

/// `*.yaml`, `*.yml` and `*.json`, not hidden: what editors and volume mounts leave beside a file has other names.
pub(super) fn is_manifest_name(name: &OsStr) -> bool {
    let extension = Path::new(name).extension().and_then(OsStr::to_str);
    matches!(extension, Some("yaml" | "yml" | "json")) && !name.as_encoded_bytes().starts_with(b".")
}

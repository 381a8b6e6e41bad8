//! The node's files: network configurations, plugins, the run directory, logs, what kernel and system it is.

use std::fmt::Write as _;
use std::fs::{self, File, Metadata};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use sluice_proto::paths::RunDir;

use super::{BugReport, Collection, kubeconfig};

/// Most of a file that is taken, from its start, in bytes.
const MOST: u64 = 256 << 10;
/// Most of a log that is taken, from its end, in bytes.
const MOST_OF_LOG: u64 = 1 << 20;
/// Most files listed of a directory.
const MOST_FILES: usize = 5000;
/// How deep a listing goes.
const DEPTH: usize = 5;
/// Names of our containers' log directories contain this: the kubelet calls them `NAMESPACE_POD_UID`.
const OUR_LOGS: &str = "_sluice-node-";

/// Where a container of ours finds its own token.
const OWN_TOKEN: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";

pub(crate) fn collect(collection: &mut Collection, run_dir: &Path, options: &BugReport) {
    if let Ok(token) = fs::read_to_string(OWN_TOKEN) {
        collection.redactor.know(&token);
    }
    collection.add("versions.txt", versions());
    for directory in &options.cni_net_dir {
        network_configurations(collection, directory);
    }
    for directory in &options.cni_bin_dir {
        if directory.exists() {
            list(collection, "cni-plugins", directory);
        }
    }
    let run_dir = RunDir::new(run_dir);
    run_directory(collection, &run_dir);
    credentials(collection, &[options.credentials.clone(), run_dir.kubeconfig()]);
    if let Ok(selection) = read_start(Path::new("/etc/sluice/selection.yaml")) {
        collection.add("selection.yaml", selection);
    }
    logs(collection, &options.log_dir);
}

/// This program, the kernel, the distribution, and the security modules that could be in the way.
fn versions() -> String {
    let mut text = format!("sluicectl {}\n", env!("CARGO_PKG_VERSION"));
    for path in [
        "/proc/sys/kernel/hostname",
        "/proc/version",
        "/proc/sys/kernel/random/boot_id",
        "/proc/uptime",
        "/etc/os-release",
        "/sys/kernel/security/lsm",
        "/sys/fs/selinux/enforce",
    ] {
        let content = read_start(Path::new(path)).map_or_else(
            |error| format!("({error})"),
            |content| {
                String::from_utf8_lossy(&content)
                    .trim_end()
                    .replace('\n', "\n    ")
            },
        );
        let _ = writeln!(text, "{path}:\n    {content}");
    }
    text
}

/// A listing, and the content of what a runtime would read. Other files there may be anybody's credentials.
fn network_configurations(collection: &mut Collection, directory: &Path) {
    if !directory.exists() {
        return;
    }
    list(collection, "cni", directory);
    let read = |path: &Path| {
        let extension = path.extension().and_then(|extension| extension.to_str());
        matches!(extension, Some("conf" | "conflist" | "json"))
    };
    contents(collection, "cni", directory, read);
}

fn run_directory(collection: &mut Collection, run_dir: &RunDir) {
    list(collection, "run", run_dir.root());
    for directory in [run_dir.sandboxes(), run_dir.tombstones(), run_dir.unprotected()] {
        if directory.exists() {
            contents(collection, "run", &directory, |path| path.extension().is_some());
        }
    }
}

/// The plugin's credentials: on disk, or in the run directory where nothing of a cluster's survives a reboot.
fn credentials(collection: &mut Collection, paths: &[PathBuf]) {
    let there = paths.iter().find(|path| path.exists());
    // A container that does not see their directory has nothing to say of them.
    let missing = || paths.iter().find(|path| path.parent().is_some_and(Path::exists));
    let Some(path) = there.or_else(missing) else {
        return;
    };
    match read_start(path) {
        Ok(text) => match kubeconfig::without_tokens(&text, &mut collection.redactor) {
            Some(text) => collection.add("kubeconfig.json", text),
            None => collection.note(format!("{}: not a kubeconfig in JSON, left out", path.display())),
        },
        Err(error) => collection.note(format!("{}: {error}", path.display())),
    }
}

fn logs(collection: &mut Collection, directory: &Path) {
    let Ok(pods) = fs::read_dir(directory) else {
        return;
    };
    let ours = |path: &PathBuf| {
        path.file_name()
            .is_some_and(|name| name.to_string_lossy().contains(OUR_LOGS))
    };
    for pod in pods.filter_map(|entry| Some(entry.ok()?.path())).filter(ours) {
        let containers = fs::read_dir(&pod).into_iter().flatten();
        for container in containers.filter_map(|entry| Some(entry.ok()?.path())) {
            let files = fs::read_dir(&container).into_iter().flatten();
            for file in files.filter_map(|entry| Some(entry.ok()?.path())) {
                let name = format!("logs/{}", relative(directory, &file));
                match read_end(&file) {
                    Ok(content) => collection.add(name, content),
                    Err(error) => collection.note(format!("{}: {error}", file.display())),
                }
            }
        }
    }
}

/// The files of a directory that `wanted` says, whatever else is there.
fn contents(collection: &mut Collection, below: &str, directory: &Path, wanted: impl Fn(&Path) -> bool) {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) => return collection.note(format!("{}: {error}", directory.display())),
    };
    let mut paths: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    for path in paths.into_iter().filter(|path| wanted(path)).take(MOST_FILES) {
        match read_start(&path) {
            Ok(content) => collection.add(format!("{below}{}", path.display()), content),
            Err(error) => collection.note(format!("{}: {error}", path.display())),
        }
    }
}

fn list(collection: &mut Collection, below: &str, directory: &Path) {
    let mut lines = Vec::new();
    if let Err(error) = walk(directory, DEPTH, &mut lines) {
        collection.note(format!("{}: {error}", directory.display()));
    }
    if lines.len() >= MOST_FILES {
        collection.note(format!(
            "{}: only {MOST_FILES} files are listed",
            directory.display()
        ));
    }
    lines.push(String::new());
    collection.add(
        format!("{below}{}/LISTING.txt", directory.display()),
        lines.join("\n"),
    );
}

fn walk(directory: &Path, depth: usize, lines: &mut Vec<String>) -> io::Result<()> {
    lines.push(describe(directory, &fs::symlink_metadata(directory)?));
    let mut paths: Vec<_> = fs::read_dir(directory)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    paths.sort();
    for path in paths {
        if lines.len() >= MOST_FILES {
            break;
        }
        // What vanishes meanwhile is not there.
        let Ok(metadata) = fs::symlink_metadata(&path) else {
            continue;
        };
        if metadata.is_dir() && depth > 1 {
            if let Err(error) = walk(&path, depth - 1, lines) {
                lines.push(format!("{}: {error}", path.display()));
            }
        } else {
            lines.push(describe(&path, &metadata));
        }
    }
    Ok(())
}

/// As `ls -ln` does, the time in seconds.
fn describe(path: &Path, metadata: &Metadata) -> String {
    let kind = metadata.file_type();
    let letter = match () {
        () if kind.is_dir() => 'd',
        () if kind.is_symlink() => 'l',
        () if kind.is_socket() => 's',
        () if kind.is_fifo() => 'p',
        () if kind.is_file() => '-',
        () => '?',
    };
    let link = fs::read_link(path).map_or_else(|_| String::new(), |to| format!(" -> {}", to.display()));
    format!(
        "{letter}{:04o} {}:{} {:>9} {} {}{link}",
        metadata.permissions().mode() & 0o7777,
        metadata.uid(),
        metadata.gid(),
        metadata.len(),
        metadata.mtime(),
        path.display()
    )
}

fn relative(root: &Path, path: &Path) -> String {
    path.strip_prefix(root).unwrap_or(path).display().to_string()
}

/// An ordinary file; a pipe in its place must not keep us waiting.
fn open(path: &Path) -> io::Result<File> {
    /// `O_NONBLOCK` (open(2)).
    const NONBLOCK: i32 = 0o4000;
    let file = File::options().read(true).custom_flags(NONBLOCK).open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"))
    }
}

fn read_start(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    open(path)?.take(MOST).read_to_end(&mut content)?;
    Ok(content)
}

fn read_end(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(MOST_OF_LOG)))?;
    let mut content = Vec::new();
    file.take(MOST_OF_LOG).read_to_end(&mut content)?;
    Ok(content)
}

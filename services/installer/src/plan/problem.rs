//! What keeps the plugin from being called for every pod, in words for an operator.

use std::fmt;
use std::path::PathBuf;

use crate::edit::ISTIO;
use crate::network::{SUPPORTED_VERSIONS, Versions};

/// Why the plugin is not, or not surely, called for every pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Problem {
    NetDir(String),
    NoPrimary {
        dir: PathBuf,
        skipped: Vec<(String, String)>,
    },
    NamedPrimary {
        name: String,
        reason: String,
    },
    NotServing(String),
    NotFirst(String),
    ForeignMesh(String),
    Version {
        name: String,
        versions: Versions,
    },
    BinDir {
        plugin: String,
        dirs: Vec<PathBuf>,
    },
    RuntimeSearches {
        ours: Vec<PathBuf>,
        theirs: Vec<PathBuf>,
        file: PathBuf,
    },
    RuntimeReads {
        ours: PathBuf,
        theirs: PathBuf,
        file: PathBuf,
    },
    RuntimeWouldRead {
        dir: PathBuf,
        file: PathBuf,
    },
    Binary {
        dir: PathBuf,
        reason: String,
    },
    Kubeconfig(String),
    Derive {
        name: String,
        reason: String,
    },
    Link(String),
    Owner {
        name: String,
        uid: u32,
    },
    Group {
        name: String,
        gid: u32,
    },
    Uncleanable {
        name: String,
        reason: String,
    },
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NetDir(reason) => write!(f, "the network configuration directory cannot be read: {reason}"),
            Self::NoPrimary { dir, skipped } => {
                write!(
                    f,
                    "no-primary: {} has no valid network configuration yet",
                    dir.display()
                )?;
                for (name, reason) in skipped {
                    write!(f, "; {name} is skipped because {reason}")?;
                }
                Ok(())
            }
            Self::NamedPrimary { name, reason } => write!(f, "no-primary: {name} cannot be used: {reason}"),
            Self::NotServing(why) => write!(f, "waiting for the agent to be able to serve pods: {why}"),
            Self::NotFirst(name) => write!(
                f,
                "not-first-in-cni-dir: {name} (the runtime prefers it to the file with our entry; remove it, or choose an \
                 owned name that sorts before it)"
            ),
            Self::ForeignMesh(name) => write!(
                f,
                "another-mesh: {name} calls {ISTIO}, and a pod must not be redirected twice (remove Istio's node agent, \
                 or allow taking its place with --take-over)"
            ),
            Self::Version { name, versions } => write!(
                f,
                "{name} is of CNI version {}, and our plugin speaks {}",
                versions.text(),
                SUPPORTED_VERSIONS.join(", ")
            ),
            Self::BinDir { plugin, dirs } => write!(
                f,
                "bin-dir-not-searched: the runtime finds the primary network's plugin {plugin}, but not in {}: it seems to \
                 search another directory, and would not find our plugin either (set the CNI plugin directory of this \
                 platform, or --bin-dir-check=warn if the runtime searches several)",
                list(dirs)
            ),
            Self::RuntimeSearches { ours, theirs, file } => write!(
                f,
                "bin-dir-not-searched: our plugin is installed in {}, but {} says that the runtime searches {} (set the CNI \
                 plugin directory of this platform)",
                list(ours),
                file.display(),
                list(theirs)
            ),
            Self::RuntimeReads { ours, theirs, file } => write!(
                f,
                "net-dir-not-read: our entry would be in {}, but {} says that the runtime reads {} (set the network \
                 configuration directory of this platform)",
                ours.display(),
                file.display(),
                theirs.display()
            ),
            Self::RuntimeWouldRead { dir, file } => write!(
                f,
                "net-dir-of-the-runtime: our network would be in {}, and {} says that the container runtime reads it: it could be \
                 taken for the primary network (use owned mode, or the directory of the plugin that delegates)",
                dir.display(),
                file.display()
            ),
            Self::Binary { dir, reason } => write!(f, "plugin directory {}: {reason}", dir.display()),
            Self::Kubeconfig(reason) => write!(f, "no credentials for the plugin: {reason}"),
            Self::Derive { name, reason } => write!(f, "{name} cannot take our entry: {reason}"),
            Self::Link(name) => write!(
                f,
                "{name} is a symbolic link, which is not edited: use owned mode"
            ),
            Self::Owner { name, uid } => {
                write!(
                    f,
                    "{name} belongs to uid {uid}, which an edit could not keep: use owned mode"
                )
            }
            Self::Group { name, gid } => write!(
                f,
                "{name} belongs to group {gid}, which an edit could not keep, because the installer is not in it: use owned \
                 mode, or make it a supplementary group of the installer"
            ),
            Self::Uncleanable { name, reason } => {
                write!(f, "{name} names our plugin and cannot be cleaned: {reason}")
            }
        }
    }
}

fn list(paths: &[PathBuf]) -> String {
    let paths: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    paths.join(", ")
}

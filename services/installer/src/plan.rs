//! What to do to the node so that our plugin is called for every pod: a pure function of what was found.
//!
//! Two rules keep pods creatable at every instant. A configuration that names our plugin is written only after the
//! plugin is in place, and the plugin is taken away only after no configuration names it. And a file is changed only
//! by replacing it as a whole, under the condition that it still is what the plan was made from.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::config::{BinDirCheck, Flags, Mode, WhenPreempted};
use crate::edit::{self, ISTIO, Rest};
use crate::entry::{Entry, Layout, PLUGIN};
use crate::network::{Network, Versions, text};
use crate::node::{BinDir, Binary, Kubeconfig, Loaded, NetDir, is_ours};

mod removal;

pub(crate) use removal::plan_removal;

/// Everything a plan is made from.
#[derive(Debug)]
pub(crate) struct Situation<'a> {
    pub(crate) flags: &'a Flags,
    pub(crate) entry: &'a Entry,
    pub(crate) net: &'a NetDir,
    pub(crate) bins: &'a [BinDir],
    pub(crate) kubeconfig: &'a Kubeconfig,
    /// The kubeconfig as it should be; `None`: no credentials yet.
    pub(crate) credentials: Option<&'a [u8]>,
    /// Why pods cannot be served; `None`: they can, or could once since we started.
    pub(crate) not_serving: Option<&'a str>,
    /// How long there has been no primary.
    pub(crate) primary_gone: Duration,
}

/// Mode of a file that is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileMode {
    /// As the file that is replaced, with its owner and extended attributes.
    Kept,
    /// As told.
    Exactly(u32),
}

/// One change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    /// Put our plugin into the plugin directory with this number.
    InstallBinary(usize),
    /// Replace it there by the stand-in that answers DEL.
    RetireBinary(usize),
    /// Write the plugin's credentials.
    WriteKubeconfig,
    /// Remove them.
    DeleteKubeconfig,
    /// Write a file of the network configuration directory.
    Write {
        name: String,
        content: Vec<u8>,
        mode: FileMode,
        /// What it must still be; `None`: whatever is there.
        expect: Option<Vec<u8>>,
    },
    /// Remove one, if it still is what it was.
    Delete { name: String, expect: Option<Vec<u8>> },
}

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
                crate::network::SUPPORTED_VERSIONS.join(", ")
            ),
            Self::BinDir { plugin, dirs } => write!(
                f,
                "bin-dir-not-searched: the runtime finds the primary network's plugin {plugin}, but not in {}: it seems to \
                 search another directory, and would not find our plugin either (set the CNI plugin directory of this \
                 platform, or --bin-dir-check=warn if the runtime searches several)",
                list(dirs)
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

/// What to do, and what stands in the way.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// In this order; on a failure the rest is not done.
    pub(crate) steps: Vec<Step>,
    /// What no step of ours mends.
    pub(crate) problems: Vec<Problem>,
    /// What an operator should know although it keeps nothing from working.
    pub(crate) notes: Vec<String>,
    /// The file that the runtime reads our entry from, as things are.
    pub(crate) effective: Option<String>,
    /// The primary network's file.
    pub(crate) primary: Option<String>,
}

/// Plans an installation. A plan without steps and problems: all is in place.
pub(crate) fn plan_install(situation: &Situation<'_>) -> Plan {
    let mut plan = Plan {
        effective: effective(situation.net),
        ..Plan::default()
    };
    plan.binaries(situation);
    plan.credentials(situation);
    plan.config(situation);
    plan
}

/// The first file that a runtime loads, if it has our entry.
pub(crate) fn effective(net: &NetDir) -> Option<String> {
    let (name, loaded) = net.valid(true).next()?;
    loaded.has(PLUGIN).then(|| name.clone())
}

/// The primary network's file: what the operator named, or the first valid one that is not ours alone.
pub(crate) fn primary<'a>(flags: &Flags, net: &'a NetDir) -> Result<(String, Loaded<'a>), Problem> {
    if let Some(named) = &flags.primary {
        let name = resolve(named, net);
        return match net.load_by_content(&name) {
            Ok(loaded) => Ok((name, loaded)),
            Err(reason) => Err(Problem::NamedPrimary { name, reason }),
        };
    }
    let foreign = |loaded: &Loaded<'_>| {
        loaded
            .kinds()
            .iter()
            .any(|kind| *kind != PLUGIN && *kind != ISTIO)
    };
    net.valid(false)
        .find(|(name, loaded)| !is_ours(name) && foreign(loaded))
        .map(|(name, loaded)| (name.clone(), loaded))
        .ok_or_else(|| Problem::NoPrimary {
            dir: flags.host_cni_net_dir.clone(),
            skipped: net.skipped(),
        })
}

/// `x.conf` and `x.conflist` stand for each other, because primary networks change the form between versions.
fn resolve(named: &str, net: &NetDir) -> String {
    let other = match named.rsplit_once('.') {
        Some((stem, "conf")) => format!("{stem}.conflist"),
        Some((stem, "conflist")) => format!("{stem}.conf"),
        _ => return named.to_owned(),
    };
    if !net.files.contains_key(named) && net.files.contains_key(&other) {
        other
    } else {
        named.to_owned()
    }
}

impl Plan {
    fn binaries(&mut self, situation: &Situation<'_>) {
        for (index, bin) in situation.bins.iter().enumerate() {
            match &bin.ours {
                Ok(Binary::Current) => {}
                Ok(Binary::Missing | Binary::Differs) => self.steps.push(Step::InstallBinary(index)),
                Err(reason) => self.problems.push(Problem::Binary {
                    dir: bin.host.clone(),
                    reason: reason.clone(),
                }),
            }
        }
    }

    fn credentials(&mut self, situation: &Situation<'_>) {
        match (situation.credentials, situation.kubeconfig) {
            (Some(wanted), Kubeconfig::Present(found, 0o600)) if wanted == found => {}
            (Some(_), _) => self.steps.push(Step::WriteKubeconfig),
            (None, Kubeconfig::Present(..)) => {}
            (None, _) if !situation.flags.require_kubeconfig => {}
            (None, Kubeconfig::Missing) => {
                self.problems
                    .push(Problem::Kubeconfig("the broker has not given any yet".to_owned()));
            }
            (None, Kubeconfig::Unreadable(reason)) => self.problems.push(Problem::Kubeconfig(reason.clone())),
        }
    }

    fn config(&mut self, situation: &Situation<'_>) {
        let (flags, net) = (situation.flags, situation.net);
        if let Some(reason) = &net.unreadable {
            self.problems.push(Problem::NetDir(reason.clone()));
            return;
        }
        let installed = net.valid(true).any(|(_, loaded)| loaded.has(PLUGIN));
        if let Some(why) = situation.not_serving {
            self.problems.push(Problem::NotServing(why.to_owned()));
            // What is installed stays and is kept right; nothing is installed anew.
            if !installed {
                self.primary = primary(flags, net).ok().map(|(name, _)| name);
                return;
            }
        }
        let (name, loaded) = match primary(flags, net) {
            Ok(found) => found,
            Err(problem) => {
                self.problems.push(problem);
                self.without_primary(situation);
                return;
            }
        };
        self.primary = Some(name.clone());
        if let Err(problem) = check_primary(situation, &name, &loaded) {
            if let (Problem::BinDir { .. }, BinDirCheck::Warn) = (&problem, flags.bin_dir_check) {
                self.notes.push(problem.to_string());
            } else {
                self.problems.push(problem);
                return;
            }
        }
        let planned = match flags.mode {
            Mode::Owned => self.owned(situation, &name, &loaded),
            Mode::Chained => self.chained(situation, &name, &loaded),
        };
        match planned {
            Ok(target) => self.other_files(situation, &target),
            Err(problem) => self.problems.push(problem),
        }
    }

    /// A chain whose first plugin is gone starts no pod and makes the node look ready: after a grace, in which a
    /// primary may replace its file in two steps, our copy of it goes, too.
    fn without_primary(&mut self, situation: &Situation<'_>) {
        if situation.primary_gone < situation.flags.primary_grace() {
            return;
        }
        for (name, file) in situation.net.files.iter().filter(|(name, _)| is_ours(name)) {
            self.steps.push(Step::Delete {
                name: name.clone(),
                expect: file.bytes().map(<[u8]>::to_vec),
            });
        }
    }

    /// Our own file: the primary's content with our entry. Gives its name.
    fn owned(
        &mut self,
        situation: &Situation<'_>,
        primary: &str,
        loaded: &Loaded<'_>,
    ) -> Result<String, Problem> {
        let target = situation.flags.owned_name().to_owned();
        let content = with_entry(situation, primary, loaded, true)?;
        let mode = situation.flags.owned_mode();
        let found = situation.net.files.get(&target);
        let right = found
            .is_some_and(|file| !file.link && file.mode == mode && file.bytes() == Some(content.as_slice()));
        if !right {
            self.steps.push(Step::Write {
                name: target.clone(),
                content,
                mode: FileMode::Exactly(mode),
                expect: None,
            });
        }
        Ok(target)
    }

    /// The primary's own file. Gives the name of the file that has our entry in the end.
    fn chained(
        &mut self,
        situation: &Situation<'_>,
        name: &str,
        loaded: &Loaded<'_>,
    ) -> Result<String, Problem> {
        if let Network::List(list) = &loaded.network
            && list.plugins.is_none()
        {
            // Inline plugins run before those of files, so ours must be a file, too, and the last of them.
            let drop_in = format!("{}/zz-{PLUGIN}.conf", list.name);
            self.drop_in(situation, &list.name, drop_in)?;
            return Ok(name.to_owned());
        }
        let Some(file) = situation.net.files.get(name) else {
            return Ok(name.to_owned());
        };
        let before = file.bytes().unwrap_or_default();
        let after = with_entry(situation, name, loaded, false)?;
        let target = match (&loaded.network, name.strip_suffix(".conf")) {
            (Network::Single(_), Some(stem)) => format!("{stem}.conflist"),
            _ => name.to_owned(),
        };
        if before == after.as_slice() && target == name {
            return Ok(target);
        }
        if file.link {
            return Err(Problem::Link(name.to_owned()));
        }
        if file.uid != rustix::process::geteuid().as_raw() {
            return Err(Problem::Owner {
                name: name.to_owned(),
                uid: file.uid,
            });
        }
        let converted = target != name;
        self.steps.push(Step::Write {
            name: target.clone(),
            content: after,
            mode: if converted {
                FileMode::Exactly(file.mode)
            } else {
                FileMode::Kept
            },
            expect: (!converted).then(|| before.to_vec()),
        });
        if converted {
            // After the list is there: at no instant is there a `.conf` with a list in it, or none of the two.
            self.steps.push(Step::Delete {
                name: name.to_owned(),
                expect: Some(before.to_vec()),
            });
        }
        Ok(target)
    }

    fn drop_in(&mut self, situation: &Situation<'_>, network: &str, name: String) -> Result<(), Problem> {
        let mut content = render(situation.entry, &name)?.into_bytes();
        content.push(b'\n');
        let file_name = format!("zz-{PLUGIN}.conf");
        let found = situation
            .net
            .drop_ins
            .get(network)
            .and_then(|files| files.get(&file_name));
        if found.and_then(|file| file.bytes()) != Some(content.as_slice()) {
            self.steps.push(Step::Write {
                name,
                content,
                mode: FileMode::Exactly(situation.flags.owned_mode()),
                expect: None,
            });
        }
        Ok(())
    }

    /// Files of ours from other settings go; a file that the runtime prefers is told, or takes our entry as well.
    fn other_files(&mut self, situation: &Situation<'_>, target: &str) {
        let (flags, net) = (situation.flags, situation.net);
        for (name, file) in net
            .files
            .iter()
            .filter(|(name, _)| is_ours(name) && *name != target)
        {
            self.steps.push(Step::Delete {
                name: name.clone(),
                expect: file.bytes().map(<[u8]>::to_vec),
            });
        }
        let replaced = |name: &str| {
            self.steps
                .iter()
                .any(|step| matches!(step, Step::Delete { name: gone, .. } if gone == name))
        };
        let first = net
            .valid(true)
            .find(|(name, _)| !is_ours(name) && !replaced(name))
            .filter(|(name, _)| name.as_str() < target);
        if let Some((name, loaded)) = first {
            if flags.when_preempted == WhenPreempted::Chain {
                if let Err(problem) = self.chained(situation, name, &loaded) {
                    self.problems.push(problem);
                }
            } else {
                self.problems.push(Problem::NotFirst(name.clone()));
            }
        }
        for (name, reason) in net.skipped() {
            if name.as_str() < target {
                self.notes.push(format!(
                    "{name} sorts before our entry and is not valid ({reason}): containerd loads no network at all \
                     because of it"
                ));
            }
        }
    }
}

/// What must hold before the primary's chain may name our plugin.
fn check_primary(situation: &Situation<'_>, name: &str, loaded: &Loaded<'_>) -> Result<(), Problem> {
    if loaded.has(ISTIO) && !situation.flags.take_over {
        return Err(Problem::ForeignMesh(name.to_owned()));
    }
    if let Network::List(list) = &loaded.network
        && !list.version.supported()
    {
        return Err(Problem::Version {
            name: name.to_owned(),
            versions: list.version.clone(),
        });
    }
    let kinds = loaded.kinds();
    let own = kinds.iter().find(|kind| ![PLUGIN, ISTIO].contains(*kind));
    if let Some(plugin) = own
        && situation.flags.bin_dir_check != BinDirCheck::Off
        && !situation.bins.iter().any(|bin| bin.names.contains(*plugin))
    {
        return Err(Problem::BinDir {
            plugin: (*plugin).to_owned(),
            dirs: situation.bins.iter().map(|bin| bin.host.clone()).collect(),
        });
    }
    Ok(())
}

/// The primary's content with our entry. A copy of it also holds the plugins that come from files, because those
/// would be appended after our entry.
fn with_entry(
    situation: &Situation<'_>,
    name: &str,
    loaded: &Loaded<'_>,
    copy: bool,
) -> Result<Vec<u8>, Problem> {
    let derive = |reason: String| Problem::Derive {
        name: name.to_owned(),
        reason,
    };
    let bytes = situation
        .net
        .files
        .get(name)
        .and_then(|file| file.bytes())
        .unwrap_or_default();
    let text = text(bytes).map_err(|error| derive(error.to_string()))?;
    let displaced: &[&str] = if situation.flags.take_over { &[ISTIO] } else { &[] };
    let made = match &loaded.network {
        Network::Single(single) => edit::list_from_single(text, single, situation.entry),
        Network::List(list) if copy && !loaded.drop_ins.is_empty() => {
            let drop_ins: Vec<&str> = loaded.drop_ins.iter().map(|(_, text)| *text).collect();
            edit::inline_drop_ins(list, &drop_ins, situation.entry, displaced)
        }
        Network::List(_) => edit::insert(text, situation.entry, displaced),
    };
    made.map(String::into_bytes)
        .map_err(|error| derive(sluice_runtime::telemetry::chain(&error)))
}

fn render(entry: &Entry, name: &str) -> Result<String, Problem> {
    entry.render(&Layout::Compact).map_err(|error| Problem::Derive {
        name: name.to_owned(),
        reason: error.to_string(),
    })
}

#[cfg(test)]
mod tests;

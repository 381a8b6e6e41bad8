//! The primary network's file: which it is, whether it may take our entry, and how it reads with it.

use std::path::PathBuf;

use super::{Problem, Situation};
use crate::config::{BinDirCheck, Flags, Mode};
use crate::edit::{self, ISTIO};
use crate::entry::{PLUGIN, QUOTED};
use crate::network::{Network, has_extension, text};
use crate::node::{Loaded, NetDir, is_ours};

/// The first file that a runtime loads, if it has our entry, or hands over to a chain that has it.
pub(crate) fn effective(net: &NetDir) -> Option<String> {
    let (name, loaded) = net.valid(true).next()?;
    (loaded.has(PLUGIN) || net.files.get(name)?.mentions(QUOTED)).then(|| name.clone())
}

/// The primary network's file: what the operator named, or the first valid one that is not ours alone. One that sorts
/// before our own file counts only if there is no other: it is a newcomer, or one that hands over to another file.
pub(super) fn primary<'a>(flags: &Flags, net: &'a NetDir) -> Result<(String, Loaded<'a>), Problem> {
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
    let mut candidates: Vec<_> = net
        .valid(false)
        .filter(|(name, loaded)| !is_ours(name) && foreign(loaded))
        .collect();
    let after =
        |(name, _): &(&String, Loaded<'_>)| flags.mode == Mode::Chained || name.as_str() > flags.owned_name();
    let chosen = candidates.iter().position(after).unwrap_or(0);
    if candidates.is_empty() {
        return Err(Problem::NoPrimary {
            dir: flags.host_cni_net_dir.clone(),
            skipped: net.skipped(),
        });
    }
    let (name, loaded) = candidates.swap_remove(chosen);
    Ok((name.clone(), loaded))
}

/// Whether there is nothing any more that could be the primary's file, not even one that is being written.
pub(super) fn is_gone(flags: &Flags, net: &NetDir) -> bool {
    match &flags.primary {
        Some(named) => !net.files.contains_key(&resolve(named, net)),
        None => !net
            .files
            .keys()
            .any(|name| !is_ours(name) && (has_extension(name, "conf") || has_extension(name, "conflist"))),
    }
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

/// What must hold before the primary's chain may name our plugin.
pub(super) fn check_primary(
    situation: &Situation<'_>,
    name: &str,
    loaded: &Loaded<'_>,
) -> Result<(), Problem> {
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
    check_directories(situation, loaded)
}

/// Whether the runtime will find our plugin where it is installed, and our entry where it is written: by what it says of
/// itself, or else by where it finds the primary's plugin.
fn check_directories(situation: &Situation<'_>, loaded: &Loaded<'_>) -> Result<(), Problem> {
    let flags = situation.flags;
    if flags.bin_dir_check == BinDirCheck::Off {
        return Ok(());
    }
    let plain = |path: &PathBuf| path.components().collect::<PathBuf>();
    let bins: Vec<PathBuf> = flags.host_cni_bin_dir.iter().map(plain).collect();
    let mut told = false;
    for runtime in situation.runtimes.iter().flatten() {
        told |= !runtime.plugins.is_empty();
        if !runtime.plugins.is_empty() && !runtime.plugins.iter().any(|path| bins.contains(path)) {
            return Err(Problem::RuntimeSearches {
                ours: bins,
                theirs: runtime.plugins.clone(),
                file: runtime.file.clone(),
            });
        }
        let net = plain(&flags.host_cni_net_dir);
        if let Some(read) = runtime.configurations.clone().filter(|read| *read != net) {
            return Err(Problem::RuntimeReads {
                ours: net,
                theirs: read,
                file: runtime.file.clone(),
            });
        }
    }
    let kinds = loaded.kinds();
    let own = kinds.iter().find(|kind| ![PLUGIN, ISTIO].contains(*kind));
    match own {
        Some(plugin) if !told && !situation.bins.iter().any(|bin| bin.names.contains(*plugin)) => {
            Err(Problem::BinDir {
                plugin: (*plugin).to_owned(),
                dirs: bins,
            })
        }
        _ => Ok(()),
    }
}

/// The primary's content with our entry. A copy of it also holds the plugins that come from files, because those
/// would be appended after our entry.
pub(super) fn with_entry(
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

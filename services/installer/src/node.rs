//! What was found on the node: plain data, read by `observe`, judged by `plan`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use crate::config::{OWNED_SUFFIX, STAND_ALONE_SUFFIX};
use crate::network::{Invalid, List, Network, Single, has_extension, text};

/// A regular file, or what stands in its place.
#[derive(Debug, Clone)]
pub(crate) struct File {
    /// Its bytes, or why they cannot be had.
    pub(crate) content: Result<Vec<u8>, String>,
    /// Permission bits.
    pub(crate) mode: u32,
    /// Owner.
    pub(crate) uid: u32,
    /// Group.
    pub(crate) gid: u32,
    /// The name is a symbolic link.
    pub(crate) link: bool,
}

/// The network configuration directory.
#[derive(Debug, Clone, Default)]
pub(crate) struct NetDir {
    /// Why it cannot be read; a missing directory is an empty one.
    pub(crate) unreadable: Option<String>,
    /// The group that every new file in it gets by itself, whoever makes it (set-group-ID).
    pub(crate) group: Option<u32>,
    /// Files that some runtime might read as a configuration, by name. Their byte order is the runtimes' order.
    pub(crate) files: BTreeMap<String, File>,
    /// `NAME/*.conf`: further plugins of the network NAME (CNI 1.1), in the order of their names.
    pub(crate) drop_ins: BTreeMap<String, BTreeMap<String, File>>,
}

/// Our plugin in one of the plugin directories.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Binary {
    /// As it should be.
    Current,
    /// Not there.
    Missing,
    /// Another one, or with another mode.
    Differs,
}

/// A plugin directory.
#[derive(Debug, Clone)]
pub(crate) struct BinDir {
    /// Its path as the host sees it.
    pub(crate) host: PathBuf,
    /// Our plugin in it, or why nobody can tell.
    pub(crate) ours: Result<Binary, String>,
    /// All names in it.
    pub(crate) names: BTreeSet<String>,
}

/// The plugin's credentials on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kubeconfig {
    /// No such file.
    Missing,
    /// Its bytes and mode.
    Present(Vec<u8>, u32),
    /// Why it cannot be read.
    Unreadable(String),
}

/// What Cilium appends to the names of other networks' files while it is exclusive, and takes away again when it leaves.
const SET_ASIDE: &str = ".cilium_bak";

/// Whether the file is ours alone, be it set aside by somebody.
pub(crate) fn is_ours(name: &str) -> bool {
    let name = name.strip_suffix(SET_ASIDE).unwrap_or(name);
    name.ends_with(OWNED_SUFFIX) || name.ends_with(STAND_ALONE_SUFFIX)
}

impl File {
    pub(crate) fn bytes(&self) -> Option<&[u8]> {
        self.content.as_deref().ok()
    }

    /// Whether the text, valid or not, has `part` in it.
    pub(crate) fn mentions(&self, part: &str) -> bool {
        self.bytes()
            .is_some_and(|bytes| bytes.windows(part.len()).any(|window| window == part.as_bytes()))
    }
}

impl NetDir {
    /// The file as a runtime would load it, its drop-ins included; or why it would not.
    pub(crate) fn load(&self, name: &str) -> Result<Loaded<'_>, String> {
        let file = self.files.get(name).ok_or("it does not exist")?;
        let bytes = file.content.as_deref().map_err(Clone::clone)?;
        self.loaded(Network::parse(name, bytes).map_err(|error| explain(&error))?)
    }

    /// The same for a file that the operator named: its content tells what it is.
    pub(crate) fn load_by_content(&self, name: &str) -> Result<Loaded<'_>, String> {
        let file = self.files.get(name).ok_or("it does not exist")?;
        let bytes = file.content.as_deref().map_err(Clone::clone)?;
        let text = text(bytes).map_err(|error| explain(&error))?;
        let network = match Single::parse(text) {
            Ok(single) => Network::Single(single),
            Err(_) => Network::List(List::parse(text).map_err(|error| explain(&error))?),
        };
        self.loaded(network)
    }

    fn loaded<'a>(&'a self, network: Network<'a>) -> Result<Loaded<'a>, String> {
        let mut drop_ins = Vec::new();
        if let Network::List(list) = &network
            && !list.only_inlined
        {
            for (name, file) in self.drop_ins.get(&list.name).into_iter().flatten() {
                let load = || {
                    let text = text(file.content.as_deref().map_err(Clone::clone)?)
                        .map_err(|error| explain(&error))?;
                    Ok::<_, String>((Single::parse(text).map_err(|error| explain(&error))?.kind, text))
                };
                let problem = |problem: String| {
                    explain(&Invalid::DropIns {
                        problem: format!("{name} is not valid: {problem}"),
                    })
                };
                drop_ins.push(load().map_err(problem)?);
            }
            if list.plugins.is_none() && drop_ins.is_empty() {
                let problem = format!("there is no {}/*.conf", list.name);
                return Err(explain(&Invalid::DropIns { problem }));
            }
        }
        Ok(Loaded { network, drop_ins })
    }

    /// Names of files that runtimes would load, in their order; `.json` counts for the runtimes but not as a primary.
    pub(crate) fn valid(&self, with_json: bool) -> impl Iterator<Item = (&String, Loaded<'_>)> {
        self.files
            .keys()
            .filter(move |name| {
                has_extension(name, "conf")
                    || has_extension(name, "conflist")
                    || (with_json && has_extension(name, "json"))
            })
            .filter_map(|name| Some((name, self.load(name).ok()?)))
    }

    /// Files that are named as configurations and are none, with the reason.
    pub(crate) fn skipped(&self) -> Vec<(String, String)> {
        let named = self
            .files
            .keys()
            .filter(|name| has_extension(name, "conf") || has_extension(name, "conflist"));
        named
            .filter_map(|name| Some((name.clone(), self.load(name).err()?)))
            .collect()
    }
}

/// A configuration and the plugins that come from files.
#[derive(Debug)]
pub(crate) struct Loaded<'a> {
    pub(crate) network: Network<'a>,
    /// Type and text of each.
    pub(crate) drop_ins: Vec<(String, &'a str)>,
}

impl Loaded<'_> {
    /// Types of its plugins, in order.
    pub(crate) fn kinds(&self) -> Vec<&str> {
        let mut kinds: Vec<&str> = match &self.network {
            Network::Single(single) => vec![&single.kind],
            Network::List(list) => list
                .plugins
                .iter()
                .flatten()
                .map(|plugin| plugin.kind.as_str())
                .collect(),
        };
        kinds.extend(self.drop_ins.iter().map(|(kind, _)| kind.as_str()));
        kinds
    }

    pub(crate) fn has(&self, kind: &str) -> bool {
        self.kinds().contains(&kind)
    }
}

fn explain(error: &Invalid) -> String {
    sluice_runtime::telemetry::chain(error)
}

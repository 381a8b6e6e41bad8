//! What to do to the node so that our plugin is called for every pod: a pure function of what was found.
//!
//! Two rules keep pods creatable at every instant. A configuration that names our plugin is written only after the
//! plugin is in place, and the plugin is taken away only after no configuration names it. And a file is changed only
//! by replacing it as a whole, under the condition that it still is what the plan was made from.

use std::time::Duration;

use crate::config::Flags;
use crate::entry::Entry;
use crate::node::{BinDir, Binary, Kubeconfig, NetDir};
use crate::runtime_config::RuntimeDirs;

mod files;
mod primary;
mod problem;
mod removal;
mod stand_alone;

pub(crate) use primary::effective;
pub(crate) use problem::Problem;
pub(crate) use removal::plan_removal;

/// Everything a plan is made from.
#[derive(Debug)]
pub(crate) struct Situation<'a> {
    pub(crate) flags: &'a Flags,
    pub(crate) entry: &'a Entry,
    pub(crate) net: &'a NetDir,
    pub(crate) bins: &'a [BinDir],
    /// What container runtimes say of themselves, or why it cannot be read.
    pub(crate) runtimes: &'a [Result<RuntimeDirs, String>],
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
    /// As the file that is replaced, with its group and extended attributes.
    Kept,
    /// The same, but for a group that we may not give: without the agent no pod starts while a file names our plugin.
    KeptButGroup,
    /// As told.
    Exactly(u32),
    /// As a file of another name, which this one takes the place of.
    Like { mode: u32, gid: u32 },
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
    /// Nothing is there that could be the primary's file.
    pub(crate) primary_gone: bool,
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
}

#[cfg(test)]
mod tests;

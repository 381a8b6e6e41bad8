//! What the kernel holds, asked with tools that are not under test: rules and routes of a netns, the host's probe
//! sets, what each process keeps open, and what is on disk; to be compared before and after.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use sluice_testkit::netns::Netns;
use sluice_testkit::pod::Pod;
use sluice_testkit::process::{self, Process, status::ProcStatus, text};
use sluice_testkit::wait::{poll_true, poll_until};

use crate::descriptors::all_processes;
use crate::mesh::Mesh;
use crate::netns_state::rules_of;
use crate::proxies::Handoff;
use crate::scene::PATIENCE;

/// Rules, policy routing and routes of a netns; see [`rules_of`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetnsState(String);

impl NetnsState {
    /// Reads it.
    pub fn of(netns: &Netns) -> anyhow::Result<Self> {
        Ok(Self(rules_of(netns)?))
    }

    /// As text.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// The lines that only one of both has, marked `-` or `+`.
    pub fn difference(&self, later: &Self) -> Vec<String> {
        let missing = |mark: char, from: &Self, of: &Self| -> Vec<String> {
            let lines = from
                .0
                .lines()
                .filter(|line| !of.0.lines().any(|other| other == *line));
            lines.map(|line| format!("{mark}{line}")).collect()
        };
        [missing('-', self, later), missing('+', later, self)].concat()
    }
}

/// The elements of every set in the netns that plays the host's.
pub fn probe_addresses(mesh: &Mesh) -> anyhow::Result<BTreeSet<IpAddr>> {
    let listed = process::json(mesh.node().place(), "nft", &["-j", "list", "sets"])?;
    let sets = listed["nftables"].as_array().cloned().unwrap_or_default();
    let elements = sets.iter().filter_map(|object| object["set"]["elem"].as_array());
    let texts = elements
        .flatten()
        .filter_map(|element| element.as_str().or_else(|| element["elem"]["val"].as_str()));
    Ok(texts.filter_map(|text| text.parse().ok()).collect())
}

/// A process and its children.
pub fn family(pid: u32) -> anyhow::Result<Vec<u32>> {
    let mut pids = vec![pid];
    let mut at = 0;
    while let Some(pid) = pids.get(at).copied() {
        for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            // A thread may end while we look.
            let children = std::fs::read_to_string(task?.path().join("children")).unwrap_or_default();
            pids.extend(
                children
                    .split_whitespace()
                    .filter_map(|pid| pid.parse::<u32>().ok()),
            );
        }
        at += 1;
    }
    Ok(pids)
}

/// Everything an ADD leaves anywhere, except in the pod's netns itself.
#[derive(Debug, Clone, PartialEq)]
pub struct Traces {
    /// Rules of the netns that plays the host's.
    pub host_rules: String,
    /// Elements of the probe sets.
    pub probe_set: BTreeSet<IpAddr>,
    /// Files of the sandbox table.
    pub sandbox_files: BTreeSet<String>,
    /// Pods the proxy holds or has pending.
    pub proxy: BTreeSet<String>,
    /// How many descriptors each service has open.
    pub descriptors: BTreeMap<String, usize>,
}

impl Traces {
    /// Reads them.
    pub fn of(mesh: &Mesh) -> anyhow::Result<Self> {
        let mut descriptors = BTreeMap::new();
        for (name, pid) in all_processes(mesh)? {
            if name != "standin-proxy" {
                *descriptors.entry(name).or_default() += ProcStatus::read(pid)?.descriptors()?.len();
            }
        }
        let proxy = if mesh.proxy.as_ref().is_some_and(Process::is_running) {
            let report = mesh.control().counts()?;
            report
                .workloads
                .into_keys()
                .chain(report.pending.into_keys())
                .collect()
        } else {
            BTreeSet::new()
        };
        Ok(Self {
            host_rules: text(mesh.node().place(), "nft", &["-s", "list", "ruleset"], b"")?,
            probe_set: probe_addresses(mesh)?,
            sandbox_files: sandbox_files(mesh)?,
            proxy,
            descriptors,
        })
    }

    /// Whether nothing is left in `self` that was not in `before`. Connections of tests come and go: descriptors may
    /// be fewer.
    pub fn is_back_at(&self, before: &Self) -> bool {
        let grown =
            |(name, count): (&String, &usize)| *count > before.descriptors.get(name).copied().unwrap_or(0);
        let comparable = |traces: &Self| Self {
            descriptors: BTreeMap::new(),
            ..traces.clone()
        };
        comparable(self) == comparable(before) && !self.descriptors.iter().any(grown)
    }

    /// Fails unless a proxy that connects now is given the pods that the one of `self` has, and no other. `name`: of
    /// that proxy.
    pub fn snapshot_is_restored(&self, mesh: &Mesh, name: &str) -> anyhow::Result<()> {
        let connected = || mesh.node_status().map(|node| node.zds.len()).unwrap_or_default();
        let before = connected();
        let later = Handoff::ready(mesh, name)?;
        let mut messages = later.control.report()?.messages;
        messages.retain(|message| message.kind == "add");
        let told: BTreeSet<_> = messages.into_iter().map(|message| message.uid).collect();
        anyhow::ensure!(told == self.proxy, "told {told:?}, before {:?}", self.proxy);
        drop(later);
        Ok(poll_true("that proxy has left", PATIENCE, || {
            connected() <= before
        })?)
    }

    /// Waits until everything is as in `self` again.
    pub fn wait_restored(&self, mesh: &Mesh, within: Duration) -> anyhow::Result<()> {
        let mut last = None;
        let outcome = poll_until("everything is as before", within, || {
            last = Self::of(mesh).ok();
            last.as_ref().filter(|now| now.is_back_at(self)).map(drop)
        });
        outcome.map_err(|late| anyhow::anyhow!("{late}:\nbefore {self:?}\nnow    {last:?}"))
    }
}

/// Names of the files in the executor's sandbox table.
pub fn sandbox_files(mesh: &Mesh) -> anyhow::Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(mesh.run.sandboxes())? {
        names.insert(entry?.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}

/// Asserts that rules and routes of the pod's netns are those of `before`.
///
/// # Panics
/// If they are not.
pub fn assert_netns_is(pod: &Pod, before: &NetnsState) {
    match NetnsState::of(pod.netns()) {
        Ok(now) => assert!(
            now == *before,
            "netns of pod {}: {:#?}",
            pod.name(),
            before.difference(&now)
        ),
        Err(error) => panic!("reading the netns of pod {}: {error:#}", pod.name()),
    }
}

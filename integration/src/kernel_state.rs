//! What the kernel holds, asked with tools that are not under test: rules and routes of a netns, the host's probe
//! sets, what each process keeps open, and what is on disk; to be compared before and after.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use serde_json::{Value, json};
use sluice_testkit::netns::{Netns, Place};
use sluice_testkit::pod::Pod;
use sluice_testkit::process::{self, status::ProcStatus};
use sluice_testkit::wait::poll_until;

use crate::mesh::Mesh;

/// Rules, policy routing and routes of a netns, without what differs between equal ones (handles, counters).
#[derive(Debug, Clone, PartialEq)]
pub struct NetnsState {
    /// `nft -j list ruleset`.
    pub ruleset: Value,
    /// `ip -j rule`, both families.
    pub policy: Value,
    /// `ip -j route show table all`, both families.
    pub routes: Value,
}

impl NetnsState {
    /// Reads it.
    pub fn of(netns: &Netns) -> anyhow::Result<Self> {
        let place = Place::from(netns);
        let ip = |what: &[&str]| -> anyhow::Result<Value> {
            let mut both = Vec::new();
            for family in ["-4", "-6"] {
                both.push(process::json(&place, "ip", &[&["-j", family], what].concat())?);
            }
            Ok(both.into())
        };
        let mut ruleset = process::json(&place, "nft", &["-j", "list", "ruleset"])?;
        strip(&mut ruleset);
        Ok(Self {
            ruleset,
            policy: ip(&["rule"])?,
            routes: ip(&["route", "show", "table", "all"])?,
        })
    }

    /// Whether no table is there at all.
    pub fn has_no_rules(&self) -> bool {
        self.ruleset["nftables"].as_array().is_none_or(Vec::is_empty)
    }
}

fn strip(ruleset: &mut Value) {
    match ruleset {
        Value::Array(items) => {
            items.retain(|item| item.get("metainfo").is_none());
            items.iter_mut().for_each(strip);
        }
        Value::Object(fields) => {
            fields.remove("handle");
            if let Some(counter) = fields.get_mut("counter") {
                *counter = json!({});
            }
            fields.values_mut().for_each(strip);
        }
        _ => {}
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

/// A process and its children, which the opener has.
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

/// Every process of ours on the node, by name; a name has several if it has children.
pub fn processes(mesh: &Mesh) -> anyhow::Result<Vec<(String, u32)>> {
    let mut found = Vec::new();
    for process in crate::descriptors::processes(mesh) {
        let name = process.name();
        found.extend(
            family(process.pid())?
                .into_iter()
                .map(|pid| (name.to_owned(), pid)),
        );
    }
    Ok(found)
}

/// Everything an ADD leaves anywhere, except in the pod's netns itself.
#[derive(Debug, Clone, PartialEq)]
pub struct Traces {
    /// State of the netns that plays the host's.
    pub host: NetnsState,
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
        for (name, pid) in processes(mesh)? {
            if name != "standin-proxy" {
                *descriptors.entry(name).or_default() += ProcStatus::read(pid)?.descriptors()?.len();
            }
        }
        let proxy = if mesh.proxy.is_some() {
            let report = mesh.control().counts()?;
            report
                .workloads
                .into_keys()
                .chain(report.pending.into_keys())
                .collect()
        } else {
            BTreeSet::new()
        };
        let mut host = NetnsState::of(mesh.node().netns())?;
        // Interfaces of pods come and go with the kernel's own routes.
        host.routes = Value::Null;
        Ok(Self {
            host,
            probe_set: probe_addresses(mesh)?,
            sandbox_files: sandbox_files(mesh)?,
            proxy,
            descriptors,
        })
    }

    /// Waits until everything is as in `self` again.
    pub fn wait_restored(&self, mesh: &Mesh, within: Duration) -> anyhow::Result<()> {
        let mut last = None;
        let outcome = poll_until("everything is as before", within, || {
            last = Self::of(mesh).ok();
            (last.as_ref() == Some(self)).then_some(())
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
    let now = NetnsState::of(pod.netns());
    assert_eq!(now.ok().as_ref(), Some(before), "netns of pod {}", pod.name());
}

//! Makes a namespace hold what is asked for, and tells what differs from it.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use sluice_proto::ambient::Desired;

use super::error::NetlinkError;
use super::pod_sockets::PodSockets;
use super::route::{self, Lacking, Object};
use super::table::{self, EncodedRuleSet};
use super::{diversion, link};
use crate::rules::{Family, Fingerprint, PolicyRouting, RuleSet};

/// More distinct option sets than a node's pods have; the cache is emptied when it is full.
const CACHED: usize = 128;

/// What [`apply()`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Whether anything was changed; if not, no listener was notified either.
    pub changed: bool,
    /// Name of the rule set that is now there.
    pub fingerprint: Fingerprint,
    /// The namespace's generation with it, unless somebody else changed rules at the same moment. While
    /// [`generation`] returns the same, the nftables part is as it should be.
    pub generation: Option<u32>,
    /// IPv6 was asked for, but is switched off in the namespace or the kernel.
    pub without_ipv6: bool,
}

/// Why a namespace is not as asked.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The nftables transaction failed; nothing of it took effect.
    #[error("nftables rules were not programmed")]
    Rules(#[source] NetlinkError),
    /// Rules or routes of policy routing could not be changed.
    #[error("policy routing was not programmed")]
    Routing(#[source] NetlinkError),
    /// The state could not be read.
    #[error("state of the namespace was not read")]
    Read(#[source] NetlinkError),
}

impl ApplyError {
    /// The kernel's error number, if it refused.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Rules(error) | Self::Routing(error) | Self::Read(error) => error.errno(),
        }
    }
}

/// Makes the namespace hold exactly what is desired, atomically per table. Idempotent: what is right already is not
/// touched, and nothing is deleted where nothing of ours is.
///
/// Routes come before the marks that use them, and go after them. A first application that fails leaves nothing behind.
pub fn apply(pod: &PodSockets, desired: &Desired) -> Result<Outcome, ApplyError> {
    let wanted = encoded(desired);
    let before = table::generation(&pod.netfilter).map_err(ApplyError::Read)?;
    let Some(routing) = PolicyRouting::for_desired(desired) else {
        let rules = table::delete(&pod.netfilter, wanted.rule_set.table).map_err(ApplyError::Rules)?;
        let routes = remove_objects(pod, &route::all())?;
        return outcome(
            pod,
            &wanted,
            before,
            &Done {
                rules,
                routes,
                without_ipv6: false,
            },
        );
    };
    let state = table::read_table(&pod.netfilter, wanted.rule_set.table).map_err(ApplyError::Read)?;
    let lacking = if state.is_some() {
        route::missing(&pod.route, routing.families).map_err(ApplyError::Read)?
    } else {
        // Nothing of ours: two dumps less on the path of every new pod.
        Lacking {
            objects: route::of_families(routing.families),
            without_ipv6: false,
        }
    };
    let refused = add_routing(pod, &lacking.objects).map_err(ApplyError::Routing)?;
    let without_ipv6 = lacking.without_ipv6 || refused.without_ipv6;
    let rules = match table::converge_from(&pod.netfilter, &wanted, state.as_ref()) {
        Ok(rules) => rules,
        Err(error) => {
            // Best effort: the error that matters is the one already at hand.
            let _ = route::remove(&pod.route, &refused.added);
            return Err(ApplyError::Rules(error));
        }
    };
    let mut routes = !refused.added.is_empty();
    if state.is_some() && !routing.families.contains(&Family::V6) {
        routes |= remove_objects(pod, &route::of_families(&[Family::V6]))?;
    }
    outcome(
        pod,
        &wanted,
        before,
        &Done {
            rules,
            routes,
            without_ipv6,
        },
    )
}

/// Runtimes may bring `lo` up beside the chain of plugins, and no route leads to an interface that is down: what the
/// runtime is about to do is done for it.
fn add_routing(pod: &PodSockets, objects: &[route::Object]) -> Result<route::Added, NetlinkError> {
    match route::add(&pod.route, objects) {
        Err(error) if error.errno() == Some(libc::ENETDOWN) => {
            link::set_loopback_up(&pod.route)?;
            route::add(&pod.route, objects)
        }
        done => done,
    }
}

/// Which parts of a namespace were changed.
struct Done {
    rules: bool,
    routes: bool,
    without_ipv6: bool,
}

fn outcome(
    pod: &PodSockets,
    wanted: &EncodedRuleSet,
    before: u32,
    done: &Done,
) -> Result<Outcome, ApplyError> {
    let now = table::generation(&pod.netfilter).map_err(ApplyError::Read)?;
    // One commit is one step, and the kernel leaves out zero.
    let expected = if done.rules {
        before.checked_add(1).unwrap_or(1)
    } else {
        before
    };
    Ok(Outcome {
        changed: done.rules || done.routes,
        fingerprint: wanted.fingerprint,
        generation: (now == expected).then_some(now),
        without_ipv6: done.without_ipv6,
    })
}

/// The namespace's nftables generation; a few microseconds.
pub fn generation(pod: &PodSockets) -> Result<u32, ApplyError> {
    table::generation(&pod.netfilter).map_err(ApplyError::Read)
}

/// How the namespace differs from what is desired, one line a difference; empty if it does not.
///
/// What the kernel adds by itself is no difference, foreign rules in our table are, other tables are not looked at.
pub fn read_back(pod: &PodSockets, desired: &Desired) -> Result<Vec<String>, ApplyError> {
    let mut lines = table::difference(&pod.netfilter, &encoded(desired))
        .map_err(ApplyError::Read)?
        .lines;
    lines.extend(read_back_routing(pod, desired)?);
    Ok(lines)
}

/// Whether marked packets are routed as desired; far cheaper than [`read_back_routing`], which has the last word where
/// this says no.
pub fn routing_works(pod: &PodSockets, desired: &Desired) -> Result<bool, ApplyError> {
    let Some(routing) = PolicyRouting::for_desired(desired) else {
        return Ok(false);
    };
    diversion::works(&pod.route, routing.families).map_err(ApplyError::Read)
}

/// The part of [`read_back`] that [`generation`] says nothing about.
pub fn read_back_routing(pod: &PodSockets, desired: &Desired) -> Result<Vec<String>, ApplyError> {
    let lines = if let Some(routing) = PolicyRouting::for_desired(desired) {
        let lacking = route::missing(&pod.route, routing.families).map_err(ApplyError::Read)?;
        let lines = lacking
            .objects
            .into_iter()
            .map(|object| format!("{} is missing", object.words()));
        lines.collect()
    } else {
        let left = route::existing(&pod.route, &[Family::V4, Family::V6]).map_err(ApplyError::Read)?;
        let lines = left
            .into_iter()
            .map(|object| format!("{} should not exist", object.words()));
        lines.collect()
    };
    Ok(lines)
}

fn remove_objects(pod: &PodSockets, objects: &[Object]) -> Result<bool, ApplyError> {
    route::remove(&pod.route, objects).map_err(ApplyError::Routing)
}

/// The encoded rule set of a desire; computed once per distinct set of options.
fn encoded(desired: &Desired) -> Arc<EncodedRuleSet> {
    static CACHE: LazyLock<Mutex<HashMap<Desired, Arc<EncodedRuleSet>>>> = LazyLock::new(Mutex::default);
    let mut cache = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = cache.get(desired) {
        return Arc::clone(found);
    }
    if cache.len() >= CACHED {
        cache.clear();
    }
    let encoded = Arc::new(EncodedRuleSet::new(RuleSet::for_desired(desired)));
    cache.insert(desired.clone(), Arc::clone(&encoded));
    encoded
}

//! The periodic look at everything: generation ids of all redirected namespaces in one go, their policy routing where
//! it may have changed and else in turns, the host's rules each second, and interfaces whose sandboxes get no link
//! notifications.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use sluice_proto::pb::executor::Repaired;
use sluice_proto::pb::executor::sandbox_event::Event;

use crate::kernel::HostDamage;
use crate::node::Node;
use crate::pool;
use crate::sandbox::registry::Handle;
use crate::sandbox::{Message, Slot};

/// The host's generation id and polled interfaces are looked at this often.
pub const FAST: Duration = Duration::from_secs(1);
/// Where changes of the routing are heard of, its turn comes so many times less often.
const HEARD: u64 = 10;

/// Looks at the pods for ever.
pub async fn watch_pods(node: Arc<Node>) {
    let settings = &node.settings;
    let mut interval = tokio::time::interval(settings.drift);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // In so many passes the routing of every sandbox is looked at once.
    let turns = u64::try_from(settings.full_drift.as_millis() / settings.drift.as_millis().max(1))
        .unwrap_or(1)
        .max(1);
    let mut pass = 0_u64;
    loop {
        interval.tick().await;
        pass += 1;
        let watched = select(&node, |handle| {
            handle.slot.is_watched().then(|| Watched {
                turn: handle
                    .generation
                    .wrapping_add(pass)
                    .is_multiple_of(if handle.slot.hears_routing() {
                        turns * HEARD
                    } else {
                        turns
                    }),
                slot: Arc::clone(&handle.slot),
                generation: handle.generation,
            })
        });
        let moved = moved(watched).await;
        if moved.is_empty() {
            continue;
        }
        for sender in select(&node, |handle| {
            moved.contains(&handle.generation).then(|| handle.sender.clone())
        }) {
            // A task that has ended has nothing to mend.
            let _ = sender.send(Box::new(Message::Examine));
        }
    }
}

/// What is wanted of each sandbox that can be looked at. Most looks find nothing, so nothing is copied that only a
/// find needs.
fn select<T>(node: &Node, wanted: impl Fn(&Handle) -> Option<T>) -> Vec<T> {
    let inner = node.registry.lock();
    let reachable = inner.sandboxes.values().filter(|h| h.reachable() && !h.ending);
    reachable.filter_map(wanted).collect()
}

/// One namespace to look at.
struct Watched {
    /// Its routing is to be looked at, whether or not it may have changed.
    turn: bool,
    slot: Arc<Slot>,
    /// The sandbox's; no two have the same.
    generation: u64,
}

/// The sandboxes whose rule set's generation id is not what it was, or cannot be read, and those whose policy routing is
/// not as it should be, as far as it is looked at. Rules cannot change without the generation id.
async fn moved(all: Vec<Watched>) -> HashSet<u64> {
    let looked = pool::run("compare generation ids", move || {
        let moved = |watched: Watched| {
            // Whoever is at work there leaves it right, or the next pass sees it.
            let moved = watched.slot.try_with("read generation id", |netns| {
                let heard = watched.slot.take_routing_moved();
                Ok(netns.moved()? || ((heard || watched.turn) && netns.routing_lacks(heard)?))
            });
            moved
                .is_some_and(|moved| moved.unwrap_or(true))
                .then_some(watched.generation)
        };
        Ok(all.into_iter().filter_map(moved).collect())
    });
    looked.await.unwrap_or_default()
}

/// Looks at the host's rules for ever.
pub async fn watch_host(node: Arc<Node>) {
    let mut interval = tokio::time::interval(FAST);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let turns = node.settings.full_drift.as_secs().max(1);
    let mut pass = 0_u64;
    let mut failing = false;
    loop {
        interval.tick().await;
        pass += 1;
        match node.probes.examine(pass.is_multiple_of(turns)).await {
            Ok(mended) => {
                failing = false;
                if let Some(worst) = mended.worst {
                    tell_host_repaired(&node, worst, mended.lines);
                }
            }
            Err(failure) => {
                if !std::mem::replace(&mut failing, true) {
                    tracing::error!(error = %failure, "host rules are not right and cannot be repaired");
                }
            }
        }
    }
}

/// The host's rules were mended.
pub fn tell_host_repaired(node: &Node, worst: HostDamage, differences: Vec<String>) {
    tracing::warn!(target: "audit", reason = worst.label(), ?differences, "host rules repaired");
    node.metrics.repaired_host(worst);
    node.hub.tell(&Event::Repaired(Repaired {
        attachment: None,
        differences,
    }));
}

/// Polls the interfaces of sandboxes without link notifications.
pub async fn watch_interfaces(node: Arc<Node>) {
    let mut interval = tokio::time::interval(FAST);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        let polled = select(&node, |handle| handle.slot.polls_links().then(|| handle.clone()));
        if polled.is_empty() {
            continue;
        }
        let looked = pool::run("poll interfaces", move || {
            let gone = |handle: &Handle| {
                let name = &handle.attachment.ifname;
                handle
                    .slot
                    .try_with("look for interface", |netns| netns.has_interface(name))
                    .is_some_and(|there| there.is_ok_and(|there| !there))
            };
            Ok(polled.into_iter().filter(gone).collect::<Vec<_>>())
        });
        for handle in looked.await.unwrap_or_default() {
            handle.send(Message::LookForInterface);
        }
    }
}

//! Connections survive every change of a pod's rules, and no new one slips by during a replacement. Needs root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first surprise"
)]

#[path = "support/netns.rs"]
mod netns;
#[path = "support/stage.rs"]
mod stage;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use sluice_netns_executor::netlink::apply;
use sluice_proto::ambient::{AmbientOptions, Desired};
use stage::{Stage, Talk};

/// Stops the threads of a test however it ends.
struct Stopper<'a>(&'a AtomicBool);

impl Drop for Stopper<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn kept_connections_stay_with_the_proxy_while_new_ones_go_direct() {
    let stage = Stage::new();
    let sockets = stage.pod.sockets();
    let options = AmbientOptions::default();
    let inside = Desired::Ambient(options.clone());
    let mut direct = stage.outbound();
    assert_eq!((direct.with, stage.inbound().with), ('p', 'a'));
    apply(&sockets, &inside).unwrap();
    let (mut outbound, mut inbound) = (stage.outbound(), stage.inbound());
    assert_eq!((outbound.with, inbound.with), ('o', 'i'));
    apply(&sockets, &Desired::Draining(options.clone())).unwrap();
    assert_eq!((stage.outbound().with, stage.inbound().with), ('p', 'a'));
    outbound.assert_alive("leaving");
    inbound.assert_alive("leaving");
    direct.assert_alive("leaving");
    // Back again: those opened while leaving stay direct.
    let mut meanwhile = stage.outbound();
    apply(&sockets, &inside).unwrap();
    assert_eq!((stage.outbound().with, stage.inbound().with), ('o', 'i'));
    for talk in [&mut outbound, &mut inbound, &mut direct, &mut meanwhile] {
        talk.assert_alive("back again");
    }
    apply(&sockets, &Desired::Draining(options)).unwrap();
    drop((outbound, inbound));
    apply(&sockets, &Desired::None).unwrap();
    assert_eq!((stage.outbound().with, stage.inbound().with), ('p', 'a'));
    direct.assert_alive("gone");
    meanwhile.assert_alive("gone");
}

#[test]
fn while_a_running_pod_joins_only_new_connections_go_to_the_proxy() {
    let stage = Stage::new();
    let sockets = stage.pod.sockets();
    let options = AmbientOptions::default();
    // Unknown to conntrack, which nothing has asked to look yet.
    let (mut outbound, mut inbound) = (stage.outbound(), stage.inbound());
    assert_eq!((outbound.with, inbound.with), ('p', 'a'));
    apply(&sockets, &Desired::Joining(options.clone())).unwrap();
    let (mut new_outbound, mut new_inbound) = (stage.outbound(), stage.inbound());
    assert_eq!((new_outbound.with, new_inbound.with), ('o', 'i'));
    outbound.assert_alive("joining");
    inbound.assert_alive("joining");
    // By their packets they are known now.
    apply(&sockets, &Desired::Ambient(options)).unwrap();
    assert_eq!((stage.outbound().with, stage.inbound().with), ('o', 'i'));
    for talk in [&mut outbound, &mut inbound, &mut new_outbound, &mut new_inbound] {
        talk.assert_alive("in the mesh");
    }
}

#[test]
fn no_connection_is_lost_or_slips_by_while_rules_are_replaced() {
    let stage = Stage::new();
    let sockets = stage.pod.sockets();
    let default = AmbientOptions::default();
    let with_dns = Desired::Ambient(default.clone());
    let without_dns = Desired::Ambient(AmbientOptions {
        dns_capture: false,
        ..default.clone()
    });
    let v4_only = Desired::Ambient(AmbientOptions {
        ipv6: false,
        ..default
    });
    apply(&sockets, &with_dns).unwrap();
    let mut kept = [stage.outbound(), stage.inbound()];
    let (stop, opened) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let stopper = Stopper(&stop);
        for (open, with) in [
            (Stage::outbound as fn(&Stage) -> Talk, 'o'),
            (Stage::inbound, 'i'),
        ] {
            let (stage, stop, opened) = (&stage, &stop, &opened);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    assert_eq!(open(stage).with, with);
                    opened.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let damage = ["", "add counter inet sluice c", "add chain inet sluice extra"];
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut rounds = 0;
        while (rounds < 60 || opened.load(Ordering::Relaxed) < 400) && Instant::now() < deadline {
            let desired = [&without_dns, &v4_only, &with_dns][rounds % 3];
            if !damage[rounds / 3 % 3].is_empty() {
                stage.pod.sh(&format!("nft {}", damage[rounds / 3 % 3]));
            }
            assert!(apply(&sockets, desired).unwrap().changed);
            rounds += 1;
        }
        drop(stopper);
        assert!(rounds >= 60);
    });
    assert!(opened.load(Ordering::Relaxed) >= 400, "{opened:?}");
    for talk in &mut kept {
        talk.assert_alive("replaced");
    }
}

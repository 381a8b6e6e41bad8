//! Rules in real namespaces, seen through `nft` and `ip`. Needs root.

#[path = "support/netns.rs"]
mod netns;

use netns::Netns;
use sluice_netns_executor::netlink::{apply, read_back};
use sluice_netns_executor::rules::RuleSet;
use sluice_proto::ambient::{AmbientOptions, Desired};
use sluice_proto::id::InterfaceName;

/// Every combination of options.
fn all_options() -> Vec<AmbientOptions> {
    let mut all = Vec::new();
    for dns_capture in [true, false] {
        for bypass_inbound_capture in [false, true] {
            for interfaces in 0..3 {
                for ipv6 in [true, false] {
                    let name = |index| InterfaceName::parse(format!("fake1s0f{index}")).unwrap();
                    let virtual_interfaces = (0..interfaces).map(name).collect();
                    let default = AmbientOptions::default();
                    all.push(AmbientOptions { dns_capture, bypass_inbound_capture, virtual_interfaces, ipv6, ..default });
                }
            }
        }
    }
    all
}

fn all_desired() -> Vec<Desired> {
    all_options().into_iter().flat_map(|options| [Desired::Ambient(options.clone()), Desired::Draining(options)]).collect()
}

/// What `nft list` prints, without counter values.
fn listed(netns: &Netns) -> String {
    let text = netns.sh("nft list table inet sluice");
    let words = text.replace("counter packets 0 bytes 0", "counter");
    words.replace("priority raw - 10", "priority -310").replace("priority mangle - 10", "priority -160").replace("priority dstnat - 10", "priority -110")
}

#[test]
fn every_option_combination_is_listed_by_nft_as_rendered() {
    for desired in all_desired() {
        let netns = Netns::new();
        let pod = netns.sockets();
        let outcome = apply(&pod, &desired).unwrap();
        assert!(outcome.changed);
        assert_eq!(listed(&netns), RuleSet::for_desired(&desired).to_string(), "{desired:?}");
        assert_eq!(read_back(&pod, &desired).unwrap(), Vec::<String>::new(), "{desired:?}");
    }
}

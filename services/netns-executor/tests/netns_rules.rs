//! Rules in real namespaces, seen through `nft` and `ip`. Needs root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first surprise"
)]

#[path = "support/netns.rs"]
mod netns;

use netns::Netns;
use sluice_netns_executor::netlink::table::{EncodedRuleSet, read_elements};
use sluice_netns_executor::netlink::{Batch, apply, converge, generation, read_back};
use sluice_netns_executor::rules::{
    Family, HOST_TABLE, HostOptions, PROBES_V4, PROBES_V6, RuleSet, iptables,
};
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
                    all.push(AmbientOptions {
                        dns_capture,
                        bypass_inbound_capture,
                        virtual_interfaces,
                        ipv6,
                        ..default
                    });
                }
            }
        }
    }
    all
}

fn all_desired() -> Vec<Desired> {
    all_options()
        .into_iter()
        .flat_map(|options| {
            [Desired::Ambient, Desired::Joining, Desired::Draining].map(|desired| desired(options.clone()))
        })
        .collect()
}

/// What `nft list` prints, without counter values and with numbers for priorities.
fn listed(netns: &Netns, table: &str) -> String {
    let text = netns.sh(&format!("nft list table inet {table}"));
    let text = text.replace("counter packets 0 bytes 0", "counter");
    text.replace("priority raw - 10", "priority -310")
        .replace("priority mangle - 10", "priority -160")
        .replace("priority dstnat - 10", "priority -110")
        .replace("priority srcnat - 10", "priority 90")
}

/// The chains of a listed table; their order among each other means nothing.
fn chains(text: &str) -> Vec<String> {
    let inner = text
        .strip_prefix("table inet sluice {\n")
        .and_then(|text| text.strip_suffix("}\n"))
        .unwrap();
    let mut chains: Vec<_> = inner.split("\n\n").map(|chain| chain.trim().to_owned()).collect();
    chains.sort();
    chains
}

fn nothing() -> Vec<String> {
    Vec::new()
}

#[test]
fn every_option_combination_is_listed_by_nft_as_rendered_and_routed() {
    for desired in all_desired() {
        let netns = Netns::new();
        let pod = netns.sockets();
        let outcome = apply(&pod, &desired).unwrap();
        assert!(outcome.changed && !outcome.without_ipv6);
        assert_eq!(
            listed(&netns, "sluice"),
            RuleSet::for_desired(&desired).to_string(),
            "{desired:?}"
        );
        assert_eq!(read_back(&pod, &desired).unwrap(), nothing(), "{desired:?}");
        assert_eq!(outcome.generation, Some(generation(&pod).unwrap()));
        netns.sh("nft -j list ruleset >/dev/null && iptables-nft-save >/dev/null");
        let families: &[&str] = match &desired {
            Desired::Ambient(options) | Desired::Joining(options) | Desired::Draining(options)
                if options.ipv6 =>
            {
                &["-4", "-6"]
            }
            _ => &["-4"],
        };
        for family in families {
            let rules = netns.sh(&format!("ip -j {family} rule"));
            let rules: serde_json::Value = serde_json::from_str(&rules).unwrap();
            let ours = rules
                .as_array()
                .unwrap()
                .iter()
                .find(|rule| rule["priority"] == 32764)
                .unwrap();
            let words = (&ours["fwmark"], &ours["fwmask"], &ours["table"]);
            assert_eq!(words, (&"0x111".into(), &"0xfff".into(), &"100".into()));
            let routes = netns.sh(&format!("ip -j {family} route show table 100"));
            let routes: serde_json::Value = serde_json::from_str(&routes).unwrap();
            let words = (&routes[0]["type"], &routes[0]["dst"], &routes[0]["dev"]);
            assert_eq!(words, (&"local".into(), &"default".into(), &"lo".into()));
        }
        let six = netns.sh("ip -6 rule");
        assert_eq!(six.contains("32764"), families.len() == 2, "{desired:?}");
    }
}

#[test]
fn the_text_form_is_a_file_for_nft_with_the_same_result() {
    for desired in all_desired() {
        let netns = Netns::new();
        netns.sh_with("nft -f -", &RuleSet::for_desired(&desired).to_string());
        netns.sh("ip rule add pref 32764 fwmark 0x111/0xfff lookup 100; ip route add local default dev lo table 100");
        netns.sh("ip -6 rule add pref 32764 fwmark 0x111/0xfff lookup 100; ip -6 route add local default dev lo table 100");
        // What nft wrote is to us as if we had.
        let pod = netns.sockets();
        assert_eq!(read_back(&pod, &desired).unwrap(), nothing(), "{desired:?}");
    }
}

#[test]
fn a_second_application_changes_nothing_and_tells_nobody() {
    let netns = Netns::new();
    let pod = netns.sockets();
    let desired = Desired::Ambient(AmbientOptions::default());
    let first = apply(&pod, &desired).unwrap();
    let before = netns.state();
    let script = "nft monitor & nft=$!; ip monitor rule route & ip=$!; read line; kill $nft $ip";
    let mut monitor = netns.spawn(script);
    // The monitors are listening once they show a change that is not ours.
    monitor.wait_for(
        || netns.sh("nft add table inet beacon; nft delete table inet beacon"),
        "delete table inet beacon",
    );
    monitor.wait_for(
        || netns.sh("ip route replace blackhole 198.51.100.1; ip route del blackhole 198.51.100.1"),
        "Deleted blackhole 198.51.100.1",
    );
    let second = apply(&pod, &desired).unwrap();
    assert!(!second.changed);
    assert_eq!(second.fingerprint, first.fingerprint);
    netns.sh("nft add table inet last; nft delete table inet last");
    monitor.wait_for(String::new, "delete table inet last");
    let text = monitor.finish();
    assert!(
        !text.contains("sluice") && !text.contains("table 100") && !text.contains("32764"),
        "{text}"
    );
    assert_eq!(netns.state(), before);
}

#[test]
fn leaving_makes_the_namespace_as_it_was() {
    for desired in all_desired() {
        let netns = Netns::new();
        netns.sh(
            "nft add table inet other; nft add chain inet other c '{ type nat hook output priority -100; }'",
        );
        netns.sh("ip rule add pref 100 fwmark 0x1 lookup 7; ip -6 rule add pref 100 lookup 7");
        let before = netns.state();
        let pod = netns.sockets();
        assert!(!apply(&pod, &Desired::None).unwrap().changed);
        for _ in 0..2 {
            assert!(apply(&pod, &desired).unwrap().changed);
            assert_ne!(read_back(&pod, &Desired::None).unwrap(), nothing());
            assert!(apply(&pod, &Desired::None).unwrap().changed);
            assert_eq!(netns.state(), before, "{desired:?}");
            assert_eq!(read_back(&pod, &Desired::None).unwrap(), nothing());
        }
    }
}

#[test]
fn any_set_of_options_replaces_any_other() {
    let netns = Netns::new();
    let pod = netns.sockets();
    let all = all_desired();
    let mut seed = 7_usize;
    for _ in 0..150 {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let desired = &all[(seed >> 33) % all.len()];
        apply(&pod, desired).unwrap();
        assert_eq!(
            listed(&netns, "sluice"),
            RuleSet::for_desired(desired).to_string(),
            "{desired:?}"
        );
        assert_eq!(read_back(&pod, desired).unwrap(), nothing(), "{desired:?}");
    }
}

/// Damage, and what of it is told.
const DAMAGE: &[(&str, &str)] = &[
    ("nft flush ruleset", "table inet sluice is missing"),
    ("nft delete table inet sluice", "table inet sluice is missing"),
    (
        "nft flush chain inet sluice nat-output",
        "chain nat-output lacks `oifname",
    ),
    (
        "nft flush table inet sluice",
        "chain raw-output lacks `udp dport 53",
    ),
    (
        "nft insert rule inet sluice nat-output accept",
        "chain nat-output has a rule that is not ours",
    ),
    (
        "nft add rule inet sluice mangle-output drop",
        "chain mangle-output has a rule that is not ours",
    ),
    ("nft add chain inet sluice extra", "chain extra is not ours"),
    (
        "nft add chain inet sluice extra; nft add rule inet sluice nat-output jump extra",
        "chain extra is not ours",
    ),
    (
        "nft 'add set inet sluice s { type ipv4_addr; }'",
        "set s is not ours",
    ),
    (
        "nft 'add set inet sluice s { type ipv4_addr; }'; nft add rule inet sluice nat-output ip daddr @s drop",
        "set s is not ours",
    ),
    (
        "nft 'add counter inet sluice c'",
        "holds objects that are not ours",
    ),
    (
        "nft 'add table inet sluice { flags dormant; }'",
        "table inet sluice has flags 0x1",
    ),
    (
        "nft 'add chain inet sluice nat-output { policy drop; }'",
        "chain nat-output is not `type nat",
    ),
    (
        "nft flush chain inet sluice nat-output; nft delete chain inet sluice nat-output",
        "chain nat-output is missing",
    ),
    (
        "nft 'delete table inet sluice; add table inet sluice; \
         add chain inet sluice nat-output { type filter hook input priority 5; }'",
        "chain nat-output is not `type nat",
    ),
    (
        "ip rule del pref 32764",
        "ip rule pref 32764 fwmark 0x111/0xfff lookup 100 is missing",
    ),
    (
        "ip -6 rule del pref 32764",
        "ip rule -6 pref 32764 fwmark 0x111/0xfff lookup 100 is missing",
    ),
    (
        "ip route flush table 100",
        "ip route local default dev lo table 100 is missing",
    ),
    (
        "ip -6 route flush table 100",
        "ip route -6 local default dev lo table 100 is missing",
    ),
    (
        "ip route flush table 100; ip route add blackhole default table 100",
        "ip route local default dev lo table 100 is missing",
    ),
    (
        "ip rule del pref 32764; ip rule add pref 32764 fwmark 0x111/0xff lookup 100",
        "ip rule pref 32764",
    ),
];

#[test]
fn damage_is_named_and_repaired() {
    let desired = Desired::Ambient(AmbientOptions::default());
    let netns = Netns::new();
    let pod = netns.sockets();
    for (damage, name) in DAMAGE {
        apply(&pod, &desired).unwrap();
        let before = generation(&pod).unwrap();
        netns.sh(damage);
        let lines = read_back(&pod, &desired).unwrap();
        assert!(
            lines.iter().any(|line| line.contains(name)),
            "{damage}: {lines:?}"
        );
        assert_eq!(
            generation(&pod).unwrap() != before,
            damage.starts_with("nft"),
            "{damage}"
        );
        assert!(apply(&pod, &desired).unwrap().changed, "{damage}");
        assert_eq!(read_back(&pod, &desired).unwrap(), nothing(), "{damage}");
        let wanted = RuleSet::for_desired(&desired).to_string();
        assert_eq!(chains(&listed(&netns, "sluice")), chains(&wanted), "{damage}");
    }
}

#[test]
fn the_host_table_is_repaired_without_losing_its_elements() {
    let netns = Netns::new();
    let pod = netns.sockets();
    let wanted = EncodedRuleSet::new(RuleSet::host(&HostOptions::default()));
    assert!(converge(&pod.netfilter, &wanted).unwrap());
    assert_eq!(listed(&netns, "sluice-host"), wanted.rule_set.to_string());
    let addresses: Vec<std::net::IpAddr> = vec!["10.0.0.5".parse().unwrap(), "10.0.0.6".parse().unwrap()];
    let mut batch = Batch::new();
    batch.add_elements(HOST_TABLE, PROBES_V4, &addresses);
    batch.add_elements(HOST_TABLE, PROBES_V6, &["fd00::5".parse().unwrap()]);
    batch.commit(&pod.netfilter).unwrap();
    assert!(
        netns
            .sh("nft list set inet sluice-host probes-v4")
            .contains("elements = { 10.0.0.5, 10.0.0.6 }")
    );
    for damage in [
        "nft flush chain inet sluice-host postrouting",
        "nft add chain inet sluice-host x",
    ] {
        netns.sh(damage);
        assert!(converge(&pod.netfilter, &wanted).unwrap());
        let mut found = read_elements(&pod.netfilter, HOST_TABLE, PROBES_V4).unwrap();
        found.sort();
        assert_eq!(found, addresses);
        assert!(!converge(&pod.netfilter, &wanted).unwrap());
    }
    // A set of the right name but another type is replaced.
    netns.sh("nft delete table inet sluice-host; nft add table inet sluice-host");
    netns.sh("nft 'add set inet sluice-host probes-v4 { type inet_service; flags timeout; }'");
    assert!(converge(&pod.netfilter, &wanted).unwrap());
    assert_eq!(listed(&netns, "sluice-host"), wanted.rule_set.to_string());
    let mut batch = Batch::new();
    batch.delete_elements(HOST_TABLE, PROBES_V4, &addresses);
    assert_eq!(batch.commit(&pod.netfilter).unwrap_err().errno(), Some(2)); // ENOENT
}

#[test]
fn iptables_payloads_are_accepted_by_both_flavours() {
    for options in all_options().into_iter().filter(|options| options.ipv6) {
        for flavour in ["nft", "legacy"] {
            let netns = Netns::new();
            netns.sh_with(
                &format!("iptables-{flavour}-restore --noflush"),
                &iptables::payload(&options, Family::V4),
            );
            netns.sh_with(
                &format!("ip6tables-{flavour}-restore --noflush"),
                &iptables::payload(&options, Family::V6),
            );
            for family in [Family::V4, Family::V6] {
                let tool = if family == Family::V4 {
                    "iptables"
                } else {
                    "ip6tables"
                };
                let saved = netns.sh(&format!("{tool}-{flavour}-save"));
                let payload = iptables::payload(&options, family);
                let count = |text: &str| text.lines().filter(|line| line.starts_with("-A ")).count();
                assert_eq!(count(&saved), count(&payload), "{saved}");
            }
        }
    }
}

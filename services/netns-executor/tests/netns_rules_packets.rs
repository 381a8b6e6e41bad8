//! Evaluator, nft backend and iptables backend treat the same packets alike: random options, random packets, really
//! sent in a pair of namespaces. What became of each connection is read from conntrack (translation, zone) and from an
//! observing table (marks). Needs root; `SLUICE_CASES` sets the number of cases (2,000).
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first surprise"
)]

#[path = "support/netns.rs"]
mod netns;
#[path = "support/packets.rs"]
mod packets;
#[path = "support/pair.rs"]
mod pair;

use std::collections::{BTreeSet, HashMap};

use netns::Netns;
use packets::{Random, all_options, inbound, outbound};
use pair::{Case, Observed, Pair, Tuple};
use sluice_netns_executor::netlink::{apply, read_back};
use sluice_netns_executor::rules::evaluate::{Verdict, evaluate};
use sluice_netns_executor::rules::{Family, Hook, RuleSet, iptables};
use sluice_proto::ambient::{AmbientOptions, Desired};

fn random_cases(random: &mut Random, count: usize, options: &AmbientOptions) -> Vec<Case> {
    (0..count)
        .map(|index| {
            let port = 20_000 + u16::try_from(index).unwrap();
            let packet = if random.pick(&[true, false]) {
                outbound(random, port, options)
            } else {
                inbound(random, port)
            };
            Case { packet }
        })
        .collect()
}

fn assert_as_evaluated(
    desired: &Desired,
    cases: &[Case],
    observed: &HashMap<Tuple, Observed>,
    backend: &str,
) {
    let rule_set = RuleSet::for_desired(desired);
    for case in cases {
        let evaluation = evaluate(&rule_set, &case.packet, |_, _| false);
        let seen = observed[&case.tuple()];
        assert_eq!(
            Observed::from(&evaluation),
            seen,
            "{backend}: {case:#?}\n{desired:?}\n{:#?}",
            evaluation.trace
        );
    }
}

#[test]
fn evaluator_and_both_backends_give_random_packets_the_same_verdict() {
    let total: usize = std::env::var("SLUICE_CASES").map_or(2_000, |text| text.parse().unwrap());
    let seed = std::env::var("SLUICE_SEED").map_or(1, |text| text.parse().unwrap());
    let (ours, incumbent) = (Pair::new(), Pair::new());
    let sockets = ours.pod.sockets();
    let options = all_options();
    let per_batch = total.div_ceil(options.len() * 3).min(10_000);
    let rounds = total.div_ceil(per_batch * options.len() * 3);
    let mut random = Random(seed);
    let (mut done, mut kinds) = (0, BTreeSet::new());
    for options in std::iter::repeat_n(options, rounds).flatten() {
        let cases = random_cases(&mut random, per_batch, &options);
        let desired = Desired::Ambient(options.clone());
        apply(&sockets, &desired).unwrap();
        let observed = ours.run(&cases);
        assert_as_evaluated(&desired, &cases, &observed, "nft");
        kinds.extend(cases.iter().map(|case| kind(case, &observed[&case.tuple()])));
        program_iptables(&incumbent.pod, &options);
        assert_as_evaluated(&desired, &cases, &incumbent.run(&cases), "iptables");
        for desired in [
            Desired::Joining(options.clone()),
            Desired::Draining(options.clone()),
        ] {
            let cases = random_cases(&mut random, per_batch, &options);
            apply(&sockets, &desired).unwrap();
            assert_as_evaluated(&desired, &cases, &ours.run(&cases), "nft");
            assert_eq!(read_back(&sockets, &desired).unwrap(), Vec::<String>::new());
        }
        done += 3 * per_batch;
    }
    assert!(done >= total, "{done}");
    // The packets were not all of one kind: by direction, verdict, zone, and whether marks were changed.
    for port in [15001, 15006, 15053] {
        assert!(kinds.iter().any(|kind| kind.1 == Some(port)), "none to {port}");
    }
    for output in [true, false] {
        assert!(
            kinds.iter().any(|kind| kind.0 == output && kind.2),
            "none in zone 1"
        );
        assert!(
            kinds.iter().any(|kind| kind.0 == output && kind.3),
            "no mark changed"
        );
    }
}

/// Whether it is outbound, where it went, whether in a zone, and whether a mark was changed.
fn kind(case: &Case, observed: &Observed) -> (bool, Option<u16>, bool, bool) {
    let port = if let Verdict::Redirected(port) = observed.verdict {
        Some(port)
    } else {
        None
    };
    let marks = (case.packet.mark, case.packet.ct_mark);
    let output = case.packet.hook == Hook::Output;
    (
        output,
        port,
        observed.zone == 1,
        marks != (observed.mark, observed.ct_mark),
    )
}

/// Replaces the pod's rules by the incumbent's, with the routing that goes with them.
fn program_iptables(pod: &Netns, options: &AmbientOptions) {
    pod.sh(
        "nft flush ruleset; ip rule del pref 32764 2>/dev/null; ip -6 rule del pref 32764 2>/dev/null; true",
    );
    for (family, tool, ip) in [
        (Family::V4, "iptables", "ip -4"),
        (Family::V6, "ip6tables", "ip -6"),
    ] {
        if family == Family::V4 || options.ipv6 {
            pod.sh_with(
                &format!("{tool}-nft-restore --noflush"),
                &iptables::payload(options, family),
            );
            pod.sh(&format!("{ip} rule add pref 32764 fwmark 0x111/0xfff lookup 100"));
            pod.sh(&format!("{ip} route replace local default dev lo table 100"));
        }
    }
}

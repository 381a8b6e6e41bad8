//! Golden files of both renderings, and the proof that both mean the same.

use std::net::IpAddr;
use std::path::PathBuf;

use proptest::prelude::*;
use sluice_proto::ambient::{AmbientOptions, Desired, PROBE_IPV4, PROBE_IPV6};
use sluice_proto::id::InterfaceName;

use super::evaluate::{Evaluation, Packet, Verdict, evaluate};
use super::{Family, Fingerprint, Hook, HostOptions, PROBES_V4, PolicyRouting, Protocol, RuleSet, iptables};

fn interface(name: &str) -> InterfaceName {
    InterfaceName::parse(name).unwrap()
}

fn options(dns_capture: bool, bypass_inbound_capture: bool, interfaces: usize, ipv6: bool) -> AmbientOptions {
    let virtual_interfaces = ["fake1s0f0", "fake1s0f1"][..interfaces]
        .iter()
        .map(|name| interface(name))
        .collect();
    AmbientOptions {
        dns_capture,
        bypass_inbound_capture,
        virtual_interfaces,
        ipv6,
        ..AmbientOptions::default()
    }
}

/// Every combination of options but IPv6, with its name.
fn combinations() -> Vec<(String, AmbientOptions)> {
    let mut all = Vec::new();
    for (dns, dns_name) in [(true, "dns"), (false, "no-dns")] {
        for (bypass, bypass_name) in [(false, "inbound"), (true, "bypass-inbound")] {
            for interfaces in 0..3 {
                let name = format!("{dns_name}-{bypass_name}-{interfaces}-interfaces");
                all.push((name, options(dns, bypass, interfaces, true)));
            }
        }
    }
    all
}

/// Compares with a file of `testdata/`, or writes it if `BLESS` is set.
fn golden(name: &str, text: &str) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("testdata")
        .join(name);
    if std::env::var_os("BLESS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(text, expected, "{name}; BLESS=1 rewrites it");
}

#[test]
fn iptables_payload_is_the_incumbents_for_every_combination() {
    for (name, options) in combinations() {
        golden(
            &format!("iptables/{name}.v4.golden"),
            &iptables::payload(&options, Family::V4),
        );
        golden(
            &format!("iptables/{name}.v6.golden"),
            &iptables::payload(&options, Family::V6),
        );
    }
}

#[test]
fn a_change_of_the_rules_raises_their_schema() {
    let mut all = Vec::new();
    for (_, options) in combinations() {
        for desired in [Desired::Ambient(options.clone()), Desired::Draining(options)] {
            let rule_set = RuleSet::for_desired(&desired);
            all.push(format!("{rule_set}{:?}", PolicyRouting::for_desired(&desired)));
        }
    }
    assert_eq!(
        (
            super::RULE_SCHEMA,
            Fingerprint::of(&all.concat()).to_string().as_str()
        ),
        (1, "7d475ed23ee897a3"),
        "the rules are others than those of this schema: raise RULE_SCHEMA"
    );
}

#[test]
fn nft_rule_set_is_as_reviewed_for_every_combination() {
    for (name, options) in combinations() {
        golden(
            &format!("nft/{name}.golden"),
            &RuleSet::for_desired(&Desired::Ambient(options)).to_string(),
        );
    }
    let v4_only = options(true, false, 1, false);
    golden(
        "nft/v4-only.golden",
        &RuleSet::for_desired(&Desired::Ambient(v4_only)).to_string(),
    );
    let leaving = Desired::Draining(AmbientOptions::default());
    golden("nft/draining.golden", &RuleSet::for_desired(&leaving).to_string());
    let joining = Desired::Joining(AmbientOptions::default());
    golden("nft/joining.golden", &RuleSet::for_desired(&joining).to_string());
    golden(
        "nft/host.golden",
        &RuleSet::host(&HostOptions::default()).to_string(),
    );
}

#[test]
fn a_dual_stack_pod_needs_eleven_rules() {
    assert_eq!(
        RuleSet::for_desired(&Desired::Ambient(AmbientOptions::default())).rule_count(),
        11
    );
}

#[test]
fn fingerprints_are_stable_and_tell_options_apart() {
    let of = |desired: &Desired| RuleSet::for_desired(desired).fingerprint().to_string();
    let mut seen: Vec<String> = combinations()
        .into_iter()
        .map(|(_, options)| of(&Desired::Ambient(options)))
        .collect();
    seen.push(of(&Desired::Draining(AmbientOptions::default())));
    seen.push(of(&Desired::None));
    assert_eq!(of(&Desired::None), "cbf29ce484222325");
    let count = seen.len();
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), count);
}

#[test]
fn leaving_keeps_chains_marks_and_routes() {
    let options = AmbientOptions::default();
    let (inside, leaving) = (Desired::Ambient(options.clone()), Desired::Draining(options));
    let names = |desired: &Desired| {
        RuleSet::for_desired(desired)
            .chains
            .iter()
            .map(|chain| chain.name)
            .collect::<Vec<_>>()
    };
    assert_eq!(names(&inside), names(&leaving));
    assert_eq!(
        PolicyRouting::for_desired(&inside),
        PolicyRouting::for_desired(&leaving)
    );
    assert!(!RuleSet::for_desired(&leaving).to_string().contains("redirect"));
    assert!(RuleSet::for_desired(&Desired::None).is_empty());
    assert_eq!(PolicyRouting::for_desired(&Desired::None), None);
}

fn packet(hook: Hook, protocol: Protocol, destination: &str, destination_port: u16) -> Packet {
    let destination: IpAddr = destination.parse().unwrap();
    Packet {
        hook,
        protocol,
        source: if destination.is_ipv4() {
            "10.0.0.9".parse().unwrap()
        } else {
            "fd00::9".parse().unwrap()
        },
        destination,
        source_port: 40000,
        destination_port,
        in_interface: (hook == Hook::Prerouting).then(|| interface("eth0")),
        out_loopback: false,
        mark: 0,
        ct_mark: 0,
        new_connection: true,
        opens_tcp: true,
        socket_uid: Some(0),
    }
}

fn walk(options: &AmbientOptions, packet: &Packet) -> Evaluation {
    evaluate(
        &RuleSet::for_desired(&Desired::Ambient(options.clone())),
        packet,
        |_, _| false,
    )
}

#[test]
fn packets_fare_as_the_table_of_the_specification_says() {
    use Hook::{Output, Prerouting};
    use Protocol::{Tcp, Udp};
    use Verdict::{Redirected, Untouched};
    let default = AmbientOptions::default();
    let verdict = |packet: &Packet| walk(&default, packet).verdict;
    for (remote, own, probe) in [
        ("192.0.2.1", "10.0.0.2", "169.254.7.127"),
        ("2001:db8::1", "fd00::2", &PROBE_IPV6.to_string()),
    ] {
        assert_eq!(verdict(&packet(Output, Tcp, remote, 80)), Redirected(15001));
        assert_eq!(verdict(&packet(Output, Tcp, remote, 53)), Redirected(15053));
        assert_eq!(verdict(&packet(Output, Udp, remote, 53)), Redirected(15053));
        assert_eq!(verdict(&packet(Output, Udp, remote, 80)), Untouched);
        assert_eq!(verdict(&packet(Output, Tcp, probe, 80)), Untouched);
        assert_eq!(verdict(&packet(Prerouting, Tcp, own, 80)), Redirected(15006));
        assert_eq!(verdict(&packet(Prerouting, Tcp, own, 15008)), Untouched);
        assert_eq!(verdict(&packet(Prerouting, Udp, own, 80)), Untouched);
        let proxy = Packet {
            mark: 0x539,
            ..packet(Output, Tcp, remote, 80)
        };
        assert_eq!(verdict(&proxy), Untouched);
        let own_query = Packet {
            mark: 0x539,
            ..packet(Output, Udp, remote, 53)
        };
        assert_eq!(
            (verdict(&own_query), walk(&default, &own_query).zone),
            (Untouched, 1)
        );
        let to_itself = Packet {
            out_loopback: true,
            ..packet(Output, Tcp, own, 80)
        };
        assert_eq!(verdict(&to_itself), Untouched);
        let kubelet = Packet {
            source: probe.parse().unwrap(),
            ..packet(Prerouting, Tcp, own, 80)
        };
        assert_eq!(verdict(&kubelet), Untouched);
        let reply = Packet {
            ct_mark: 0x111,
            new_connection: false,
            opens_tcp: false,
            ..packet(Output, Tcp, remote, 40001)
        };
        let evaluation = walk(&default, &reply);
        let routing = PolicyRouting::for_desired(&Desired::Ambient(default.clone()));
        assert!(evaluation.is_routed_locally(routing, Family::of(reply.destination)));
    }
    let virtual_machine = Packet {
        in_interface: Some(interface("fake1s0f0")),
        ..packet(Prerouting, Tcp, "192.0.2.1", 80)
    };
    assert_eq!(
        walk(&options(true, true, 1, true), &virtual_machine).verdict,
        Redirected(15001)
    );
    assert_eq!(
        walk(
            &options(true, true, 1, true),
            &packet(Prerouting, Tcp, "10.0.0.2", 80)
        )
        .verdict,
        Untouched
    );
}

#[test]
fn a_trace_names_every_rule_and_the_condition_that_failed() {
    let evaluation = walk(
        &AmbientOptions::default(),
        &packet(Hook::Output, Protocol::Tcp, "192.0.2.1", 80),
    );
    let last = evaluation.trace.last().unwrap();
    assert_eq!((last.chain, last.failed.as_deref()), ("nat-output", None));
    assert!(last.rule.ends_with("counter redirect to :15001"), "{}", last.rule);
    assert_eq!(evaluation.trace[0].failed.as_deref(), Some("udp dport 53"));
}

#[test]
fn probes_of_local_sockets_get_the_probe_address() {
    let rule_set = RuleSet::host(&HostOptions::default());
    let probe = packet(Hook::Postrouting, Protocol::Tcp, "10.0.0.2", 8080);
    let run = |packet: &Packet, in_set: bool| {
        evaluate(&rule_set, packet, |set, _| set == PROBES_V4 && in_set).verdict
    };
    assert_eq!(run(&probe, true), Verdict::SourceRewritten(PROBE_IPV4.into()));
    assert_eq!(run(&probe, false), Verdict::Untouched);
    assert_eq!(
        run(
            &Packet {
                socket_uid: None,
                ..probe
            },
            true
        ),
        Verdict::Untouched
    );
}

fn any_packet() -> impl Strategy<Value = Packet> {
    let addresses = prop_oneof![
        Just(("169.254.7.127", "169.254.7.127")),
        Just(("10.0.0.9", "127.0.0.1")),
        Just(("127.0.0.1", "127.0.0.2")),
        Just(("10.0.0.9", "192.0.2.1")),
        Just(("10.0.0.2", "169.254.7.127")),
        Just(("169.254.7.127", "10.0.0.2")),
        Just(("fd16:9254:7127:1337:ffff:ffff:ffff:ffff", "fd00::2")),
        Just(("fd00::2", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff")),
        Just(("fd00::2", "::1")),
        Just(("fd00::9", "2001:db8::1")),
    ];
    let marks = || {
        prop_oneof![
            Just(0),
            Just(0x539),
            Just(0x111),
            Just(0x7539),
            Just(0x7111),
            any::<u32>()
        ]
    };
    let ports = || prop_oneof![Just(53), Just(15008), Just(80), Just(15001), any::<u16>()];
    (
        (
            any::<bool>(),
            prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp), Just(Protocol::Other(1))],
        ),
        (addresses, ports(), ports()),
        (
            prop_oneof![Just("eth0"), Just("lo"), Just("fake1s0f0"), Just("fake1s0f1")],
            any::<bool>(),
        ),
        (marks(), marks(), any::<bool>(), any::<bool>()),
    )
        .prop_map(
            |((out, protocol), (addresses, source_port, destination_port), (name, out_loopback), marks)| {
                Packet {
                    hook: if out { Hook::Output } else { Hook::Prerouting },
                    protocol,
                    source: addresses.0.parse().unwrap(),
                    destination: addresses.1.parse().unwrap(),
                    source_port,
                    destination_port,
                    in_interface: (!out).then(|| interface(name)),
                    out_loopback: out && out_loopback,
                    mark: marks.0,
                    ct_mark: marks.1,
                    new_connection: marks.2,
                    opens_tcp: protocol == Protocol::Tcp && marks.3,
                    socket_uid: out.then_some(0),
                }
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 5_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_pod_that_joins_differs_in_tcp_that_opens_no_connection_alone(
        (dns, bypass, interfaces, ipv6) in (any::<bool>(), any::<bool>(), 0..3usize, any::<bool>()),
        packet in any_packet(),
    ) {
        let options = options(dns, bypass, interfaces, ipv6);
        let inside = walk(&options, &packet);
        let joining = RuleSet::for_desired(&Desired::Joining(options));
        let joining = evaluate(&joining, &packet, |_, _| false);
        let spared = packet.protocol == Protocol::Tcp && !packet.opens_tcp;
        let verdict = if spared { Verdict::Untouched } else { inside.verdict };
        prop_assert_eq!(
            (joining.verdict, joining.mark, joining.ct_mark, joining.zone),
            (verdict, inside.mark, inside.ct_mark, inside.zone)
        );
    }

    #[test]
    fn both_lists_of_rules_mean_the_same(
        (dns, bypass, interfaces, ipv6) in (any::<bool>(), any::<bool>(), 0..3usize, any::<bool>()),
        packet in any_packet(),
    ) {
        let options = options(dns, bypass, interfaces, ipv6);
        let family = Family::of(packet.destination);
        let ours = walk(&options, &packet);
        // Without IPv6 the incumbent makes no IPv6 rules at all.
        let mut theirs = iptables::rule_set(&options, family);
        if family == Family::V6 && !ipv6 {
            theirs.chains.clear();
        }
        let theirs = evaluate(&theirs, &packet, |_, _| false);
        prop_assert_eq!(
            (ours.verdict, ours.mark, ours.ct_mark, ours.zone),
            (theirs.verdict, theirs.mark, theirs.ct_mark, theirs.zone)
        );
    }
}

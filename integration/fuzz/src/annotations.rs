//! Whatever a pod's author writes into its annotations: typed values come of it or nothing, and no rule depends on the
//! text otherwise.

use sluice_netns_executor::netlink::table::EncodedRuleSet;
use sluice_netns_executor::rules::{Family, Match, RuleSet, iptables};
use sluice_proto::ambient::{AmbientOptions, Desired};
use sluice_proto::id::InterfaceName;
use sluice_proto::pb::types;
use sluice_selection::{
    BYPASS_INBOUND_CAPTURE, CONFIG_HASH, CONFIG_MIRROR, DNS_CAPTURE, Labels, MAX_VIRTUAL_INTERFACES,
    NamespaceView, Overrides, PodView, REDIRECTION_STATUS, REROUTE_VIRTUAL_INTERFACES, SIDECAR_STATUS,
    SelectionConfig, sandbox_uid, select,
};

/// Every annotation that anybody here reads.
const KEYS: [&str; 7] = [
    REROUTE_VIRTUAL_INTERFACES,
    DNS_CAPTURE,
    BYPASS_INBOUND_CAPTURE,
    SIDECAR_STATUS,
    CONFIG_MIRROR,
    CONFIG_HASH,
    REDIRECTION_STATUS,
];

/// The values in the order of [`KEYS`], apart by zero bytes; an annotation without one is absent.
fn annotations(input: &[u8]) -> Labels {
    let values = input.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    let given = KEYS.iter().zip(values).filter(|(_, value)| !value.is_empty());
    given
        .map(|(key, value)| ((*key).to_owned(), value.into_owned()))
        .collect()
}

#[test]
fn become_typed_values_or_nothing() {
    bolero::check!().for_each(|input: &[u8]| {
        let annotations = annotations(input);
        only_a_sidecar_keeps_a_pod_out(&annotations);
        let overrides = Overrides::<InterfaceName>::parse(&annotations);
        names_are_harmless(&overrides, &annotations);
        let options = AmbientOptions {
            dns_capture: overrides.dns_capture.unwrap_or(true),
            bypass_inbound_capture: overrides.bypass_inbound_capture,
            virtual_interfaces: overrides.virtual_interfaces,
            ..AmbientOptions::default()
        };
        rules_do_not_depend_on_names(&options);
    });
}

/// Annotations never put a pod into the mesh, and name another UID only in the form of one.
fn only_a_sidecar_keeps_a_pod_out(annotations: &Labels) {
    let config = SelectionConfig::default();
    let (none, ambient) = (
        Labels::new(),
        Labels::from([(sluice_selection::DATAPLANE_MODE.to_owned(), "ambient".to_owned())]),
    );
    let is_in = |labels| {
        let pod = PodView {
            namespace: "shop",
            name: "web",
            labels,
            annotations,
            host_network: false,
            phase: None,
        };
        select(&config, &pod, Some(NamespaceView { labels: &none })).is_in()
    };
    assert!(!is_in(&none));
    assert_eq!(is_in(&ambient), !annotations.contains_key(SIDECAR_STATUS));
    let uid = sandbox_uid("uid-1", annotations);
    assert!(
        uid == "uid-1" || uid.len() == 32 && uid.bytes().all(|byte| byte.is_ascii_hexdigit()),
        "{uid:?}"
    );
}

/// A name was given in full, could be an interface's, and holds nothing that means something to a tool.
fn names_are_harmless(overrides: &Overrides<InterfaceName>, annotations: &Labels) {
    let list = annotations
        .get(REROUTE_VIRTUAL_INTERFACES)
        .map_or("", String::as_str);
    let names = &overrides.virtual_interfaces;
    for (index, name) in names.iter().enumerate() {
        let name = name.as_str();
        assert!(list.split(',').any(|item| item.trim() == name), "{name:?}");
        assert!((1..=15).contains(&name.len()), "{name:?}");
        let harmless = |byte: u8| byte.is_ascii_graphic() && !b"/:'\"`;#{}\\$,*+".contains(&byte);
        assert!(name.bytes().all(harmless) && !name.starts_with('!'), "{name:?}");
        assert!(!names[..index].iter().any(|earlier| earlier.as_str() == name));
    }
    assert!(names.len() <= MAX_VIRTUAL_INTERFACES);
    assert!(overrides.warnings.len() <= 2 * MAX_VIRTUAL_INTERFACES);
    for warning in &overrides.warnings {
        assert!(warning.value.chars().count() <= 64);
        assert!(!warning.to_string().contains('\n'), "{warning}");
    }
}

/// With other names in their places, the rules are the same: in the model, and line by line in their texts.
fn rules_do_not_depend_on_names(options: &AmbientOptions) {
    let desired = Desired::Ambient(options.clone());
    let received = Desired::try_from(types::Desired::from(&desired)).unwrap();
    assert_eq!(received, desired, "the executor takes what the broker sends");
    let stand_ins: Vec<InterfaceName> = options
        .virtual_interfaces
        .iter()
        .enumerate()
        .map(|(index, name)| {
            let width = name.as_str().len();
            InterfaceName::parse(format!("{index:0>width$}")).unwrap()
        })
        .collect();
    let other = Desired::Ambient(AmbientOptions {
        virtual_interfaces: stand_ins.clone(),
        ..options.clone()
    });
    let (mut rules, expected) = (RuleSet::for_desired(&desired), RuleSet::for_desired(&other));
    assert_eq!(shape(&rules.to_string()), shape(&expected.to_string()));
    for family in [Family::V4, Family::V6] {
        let Desired::Ambient(other) = &other else { return };
        let text = |options| shape(&iptables::payload(options, family));
        assert_eq!(text(options), text(other));
    }
    let _ = EncodedRuleSet::new(rules.clone());
    for rule in rules.chains.iter_mut().flat_map(|chain| &mut chain.rules) {
        for part in &mut rule.matches {
            if let Match::InInterface(_, name) = part
                && let Some(place) = options.virtual_interfaces.iter().position(|known| known == name)
            {
                *name = stand_ins[place].clone();
            }
        }
    }
    assert_eq!(rules, expected);
}

/// Lines, and words and quotes of each.
fn shape(text: &str) -> Vec<(usize, usize)> {
    let of_line = |line: &str| (line.split_whitespace().count(), line.matches('"').count());
    text.lines().map(of_line).collect()
}

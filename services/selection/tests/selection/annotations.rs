//! What pods say of themselves by annotation.

use sluice_selection::{Labels, Overrides};

fn overrides(pairs: &[(&str, &str)]) -> Overrides<String> {
    Overrides::parse(
        &pairs
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect(),
    )
}

#[test]
fn boolean_annotations_take_exactly_the_documented_words() {
    const DNS: &str = "ambient.istio.io/dns-capture";
    for (words, expected) in [
        (["1", "t", "T", "TRUE", "true", "True"], true),
        (["0", "f", "F", "FALSE", "false", "False"], false),
    ] {
        for word in words {
            let parsed = overrides(&[(DNS, word), ("ambient.istio.io/bypass-inbound-capture", word)]);
            assert_eq!(parsed.dns_capture, Some(expected), "{word}");
            assert_eq!(parsed.bypass_inbound_capture, expected, "{word}");
            assert!(parsed.warnings.is_empty());
        }
    }
    for word in ["yes", "tweedledum", "", " true", "tRUE", "on"] {
        let parsed = overrides(&[(DNS, word)]);
        assert_eq!(parsed.dns_capture, None, "{word}");
        assert_eq!(parsed.warnings.len(), 1, "{word}");
        assert!(
            parsed.warnings[0]
                .to_string()
                .starts_with("annotation ambient.istio.io/dns-capture: ")
        );
    }
    let absent = overrides(&[]);
    assert_eq!((absent.dns_capture, absent.bypass_inbound_capture), (None, false));
}

/// Stands for the type that checks interface names.
#[derive(Debug, PartialEq)]
struct Short(String);

impl std::str::FromStr for Short {
    type Err = &'static str;
    fn from_str(name: &str) -> Result<Self, &'static str> {
        if name.len() <= 15 && !name.contains(' ') {
            Ok(Self(name.into()))
        } else {
            Err("at most 15 characters")
        }
    }
}

#[test]
fn interface_lists_keep_order_and_report_what_they_drop() {
    const KEY: &str = "istio.io/reroute-virtual-interfaces";
    assert_eq!(
        overrides(&[(KEY, "en0ps1, en1ps1")]).virtual_interfaces,
        ["en0ps1", "en1ps1"]
    );
    assert_eq!(overrides(&[(KEY, "x,   ")]).virtual_interfaces, ["x"]);
    assert_eq!(overrides(&[(KEY, "b,a,b")]).virtual_interfaces, ["b", "a"]);

    let annotations = Labels::from([(KEY.to_owned(), "eth1, eth0; flush ruleset, eth2".to_owned())]);
    let parsed = Overrides::<Short>::parse(&annotations);
    assert_eq!(
        parsed.virtual_interfaces,
        [Short("eth1".into()), Short("eth2".into())]
    );
    assert_eq!(
        parsed.warnings[0].to_string(),
        "annotation istio.io/reroute-virtual-interfaces: \"eth0; flush ruleset\" is ignored: at most 15 characters"
    );

    let many: Vec<String> = (0..1000).map(|i| format!("eth{i}")).collect();
    let parsed = overrides(&[(KEY, &many.join(","))]);
    assert_eq!((parsed.virtual_interfaces.len(), parsed.warnings.len()), (16, 1));
    let hostile = Labels::from([(KEY.to_owned(), "a b,".repeat(10_000))]);
    assert!(Overrides::<Short>::parse(&hostile).warnings.len() <= 16);
}

//! Whatever comes in, stdout is one JSON document or nothing.

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use crate::run::{Done, Run};

fn cases() -> ProptestConfig {
    ProptestConfig {
        cases: 96,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

fn one_document_or_none(done: &Done) {
    assert!(matches!(done.status, 0 | 1), "{done:?}");
    if done.stdout.is_empty() {
        assert_eq!(done.status, 0, "{done:?}");
    } else if done.status == 1 {
        done.error();
    } else {
        done.json();
    }
}

fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>()
            .prop_filter("finite", |f| f.is_finite())
            .prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 5, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::vec((".{0,8}", inner), 0..5)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect::<Map<_, _>>())),
        ]
    })
}

fn command() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => prop::sample::select(vec!["ADD", "DEL", "CHECK", "STATUS", "GC", "VERSION"]).prop_map(str::to_owned),
        1 => "[A-Za-z ]{0,8}",
    ]
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn any_bytes_on_stdin(command in command(), bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let run = Run::new("ADD", &json!({})).env("CNI_COMMAND", &command).stdin(bytes);
        one_document_or_none(&run.go());
    }

    #[test]
    fn any_value_at_any_key(
        command in command(),
        key in prop::sample::select(vec![
            "cniVersion", "name", "type", "prevResult", "runDir", "selection", "ifname", "logLevel", "standAlone", "status",
            "cni.dev/valid-attachments", "unknown",
        ]),
        value in json_value(),
    ) {
        let mut config = crate::nowhere("1.1.0");
        config[key] = value;
        // Not a pod, so that no case waits for an executor that is not there.
        let run = Run::new("ADD", &config).env("CNI_COMMAND", &command).without("CNI_ARGS");
        // A DEL that cannot read `runDir` uses the default one, which must be none of ours here.
        let run = if command == "DEL" { run.env("CNI_IFNAME", "net1") } else { run };
        one_document_or_none(&run.go());
    }

    #[test]
    fn any_text_in_any_variable(
        command in command(),
        variable in prop::sample::select(vec!["CNI_CONTAINERID", "CNI_IFNAME", "CNI_NETNS", "CNI_ARGS"]),
        value in "[^\0]{0,40}",
    ) {
        let run = Run::new("ADD", &crate::nowhere("0.3.1")).env("CNI_COMMAND", &command).pod("kube-system", "x");
        one_document_or_none(&run.env(variable, &value).go());
    }

    #[test]
    fn a_result_passes_unchanged_whatever_is_in_it(
        fields in prop::collection::vec((".{0,8}", json_value()), 0..6),
        space in "[ \n\t]{0,3}",
    ) {
        // Text, not a value: key order, doubled keys and the form of numbers must survive, too.
        let fields: Vec<String> = fields.into_iter().map(|(k, v)| format!("{}:{space}{v}", Value::from(k))).collect();
        let result = format!("{{{space}{}{space}}}", fields.join(","));
        let input = format!(r#"{{"prevResult": {result}, "name": "n", "cniVersion": "1.1.0"}}"#);
        let done = Run::new("ADD", &json!({})).pod("kube-system", "x").stdin(input).without("CNI_ARGS").go();
        prop_assert_eq!(done.status, 0);
        prop_assert_eq!(done.stdout.strip_suffix('\n').unwrap(), result);
    }
}

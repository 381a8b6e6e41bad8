use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::entry::tests::plain;

const OURS: &str = r#"{"type":"sluice-cni","runDir":"/run/sluice","logLevel":"warn"}"#;

fn inserted(text: &str) -> String {
    insert(text, &plain(), &[]).unwrap()
}

#[test]
fn a_list_on_one_line_stays_on_one_line() {
    let text = r#"{"name":"podnet","plugins":[{"type":"ptp","mtu":1450.0}]}"#;
    let expected = format!(r#"{{"name":"podnet","plugins":[{{"type":"ptp","mtu":1450.0}},{OURS}]}}"#);
    assert_eq!(inserted(text), expected);
}

#[test]
fn an_indented_list_gets_an_indented_entry() {
    let text = "{\n\t\"name\": \"podnet\",\n\t\"plugins\": [\n\t\t{\"type\": \"ptp\"},\n\t\t{\"type\": \"portmap\"}\n\t]\n}\n";
    let expected = "{\n\t\"name\": \"podnet\",\n\t\"plugins\": [\n\t\t{\"type\": \"ptp\"},\n\t\t{\"type\": \"portmap\"},\n\t\t{\n\
                    \t\t\t\"type\": \"sluice-cni\",\n\t\t\t\"runDir\": \"/run/sluice\",\n\t\t\t\"logLevel\": \"warn\"\n\t\t}\n\t]\n}\n";
    assert_eq!(inserted(text), expected);
}

#[test]
fn number_lexemes_escapes_and_unknown_keys_are_kept() {
    let text = r#"{ "x-vendor" : "a&b <c> é", "cniVersions":["0.4.0"], "name":"n", "big": 9007199254740993,
        "plugins" : [ {"type":"ptp","mtu":1450.0,"e":1E400} ] , "disableCheck":true}"#;
    let edited = inserted(text);
    let at = text.find(" ] , \"disableCheck\"").unwrap();
    assert!(
        edited.starts_with(&text[..at]) && edited.ends_with(&text[at..]),
        "{edited}"
    );
    assert_eq!(remove(&edited, &[PLUGIN]).unwrap(), Rest::Text(text.to_owned()));
}

#[test]
fn stale_entries_are_replaced_wherever_they_stand() {
    let text = r#"{"name":"n","plugins":[{"type":"ptp"},{"type":"sluice-cni","old":1},{"type":"bandwidth"},{"type":"sluice-cni"}]}"#;
    let expected = format!(r#"{{"name":"n","plugins":[{{"type":"ptp"}},{{"type":"bandwidth"}},{OURS}]}}"#);
    assert_eq!(inserted(text), expected);
    assert_eq!(inserted(&expected), expected);
}

#[test]
fn another_mesh_is_displaced_on_request() {
    let text = r#"{"name":"n","plugins":[{"type":"ptp"},{"type":"istio-cni","ambient_enabled":true}]}"#;
    let expected = format!(r#"{{"name":"n","plugins":[{{"type":"ptp"}},{OURS}]}}"#);
    assert_eq!(insert(text, &plain(), &[ISTIO]).unwrap(), expected);
}

#[test]
fn a_list_of_nothing_but_our_entry_is_nothing() {
    let text = format!(r#"{{"name":"n","plugins":[{OURS}]}}"#);
    assert_eq!(remove(&text, &[PLUGIN]).unwrap(), Rest::Nothing);
    assert_eq!(inserted(&text), text);
    let foreign = r#"{"name":"n","plugins":[{"type":"ptp"}]}"#;
    assert_eq!(remove(foreign, &[PLUGIN]).unwrap(), Rest::Untouched);
}

#[test]
fn a_single_plugin_becomes_the_list_that_libcni_makes_of_it() {
    let text = r#"{"cniVersion":"1.0.0","name":"edge","type":"macvlan","mtu":1.50}"#;
    let list = list_from_single(text, &Single::parse(text).unwrap(), &plain()).unwrap();
    assert!(list.contains("\"mtu\":1.50"), "{list}");
    let value: Value = serde_json::from_str(&list).unwrap();
    assert_eq!(value["name"], "edge");
    assert_eq!(value["cniVersion"], "1.0.0");
    assert_eq!(value["plugins"][0]["type"], "macvlan");
    assert_eq!(value["plugins"][1]["type"], "sluice-cni");

    let bare = r#"{"type":"macvlan"}"#;
    let list = list_from_single(bare, &Single::parse(bare).unwrap(), &plain()).unwrap();
    let value: Value = serde_json::from_str(&list).unwrap();
    assert_eq!(
        (&value["name"], &value["cniVersion"]),
        (&json!("k8s-pod-network"), &json!("0.3.1"))
    );
}

#[test]
fn plugins_of_files_come_between_the_inline_ones_and_ours() {
    let text = r#"{"cniVersion":"1.1.0","name":"podnet","plugins":[{"type":"ptp"}],"x":1.0}"#;
    let list = List::parse(text).unwrap();
    let drop_ins = ["{\"type\":\"tuning\"}\n", r#"{"type":"istio-cni"}"#];
    let made = inline_drop_ins(&list, &drop_ins, &plain(), &[ISTIO]).unwrap();
    let made = List::parse(&made).unwrap();
    let kinds: Vec<String> = made
        .plugins
        .unwrap()
        .into_iter()
        .map(|plugin| plugin.kind)
        .collect();
    assert_eq!(kinds, ["ptp", "tuning", "sluice-cni"]);
    assert!(made.only_inlined);
    assert_eq!(made.object.get("x").unwrap().get(), "1.0");
}

/// White space as JSON knows it.
fn space() -> impl Strategy<Value = String> {
    proptest::string::string_regex("[ \n\t\r]{0,6}").unwrap()
}

fn plugin() -> impl Strategy<Value = String> {
    let kind = prop_oneof![
        Just("ptp"),
        Just("portmap"),
        Just("weird \\\" ] }"),
        Just("bandwidth")
    ];
    (kind, any::<i64>(), space(), "[ -!#-\\[\\]-~é]{0,8}").prop_map(|(kind, number, space, text)| {
        format!("{{{space}\"type\":{space}\"{kind}\",\"n\":{number}.50,\"text\":\"{text}\",\"deep\":[[{{}}],[]]{space}}}")
    })
}

fn list() -> impl Strategy<Value = String> {
    let plugins = proptest::collection::vec((space(), plugin(), space()), 1..5);
    (plugins, space(), "k[a-z ]{0,6}").prop_map(|(plugins, space, key)| {
        let plugins: Vec<String> = plugins.iter().map(|(a, plugin, b)| format!("{a}{plugin}{b}")).collect();
        format!(
            "{space}{{{space}\"{key}\":[1,\"plugins\"],\"name\":\"n\",{space}\"plugins\":{space}[{}]{space},\"z\":1E2}}{space}",
            plugins.join(",")
        )
    })
}

proptest! {
    #[test]
    fn removing_undoes_inserting_byte_for_byte(text in list()) {
        let edited = insert(&text, &plain(), &[]).unwrap();
        prop_assert_eq!(insert(&edited, &plain(), &[]).unwrap(), edited.clone());
        let mut before: Value = serde_json::from_str(&text).unwrap();
        let after: Value = serde_json::from_str(&edited).unwrap();
        before["plugins"].as_array_mut().unwrap().push(serde_json::from_str(OURS).unwrap());
        prop_assert_eq!(before, after);
        prop_assert_eq!(remove(&edited, &[PLUGIN]).unwrap(), Rest::Text(text));
    }

    #[test]
    fn no_text_makes_an_edit_panic(text in "\\PC{0,60}", inner in "[\\[\\]{}\",:a-z0-9 ]{0,40}") {
        let _ = insert(&text, &plain(), &[]);
        let _ = remove(&text, &[PLUGIN]);
        let _ = insert(&format!("{{\"name\":\"n\",\"plugins\":[{inner}]}}"), &plain(), &[]);
    }
}

use std::net::IpAddr;

use sluice_selection::Phase;

use super::*;

const GOOD: &str = include_str!("../../../testdata/manifests/good/shop.yaml");
const LIST: &str = include_str!("../../../testdata/manifests/good/exported.json");

fn pods(objects: &[Object]) -> Vec<&Pod> {
    let mut pods = Vec::new();
    for object in objects {
        if let Object::Pod(pod) = object {
            pods.push(&**pod);
        }
    }
    pods
}

/// The problems as an operator reads them.
fn problems(text: &str) -> Vec<String> {
    parse(text, "x.yaml", false)
        .unwrap_err()
        .iter()
        .map(ToString::to_string)
        .collect()
}

#[test]
fn a_file_of_several_documents_gives_all_their_objects() {
    let objects = parse(GOOD, "shop.yaml", false).unwrap();
    assert_eq!(objects.len(), 3);
    let Object::Namespace(namespace) = &objects[0] else {
        panic!("{objects:?}")
    };
    assert_eq!(namespace.labels["istio.io/dataplane-mode"], "ambient");
    let web = pods(&objects)[0];
    assert_eq!(web.id.to_string(), "shop/web-0");
    assert_eq!(web.id.uid.as_str(), "3f1c3d1e-6f4e-4a58-9f3e-0d4f3f0a1b2c");
    assert_eq!(web.service_account, "web");
    assert_eq!(web.node_name.as_deref(), Some("node-1"));
    assert_eq!(web.phase, Phase::Running);
    assert_eq!(
        web.ips,
        ["10.1.0.5".parse::<IpAddr>().unwrap(), "fd00::5".parse().unwrap()]
    );
    assert_eq!(web.annotations["note"], "several lines\n--- of text\n");
    let batch = pods(&objects)[1];
    assert_eq!(
        (batch.service_account.as_str(), batch.phase, batch.ips.len()),
        ("default", Phase::Pending, 0)
    );
}

#[test]
fn a_json_list_gives_its_items() {
    let objects = parse(LIST, "exported.json", true).unwrap();
    let agent = pods(&objects)[0];
    assert_eq!(agent.id.to_string(), "default/agent");
    assert!(agent.host_network && agent.labels.is_empty());
    assert_eq!(agent.deletion_timestamp.as_deref(), Some("2026-01-01T00:00:00Z"));
    assert_eq!(agent.ips, ["192.0.2.7".parse::<IpAddr>().unwrap()]);
}

#[test]
fn json_is_yaml_as_well() {
    let text = r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}}"#;
    assert_eq!(
        parse(text, "x.yaml", false).unwrap(),
        parse(text, "x.json", true).unwrap()
    );
}

#[test]
fn a_missing_uid_is_derived_from_the_name_and_stays_the_same() {
    let uid = |name: &str| {
        let text = format!("apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: shop}}\n");
        pods(&parse(&text, "x.yaml", false).unwrap())[0]
            .id
            .uid
            .to_string()
    };
    // Fixed: the proxy knows a pod by it across restarts and versions.
    assert_eq!(uid("web-0"), "31b24fce-a88e-5098-a9f0-17451530f36d");
    assert_ne!(uid("web-0"), uid("web-1"));
    assert_eq!(uid("web-0").as_bytes()[14], b'5');
}

#[test]
fn type_errors_name_file_line_and_field() {
    let pod = |tail: &str| format!("apiVersion: v1\nkind: Pod\nmetadata:\n  name: a\n{tail}");
    for (text, expected) in [
        (
            pod("spec:\n  hostNetwork: maybe\n"),
            "x.yaml:6: spec.hostNetwork: ",
        ),
        (
            pod("  labels:\n    tier: 1\n"),
            "x.yaml:6: metadata.labels.tier: ",
        ),
        (pod("  labels:\n    on: true\n"), "x.yaml:6: metadata.labels"),
        (pod("  labels: [a]\n"), "x.yaml:5: metadata.labels: "),
        (
            pod("  namespace: No_Such\n"),
            "x.yaml:5: metadata.namespace: namespace \"No_Such\" is not valid: 1 to 63",
        ),
        (
            pod("  uid: \"a b\"\n"),
            "x.yaml:5: metadata.uid: pod uid \"a b\" is not valid",
        ),
        (
            pod("status:\n  podIPs:\n  - ip: 10.0.0.1\n  - ip: 10.0.0.300\n"),
            "x.yaml:8: status.podIPs[1].ip: ",
        ),
        (pod("status: {phase: 7}\n"), "x.yaml:5: status.phase: "),
        (
            "apiVersion: v1\nkind: Deployment\nmetadata: {name: a}\n".into(),
            "x.yaml:2: kind: ",
        ),
        (
            "apiVersion: v2\nkind: Pod\nmetadata: {name: a}\n".into(),
            "x.yaml:1: apiVersion: ",
        ),
        (
            "apiVersion: v1\nkind: Pod\nmetadata:\n  labels: {}\n".into(),
            "x.yaml:1: metadata.name: missing",
        ),
        (
            "# c\n\napiVersion: v1\nkind: Pod\n".into(),
            "x.yaml:3: metadata: missing",
        ),
        (
            "apiVersion: v1\nkind: Namespace\nmetadata: {name: a.b}\n".into(),
            "x.yaml:1: metadata.name: namespace \"a.b\"",
        ),
        (
            "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Pod, metadata: {}}\n".into(),
            "x.yaml:1: items[0].metadata.name: missing",
        ),
        ("just text\n".into(), "x.yaml:1: "),
        (pod("\tspec: {}\n"), "x.yaml:4: "),
        (pod("  name: b\n"), "x.yaml:5: "),
        ("apiVersion: v1\nkind: [\n".into(), "x.yaml:"),
    ] {
        let found = problems(&text);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].starts_with(expected),
            "{}\nexpected: {expected}",
            found[0]
        );
        assert!(
            !found[0].contains('\n') && !found[0].contains(" at line "),
            "{}",
            found[0]
        );
    }
}

#[test]
fn every_bad_document_is_reported_with_its_line_in_the_file() {
    let text = "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n---\napiVersion: v1\nkind: Pod\nmetadata: {name: B}\n\
                --- # third\napiVersion: v1\nkind: Pod\nmetadata: {name: c}\nspec: {hostNetwork: 3}\n";
    let found = problems(text);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(
        found[0].starts_with("x.yaml:7: metadata.name: pod name \"B\" is not valid"),
        "{}",
        found[0]
    );
    assert!(
        found[1].starts_with("x.yaml:12: spec.hostNetwork: "),
        "{}",
        found[1]
    );
}

#[test]
fn json_errors_name_line_and_field_too() {
    let text = "{\n\"apiVersion\": \"v1\", \"kind\": \"Pod\",\n\"metadata\": {\"name\": \"a\"},\n\"spec\": {\"hostNetwork\": \"yes\"}}";
    let found = parse(text, "x.json", true).unwrap_err();
    assert_eq!(
        found[0].to_string(),
        "x.json:4: spec.hostNetwork: invalid type: string \"yes\", expected a boolean"
    );
}

#[test]
fn a_file_without_objects_is_not_taken_for_their_removal() {
    for text in ["", "\n", "# nothing\n", "---\n---\n", "null\n"] {
        let found = problems(text);
        assert_eq!(
            found,
            ["x.yaml: holds no Pod and no Namespace; remove the file to remove its objects"],
            "{text:?}"
        );
    }
}

#[test]
fn unknown_fields_and_nulls_are_ignored() {
    let text = "apiVersion: v1\nkind: Pod\nmetadata: {name: a, labels: null, annotations: ~, ownerReferences: [{x: 1}]}\n\
                spec: {hostNetwork: null, nodeSelector: {a: b}, future: [1, {b: c}]}\nstatus: null\n";
    let objects = parse(text, "x.yaml", false).unwrap();
    assert!(!pods(&objects)[0].host_network);
}

/// Of this thread: what other processes do does not count.
fn cpu_time() -> std::time::Duration {
    use nix::sys::resource::{UsageWho, getrusage};
    let usage = getrusage(UsageWho::RUSAGE_THREAD).unwrap();
    let micros =
        |time: nix::sys::time::TimeVal| u64::try_from(time.tv_sec() * 1_000_000 + time.tv_usec()).unwrap();
    std::time::Duration::from_micros(micros(usage.user_time()) + micros(usage.system_time()))
}

#[test]
fn hostile_text_is_refused_without_harm() {
    let bomb = "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n\
                d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: &f [*e,*e,*e,*e,*e,*e,*e,*e]\n\
                g: &g [*f,*f,*f,*f,*f,*f,*f,*f]\n";
    let before = cpu_time();
    for text in [
        bomb.to_owned(),
        "[".repeat(20_000),
        "{a: ".repeat(20_000),
        "\u{0}\u{1}".into(),
        "- ".repeat(20_000),
    ] {
        assert!(parse(&text, "x.yaml", false).is_err());
        assert!(parse(&text, "x.json", true).is_err());
    }
    let spent = cpu_time().saturating_sub(before);
    assert!(spent < std::time::Duration::from_secs(10), "{spent:?}");
}

proptest::proptest! {
    #[test]
    fn no_text_makes_it_panic(text in ".*", cut in 0..GOOD.len(), noise in "[\\x00-\\x7f]{0,8}") {
        let _ = parse(&text, "x.yaml", false);
        let _ = parse(&text, "x.json", true);
        let mut damaged = GOOD.to_owned();
        if damaged.is_char_boundary(cut) {
            damaged.insert_str(cut, &noise);
        }
        let _ = parse(&damaged, "x.yaml", false);
    }
}

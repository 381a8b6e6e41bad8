//! The chart's page and its settings say what the chart does.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

use crate::helm::{NAMESPACE, Release, chart, helm, refusal, texts};
use crate::privileges::CONTAINERS;

/// Rows of the table with this first heading: cells without back-quotes.
fn table(page: &str, heading: &str) -> Vec<Vec<String>> {
    let mut lines = page
        .lines()
        .skip_while(|line| !line.starts_with(&format!("| {heading} |")));
    let rows = lines.by_ref().skip(2).take_while(|line| line.starts_with('|'));
    let rows: Vec<Vec<String>> = rows
        .map(|row| {
            let cells = row.trim_matches('|').split('|');
            cells.map(|cell| cell.trim().replace('`', "")).collect()
        })
        .collect();
    assert!(!rows.is_empty(), "no table {heading}");
    rows
}

#[test]
fn the_table_of_containers_is_what_is_rendered() {
    let page = std::fs::read_to_string(chart().join("README.md")).unwrap();
    let release = Release::render(&[]);
    let rows = table(&page, "Container");
    let name = |row: &[String]| row[0].split(' ').next().unwrap().to_owned();
    let named: BTreeSet<String> = rows.iter().map(|row| name(row)).collect();
    // A spare is as the first of its pair.
    let names = CONTAINERS.iter().map(|(name, ..)| *name);
    let firsts: BTreeSet<String> = names
        .filter(|name| !name.ends_with("-spare"))
        .map(str::to_owned)
        .collect();
    assert_eq!(named, firsts);
    assert_eq!(rows.len(), firsts.len());
    for row in rows {
        let name = &name(&row);
        let container = release.container(name);
        let context = &container["securityContext"];
        assert_eq!(row[1], context["runAsUser"].to_string(), "{name}");
        let capabilities = texts(&context["capabilities"]["add"]).join(", ");
        let told = if row[2] == "none" { "" } else { row[2].as_str() };
        assert_eq!(told, capabilities, "{name}");
    }
}

#[test]
fn the_table_of_platforms_is_what_is_rendered() {
    let page = std::fs::read_to_string(chart().join("README.md")).unwrap();
    for row in table(&page, "Platform") {
        for platform in row[0].split(", ") {
            let platform = if platform == "(none)" { "" } else { platform };
            let release = Release::render(&[&format!("platform={platform}")]);
            assert_eq!(
                release.flag("installer", "--host-cni-bin-dir").unwrap(),
                row[1],
                "{platform}"
            );
            if row[2] != "as k3s" {
                assert_eq!(
                    release.flag("installer", "--host-cni-net-dir").unwrap(),
                    row[2],
                    "{platform}"
                );
            }
        }
    }
}

/// What `helm install` prints after an installation. `helm template` leaves it out: a copy of the chart has it as an object.
fn notes(set: &[&str]) -> String {
    let copy = tempfile::tempdir().unwrap();
    let root = copy.path().join("sluice");
    let copied = Command::new("cp")
        .arg("-r")
        .args([&chart(), &root])
        .status()
        .unwrap();
    assert!(copied.success());
    let templates = root.join("templates");
    let text = std::fs::read_to_string(templates.join("NOTES.txt")).unwrap();
    let named = format!("{{{{- define \"notes\" }}}}{text}{{{{- end }}}}");
    std::fs::write(templates.join("_notes.tpl"), named).unwrap();
    let object = "kind: Notes\ntext: {{ include \"notes\" . | toJson }}\n";
    std::fs::write(templates.join("notes.yaml"), object).unwrap();
    let root = root.display().to_string();
    let mut args = vec![
        "template",
        "mesh",
        &root,
        "--namespace",
        NAMESPACE,
        "--show-only",
        "templates/notes.yaml",
    ];
    args.extend(set.iter().flat_map(|setting| ["--set", setting]));
    let output = helm(&args);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let object: Value = serde_saphyr::from_str(&String::from_utf8(output.stdout).unwrap()).unwrap();
    object["text"].as_str().unwrap().to_owned()
}

#[test]
fn the_notes_name_what_is_there() {
    let release = Release::render(&[]);
    let text = notes(&[]);
    let words: Vec<&str> = text.split_whitespace().collect();
    let after = |word: &str| {
        let pairs = words.windows(2).filter(move |pair| pair[0] == word);
        pairs.map(|pair| pair[1]).collect::<Vec<_>>()
    };
    assert!(after("-n").len() > 3 && after("-n").iter().all(|name| *name == NAMESPACE));
    assert!(!after("-c").is_empty());
    for name in after("-c") {
        release.container(name);
    }
    let sets: Vec<&str> = words
        .iter()
        .filter_map(|word| word.strip_prefix("daemonset/"))
        .collect();
    assert!(!sets.is_empty());
    for name in sets {
        release.object("DaemonSet", name);
    }
    let (_, platforms) = text.split_once("--set platform=").expect("no hint of platforms");
    let (platforms, _) = platforms.split_once(')').unwrap();
    for platform in platforms.replace(" (", ", ").split(", ") {
        Release::render(&[&format!("platform={platform}")]);
    }

    assert!(!notes(&["platform=gke"]).contains("--set platform="));
    let without_opener = "pods that ran before join the mesh when they are recreated";
    assert!(!text.contains(without_opener));
    assert!(notes(&["profile=enrolOnAdd"]).contains(without_opener));
    assert!(notes(&["resourceScope=cluster"]).contains("resourceScope=namespace"));
}

#[test]
fn values_of_istios_chart_are_refused_and_have_a_counterpart_where_the_page_names_one() {
    let page = std::fs::read_to_string(chart().join("README.md")).unwrap();
    let values = std::fs::read_to_string(chart().join("values.yaml")).unwrap();
    let values: Value = serde_saphyr::from_str(&values).unwrap();
    for row in table(&page, "Istio's") {
        let ours = row[1].split(", ").filter(|cell| !cell.contains(' '));
        for name in ours.filter(|name| !["always", "nothing"].contains(name)) {
            let pointer = format!("/{}", name.replace('.', "/"));
            assert!(values.pointer(&pointer).is_some(), "{name} is no setting");
        }
        for name in row[0].split(", ").filter(|name| !name.starts_with("global.")) {
            for spelling in [name.to_owned(), format!("cni.{name}")] {
                let message = refusal(&[&format!("{spelling}=x")]);
                assert!(message.contains("not allowed"), "{spelling}: {message}");
            }
        }
    }
}

/// Every setting that the schema knows, as dotted paths; maps that take any key end in `*`.
fn known(schema: &Value, definitions: &Value, path: &str, found: &mut BTreeSet<String>) {
    let schema = match schema["$ref"].as_str() {
        Some(name) => &definitions[name.trim_start_matches("#/definitions/")],
        None => schema,
    };
    match schema["properties"].as_object() {
        // What may be left out entirely is described by its parent's comment.
        Some(properties) => {
            found.insert(path.to_owned());
            for (key, value) in properties {
                let path = if path.is_empty() {
                    key.clone()
                } else {
                    format!("{path}.{key}")
                };
                known(value, definitions, &path, found);
            }
        }
        None => {
            found.insert(path.to_owned());
        }
    }
}

fn set(values: &Value, path: &str, found: &mut BTreeMap<String, Value>) {
    for (key, value) in values.as_object().into_iter().flatten() {
        let path = if path.is_empty() {
            key.clone()
        } else {
            format!("{path}.{key}")
        };
        set(value, &path, found);
        found.insert(path, value.clone());
    }
}

#[test]
fn every_setting_has_a_default_and_every_default_is_a_setting() {
    let read = |file: &str| std::fs::read_to_string(chart().join(file)).unwrap();
    let schema: Value = serde_json::from_str(&read("values.schema.json")).unwrap();
    let values: Value = serde_saphyr::from_str(&read("values.yaml")).unwrap();
    let (mut known_paths, mut defaults) = (BTreeSet::new(), BTreeMap::new());
    known(&schema, &schema["definitions"], "", &mut known_paths);
    set(&values, "", &mut defaults);
    // Free-form: their keys are the user's.
    let free = [
        "nodeSelector.",
        "podLabels.",
        "podAnnotations.",
        "daemonSetLabels.",
    ];
    for path in defaults
        .keys()
        .filter(|path| !free.iter().any(|prefix| path.starts_with(prefix)))
    {
        assert!(known_paths.contains(path), "{path} is in values.yaml only");
    }
    // Kubernetes' own objects are documented there.
    let kubernetes = |path: &str| {
        [
            "resources.",
            "seccompProfile.",
            "appArmorProfile.",
            "seLinuxOptions.",
        ]
        .iter()
        .any(|part| path.contains(part))
    };
    for path in known_paths
        .iter()
        .filter(|path| !path.is_empty() && *path != "global" && !kubernetes(path))
    {
        assert!(defaults.contains_key(path), "{path} is in the schema only");
    }
}

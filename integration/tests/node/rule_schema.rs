//! Rules that another version of the executor made: shown as such until they are brought up to date.

use serde_json::Value;
use sluice_integration::kernel_state::sandbox_files;
use sluice_integration::mesh::Mesh;
use sluice_integration::netns_state::rules_of;
use sluice_integration::scene::{PATIENCE, mesh_pod};
use sluice_proto::pb::executor::NodeStatusResponse;
use sluice_testkit::netns::Place;
use sluice_testkit::process::text;
use sluice_testkit::wait::{poll_true, poll_until};

use crate::observe::ctl;

fn executor(mesh: &Mesh) -> Option<NodeStatusResponse> {
    mesh.node_status().ok()?.executor
}

/// Names of pods with rules of another schema.
fn others(mesh: &Mesh) -> Option<Vec<String>> {
    let others = executor(mesh)?.other_rules;
    Some(others.into_iter().map(|pod| pod.name).collect())
}

#[test]
fn a_pod_with_the_rules_of_another_executor_is_shown_until_they_are_brought_up_to_date() {
    let mesh = Mesh::start().unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    let pod = mesh_pod(&mesh, "old").unwrap();
    let opener = mesh.opener.as_ref().unwrap();
    let files: Vec<String> = sandbox_files(&mesh).unwrap().into_iter().collect();
    let [file] = files.as_slice() else {
        panic!("{files:?}");
    };
    let file = mesh.run.sandboxes().join(file);
    let record = || -> Value { serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap() };
    let schema = executor(&mesh).unwrap().rule_schema;
    assert!(schema > 0);
    assert_eq!(record()["rule_schema"], schema);
    assert_eq!(others(&mesh).unwrap(), Vec::<String>::new());
    let explain = ["explain", "default/old"];
    assert!(!ctl(&mesh, &explain).1.contains("schema"));

    // As an executor leaves them that had fewer rules and did not record their schema.
    for process in [opener, &mesh.executor, &mesh.broker] {
        process.kill().unwrap();
    }
    let right = rules_of(pod.netns()).unwrap();
    let place = Place::from(pod.netns());
    text(&place, "nft", &["flush", "table", "inet", "sluice"], b"").unwrap();
    let mut older = record();
    older.as_object_mut().unwrap().remove("rule_schema").unwrap();
    std::fs::write(&file, older.to_string()).unwrap();
    let left = rules_of(pod.netns()).unwrap();

    // Without an opener nobody can look at the namespace.
    mesh.executor.start_again().unwrap();
    mesh.broker.start_again().unwrap();
    poll_until("the pod is shown", PATIENCE, || {
        others(&mesh).filter(|others| others == &["old"])
    })
    .unwrap();
    let (_, status) = ctl(&mesh, &["status"]);
    let line = format!("1 pod has rules of another version than the executor's ({schema}): default/old");
    assert!(status.contains(&line), "{status}");
    let told = format!("rules of schema 0, the running executor's is {schema}");
    let (_, explained) = ctl(&mesh, &explain);
    assert!(explained.contains(&told), "{explained}");
    let (_, shown) = ctl(&mesh, &["status", "--pod", "default/old"]);
    assert!(
        shown.contains(&told) && shown.contains("COULD NOT BE READ BACK"),
        "{shown}"
    );
    assert_eq!(rules_of(pod.netns()).unwrap(), left);

    opener.start_again().unwrap();
    poll_true("the rules are brought up to date", PATIENCE, || {
        rules_of(pod.netns()).is_ok_and(|now| now == right)
    })
    .unwrap();
    poll_true("nobody has other rules", PATIENCE, || {
        others(&mesh).is_some_and(|others| others.is_empty())
    })
    .unwrap();
    assert_eq!(record()["rule_schema"], schema);
    assert!(!ctl(&mesh, &explain).1.contains("schema"));
}

//! As a kubectl plugin where no agent is: the question reaches the node it is about.
#![cfg(test)]

#[path = "../support/answers.rs"]
mod answers;
#[path = "../support/fake.rs"]
#[expect(dead_code, reason = "another test binary uses the rest")]
mod fake;
#[path = "../support/kubectl.rs"]
mod kubectl;

use answers::{healthy, sick};
use fake::Node;
use kubectl::Cluster;

#[test]
fn a_named_node_answers_as_if_one_were_there() {
    for (answers, status) in [(healthy(), 0), (sick(), 3)] {
        let node = Node::new(answers);
        let cluster = Cluster::new(node.run_dir.path());
        for question in [
            &["status"][..],
            &["preflight"],
            &["status", "-o", "json"],
            &["explain", "team-a/job-x"],
        ] {
            let there = node.run(question);
            let afar = cluster.run(&[&["--node", "node-1"], question].concat());
            assert_eq!(
                (afar.status, &afar.stdout),
                (there.status, &there.stdout),
                "{question:?}"
            );
            assert!(question != ["status"] || afar.status == status, "{afar:?}");
        }
        let calls = cluster.calls();
        assert!(
            calls[0].contains("--field-selector spec.nodeName=node-1"),
            "{calls:?}"
        );
        let exec = "exec --namespace sluice-system sluice-node-abc12 --container ambient-broker -- /opt/sluice/bin/sluicectl status";
        assert_eq!(calls[1], exec);
    }
}

#[test]
fn a_question_about_a_pod_finds_its_node() {
    let node = Node::new(healthy());
    let cluster = Cluster::new(node.run_dir.path());
    for question in [
        &["explain", "web-0", "-n", "team-a"][..],
        &["status", "--pod", "team-a/web-0"],
    ] {
        let afar = cluster.run(question);
        assert_eq!((afar.status, &*afar.stderr), (0, ""));
        assert!(afar.stdout.contains("team-a/web-0"), "{afar:?}");
    }
    assert!(
        cluster.calls()[0].contains("get pod --namespace team-a web-0"),
        "{:?}",
        cluster.calls()
    );
}

#[test]
fn kubectl_is_told_which_cluster() {
    let node = Node::new(healthy());
    let cluster = Cluster::new(node.run_dir.path());
    let afar = cluster.run(&[
        "--node",
        "node-1",
        "--context",
        "prod",
        "--kubeconfig",
        "/x",
        "status",
    ]);
    assert_eq!(afar.status, 0, "{afar:?}");
    for call in cluster.calls() {
        assert!(call.starts_with("--context=prod --kubeconfig=/x "), "{call}");
    }
}

#[test]
fn what_keeps_the_question_from_the_node_is_told_with_what_to_do() {
    let node = Node::new(healthy());
    let cluster = Cluster::new(node.run_dir.path());
    let which = cluster.run(&["status"]);
    assert_eq!(which.status, 1);
    assert_eq!(
        which.stderr,
        "sluicectl: which node?\nName one with --node NODE (see `kubectl get nodes`).\n"
    );

    std::fs::write(cluster.file("pods.json"), r#"{"items":[]}"#).unwrap();
    let nobody = cluster.run(&["--node", "node-1", "status"]);
    assert!(
        nobody.status == 1 && nobody.stderr.contains("no pod of the agent is on node node-1"),
        "{nobody:?}"
    );

    std::fs::remove_file(cluster.file("pods.json")).unwrap();
    let failed = cluster.run(&["--node", "node-1", "status"]);
    assert!(
        failed.status == 1 && failed.stderr.contains("kubectl get pods failed: cat: "),
        "{failed:?}"
    );

    std::fs::remove_file(cluster.file("kubectl")).unwrap();
    // Where this machine has a kubectl of its own there is no cluster behind it.
    let without = cluster.run(&["--node", "node-1", "--kubeconfig", "/nonexistent", "status"]);
    assert!(
        without.status == 1 && without.stderr.contains("kubectl"),
        "{without:?}"
    );

    let misspelt = cluster.run(&["--node", "-x", "status"]);
    assert_eq!(misspelt.status, 2, "{misspelt:?}");
}

//! A node's report from afar: what the API server knows of the agent there, its containers' logs, and what each container
//! can tell of the part of the node that it sees.

use super::{Collection, archive};
use crate::kubectl::{Agent, Kubectl, SELECTOR, SLUICECTL};

/// Which container tells what: the broker's answers, the sandbox table, the network configuration.
const TOLD_BY: [(&str, &str); 3] = [
    ("ambient-broker", "answers"),
    ("netns-executor", "files"),
    ("installer", "files"),
];

/// Lines of each log.
const LINES: &str = "--tail=10000";

pub(crate) fn collect(collection: &mut Collection, kubectl: &Kubectl, agent: &Agent) {
    let (namespace, pod) = (agent.namespace.as_str(), agent.pod.as_str());
    let events = format!("involvedObject.name={pod}");
    let queries: [(&str, &[&str]); 6] = [
        ("versions.json", &["version", "--output=json"]),
        (
            "cluster/node.yaml",
            &["get", "node", &agent.node, "--output=yaml"],
        ),
        (
            "cluster/pod.yaml",
            &["get", "pod", "--namespace", namespace, pod, "--output=yaml"],
        ),
        (
            "cluster/events.txt",
            &[
                "get",
                "events",
                "--namespace",
                namespace,
                "--field-selector",
                &events,
                "--output=wide",
            ],
        ),
        (
            "cluster/daemonsets.yaml",
            &["get", "daemonsets", "--namespace", namespace, "--output=yaml"],
        ),
        (
            "cluster/configmaps.yaml",
            &[
                "get",
                "configmaps",
                "--namespace",
                namespace,
                "--selector",
                SELECTOR,
                "--output=yaml",
            ],
        ),
    ];
    for (name, arguments) in queries {
        match kubectl.output(arguments) {
            Ok(content) => collection.add(name, content),
            Err(error) => collection.note(format!("{name}: {error}")),
        }
    }
    for container in &agent.containers {
        for (suffix, more) in [("", None), (".previous", Some("--previous"))] {
            let mut arguments = vec![
                "logs",
                "--namespace",
                namespace,
                pod,
                "--container",
                container,
                LINES,
            ];
            arguments.extend(more);
            match kubectl.output(&arguments) {
                Ok(content) => collection.add(format!("logs/{container}{suffix}.log"), content),
                // Most containers never had a life before this one.
                Err(_) if more.is_some() => {}
                Err(error) => collection.note(format!("log of {container}: {error}")),
            }
        }
    }
    for (container, part) in TOLD_BY {
        tell(collection, kubectl, agent, container, part);
    }
}

fn tell(collection: &mut Collection, kubectl: &Kubectl, agent: &Agent, container: &str, part: &str) {
    let command = [SLUICECTL, "bug-report", "--part", part, "-"];
    let told = kubectl
        .exec_output(agent, container, &command)
        .map_err(|error| error.to_string())
        .and_then(|bytes| archive::read(&bytes).map_err(|error| error.to_string()));
    match told {
        Ok(entries) => {
            for (name, content) in entries {
                collection.add(format!("{container}/{name}"), content);
            }
        }
        Err(error) => collection.note(format!("{container}: {error}")),
    }
}

//! `status`: the node, its connections, and a line for each pod.

use sluice_proto::pb::executor::{Counter, NodeStatusResponse};
use sluice_proto::pb::workload::NodeResponse;

use super::pod::pods;
use super::{Facts, ago, columns, plural, text};
use crate::view::NodeView;

/// The node and its pods.
pub(crate) fn node(view: &NodeView, now_ms: u64) -> String {
    let node = &view.node;
    let mut sections = vec![facts(node)];
    if !node.zds.is_empty() {
        sections.push(connections(node, now_ms));
    }
    if !node.source_problems.is_empty() {
        let mut table = columns(&["FILE", "LINE", "FIELD", "PROBLEM"]);
        for problem in &node.source_problems {
            let line = problem.line.to_string();
            table.add_row([&problem.file, &line, &problem.field, &problem.problem]);
        }
        sections.push(format!("Manifests that are not used\n{}", text(table)));
    }
    if !view.pods.is_empty() {
        sections.push(pods(&view.pods, now_ms));
    }
    sections.join("\n")
}

fn facts(node: &NodeResponse) -> String {
    let mut facts = Facts::default();
    if node.ready {
        facts.add("Node", "ready");
    } else {
        facts.add("Node", "NOT READY");
        facts.add_list("Because", &node.not_ready_because, "the broker does not say");
    }
    facts.add(
        "Pods",
        format!(
            "{}, {} expected in the mesh: {} enrolled, {} broken, {} on the way",
            plural(node.pods as usize, "pod", "pods"),
            node.pods_expected,
            node.pods_enrolled,
            node.pods_broken,
            node.pods_expected
                .saturating_sub(node.pods_enrolled + node.pods_broken),
        ),
    );
    if node.zds.is_empty() {
        facts.add("Proxy", format!("NOT CONNECTED; {}", node.zds_socket));
    } else {
        facts.add("Proxy", plural(node.zds.len(), "connection", "connections"));
    }
    match &node.executor {
        Some(executor) => executor_facts(&mut facts, node, executor),
        None => facts.add("Executor", "NOT CONNECTED"),
    }
    let missing = node
        .preflight
        .iter()
        .filter(|feature| feature.required && !feature.available);
    match (node.preflight.len(), missing.count()) {
        (0, _) => facts.add("Preflight", "not run yet"),
        (_, 0) => facts.add("Preflight", "the kernel has everything that is required"),
        (_, count) => facts.add("Preflight", format!("{count} MISSING; see `sluicectl preflight`")),
    }
    facts.text()
}

fn executor_facts(facts: &mut Facts, node: &NodeResponse, executor: &NodeStatusResponse) {
    facts.add(
        "Versions",
        format!("broker {}, executor {}", node.version, executor.version),
    );
    if !executor.configuration_mismatch.is_empty() {
        facts.add(
            "Configuration",
            format!("DIFFERS: {}", executor.configuration_mismatch),
        );
    }
    facts.add(
        "Sandboxes",
        format!(
            "{}, {} of {} descriptors open",
            executor.sandboxes, executor.open_descriptors, executor.descriptor_limit
        ),
    );
    if !executor.other_rules.is_empty() {
        let pods: Vec<String> = executor
            .other_rules
            .iter()
            .map(|pod| format!("{}/{}", pod.namespace, pod.name))
            .collect();
        facts.add(
            "Schema",
            format!(
                "{} of another version than the executor's ({}): {}",
                plural(pods.len(), "pod has rules", "pods have rules"),
                executor.rule_schema,
                pods.join(", ")
            ),
        );
    }
    facts.add(
        "Opener",
        if executor.opener_connected {
            "connected"
        } else {
            "not connected"
        },
    );
    if executor.host_reachable {
        facts.add_list("Host rules", &executor.host_differences, "as they should be");
    } else {
        facts.add("Host rules", "NOT REACHABLE");
    }
    facts.add(
        "Probe set",
        plural(executor.probe_set.len(), "address", "addresses"),
    );
    facts.add(
        "Repaired",
        format!(
            "{} in pods, {} on the host",
            executor.repaired_pods, executor.repaired_host
        ),
    );
    let refused = [&executor.refused_descriptors[..], &executor.refused_peers[..]].concat();
    let refused: Vec<String> = refused
        .iter()
        .filter(|counter| counter.value > 0)
        .map(counted)
        .collect();
    facts.add(
        "Refused",
        if refused.is_empty() {
            "nothing".to_owned()
        } else {
            refused.join(", ")
        },
    );
}

fn counted(counter: &Counter) -> String {
    format!("{} {}", counter.value, counter.label)
}

fn connections(node: &NodeResponse, now_ms: u64) -> String {
    let mut table = columns(&["PROXY", "STATE", "ACKED", "PENDING", "UID", "PID", "CONNECTED"]);
    for connection in &node.zds {
        table.add_row([
            connection.id.to_string(),
            connection.state.clone(),
            connection.acked.to_string(),
            connection.pending.to_string(),
            connection.peer_uid.to_string(),
            connection.peer_pid.to_string(),
            ago(connection.connected_unix_ms, now_ms),
        ]);
    }
    text(table)
}

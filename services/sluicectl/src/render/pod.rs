//! One pod in full, one pod a line, one event a line.

use sluice_proto::pb::types::Failure;

use super::{Facts, ago, columns, duration, list, plural, text};
use crate::view::{OtherRules, PodDetails, PodView, State};

/// Longest cell of a list; the full text is in `status --pod`.
const MAX_CELL: usize = 70;

/// A line for each pod.
pub(super) fn pods(pods: &[PodView], now_ms: u64) -> String {
    let mut table = columns(&["POD", "STATE", "NETNS", "PROXY", "ACKED", "WHY"]);
    for pod in pods {
        table.add_row([
            pod.full_name(),
            pod.state.as_str().to_owned(),
            pod.netns
                .as_ref()
                .map_or_else(dash, |netns| netns.inode.to_string()),
            pod.handoff
                .map_or_else(dash, |handoff| handoff.connection.to_string()),
            pod.handoff
                .map_or_else(dash, |handoff| ago(handoff.acked_unix_ms, now_ms)),
            cut(why(pod)),
        ]);
    }
    text(table)
}

fn dash() -> String {
    "-".to_owned()
}

fn cut(text: &str) -> String {
    if text.chars().count() <= MAX_CELL {
        return text.to_owned();
    }
    text.chars().take(MAX_CELL - 3).chain("...".chars()).collect()
}

/// What matters most about a pod: what is wrong, else what it waits for, else what decided.
fn why(pod: &PodView) -> &str {
    let trouble = match pod.state {
        State::Broken => pod.last_error.as_ref().or(pod.reason.as_ref()),
        State::Pending | State::Draining => pod.reason.as_ref().or(pod.last_error.as_ref()),
        _ => None,
    };
    trouble.unwrap_or(&pod.verdict)
}

/// One event of a watch.
pub(crate) fn event(event: &str, name: &str, pod: Option<&PodView>, now_ms: u64) -> String {
    let Some(pod) = pod else {
        return format!("{event:<8} {name}");
    };
    let acked = pod
        .handoff
        .filter(|_| pod.state == State::Enrolled)
        .map_or_else(String::new, |handoff| {
            format!(
                "acked {} by proxy {}, ",
                ago(handoff.acked_unix_ms, now_ms),
                handoff.connection
            )
        });
    format!(
        "{event:<8} {name:<40} {:<9} {acked}{}",
        pod.state.as_str(),
        why(pod)
    )
}

/// One pod in full.
pub(crate) fn pod(details: &PodDetails, now_ms: u64) -> String {
    let pod = &details.pod;
    let mut facts = Facts::default();
    facts.add("Pod", format!("{} (uid {})", pod.full_name(), pod.uid));
    facts.add("State", pod.state.as_str());
    if let Some(reason) = &pod.reason {
        facts.add("Reason", reason.clone());
    }
    let selected = if pod.is_selected() { "yes" } else { "no" };
    facts.add("Selected", format!("{selected}: {}", pod.verdict));
    if let Some(ignored) = &pod.ignored_annotations {
        facts.add("Not taken", ignored.clone());
    }
    facts.add(
        "Netns",
        pod.netns.as_ref().map_or_else(
            || "not known".to_owned(),
            |netns| format!("inode {}, cookie {}", netns.inode, netns.cookie),
        ),
    );
    facts.add_list("Addresses", &pod.addresses, "none");
    facts.add("Rules", rules(details));
    if let Some(other) = details.other_rules {
        facts.add("Schema", other_rules(other));
    }
    facts.add(
        "Handoff",
        pod.handoff.map_or_else(
            || "not acknowledged by any proxy connection".to_owned(),
            |handoff| {
                let acked = ago(handoff.acked_unix_ms, now_ms);
                format!("proxy connection {}, acknowledged {acked}", handoff.connection)
            },
        ),
    );
    facts.add_list("Probe set", &details.probe_addresses, "none of its addresses");
    facts.add(
        "Last error",
        pod.last_error.clone().unwrap_or_else(|| "none".to_owned()),
    );
    if pod.retries > 0 {
        facts.add("Retries", pod.retries.to_string());
    }
    if !pod.timings.is_empty() {
        let stages = pod.timings.iter();
        let stages: Vec<String> = stages
            .map(|stage| format!("{} {}", stage.stage, duration(stage.microseconds)))
            .collect();
        facts.add("Stages", stages.join(", "));
    }
    facts.text() + &list("Rules", &details.rules)
}

/// Rules that another version of the executor made.
pub(super) fn other_rules(other: OtherRules) -> String {
    format!(
        "rules of schema {}, the running executor's is {}: brought up to date as soon as the netns is at hand",
        other.pod, other.executor
    )
}

fn rules(details: &PodDetails) -> String {
    if let Some(failure) = &details.read_back_failed {
        return format!("COULD NOT BE READ BACK: {}", failure_text(failure));
    }
    if details.pod.netns.is_none() {
        return "not read back: the netns is not known".to_owned();
    }
    if details.differences.is_empty() {
        let version = details.pod.rules_version.as_deref();
        return match version {
            Some(version) => format!("as they should be (version {version})"),
            None => "as they should be".to_owned(),
        };
    }
    let count = plural(details.differences.len(), "DIFFERENCE", "DIFFERENCES");
    format!("{count}\n{}", details.differences.join("\n"))
}

fn failure_text(failure: &Failure) -> String {
    format!(
        "{}: {}: {} ({})",
        failure.component, failure.stage, failure.cause, failure.code
    )
}

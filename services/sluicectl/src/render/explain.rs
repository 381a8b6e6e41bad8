//! `explain`: why a pod is in or out, and what to do.

use std::fmt::Write;

use sluice_proto::code::ErrorCode;

use super::pod::other_rules;
use super::{columns, list, text};
use crate::view::{PodDetails, State};

/// The way to the verdict, what became of it, and what can be done.
pub(crate) fn explanation(details: &PodDetails) -> String {
    let pod = &details.pod;
    let inside = if pod.is_selected() {
        "in the mesh"
    } else {
        "not in the mesh"
    };
    let mut page = format!("{} is {inside}: {}\n", pod.full_name(), pod.verdict);
    if let Some(ignored) = &pod.ignored_annotations {
        let _ = writeln!(page, "Not taken: {ignored}");
    }
    if !details.selection.is_empty() {
        let mut table = columns(&["", "CHECK", "FOUND"]);
        for step in &details.selection {
            let mark = if step.decides { "=>" } else { "" };
            table.add_row([mark, &step.check, &step.observed]);
        }
        page.push('\n');
        page.push_str(&text(table));
    }
    page + "\nNow: " + &now(details) + "\n" + &list("What to do", &advice(details))
}

fn now(details: &PodDetails) -> String {
    let pod = &details.pod;
    let mut parts = vec![match pod.state {
        State::Out => "left alone".to_owned(),
        State::Pending => "being enrolled, or waiting to be".to_owned(),
        State::Enrolled => "enrolled, its traffic goes through the proxy".to_owned(),
        State::Broken => "BROKEN".to_owned(),
        State::Draining => "leaving the mesh, kept connections still go through the proxy".to_owned(),
        State::Unknown => "in a state that this version does not know".to_owned(),
    }];
    parts.extend(pod.reason.clone());
    parts.extend(
        pod.last_error
            .as_ref()
            .map(|error| format!("last error: {error}")),
    );
    parts.extend(
        details
            .differences
            .iter()
            .map(|difference| format!("rules: {difference}")),
    );
    parts.extend(details.other_rules.map(other_rules));
    parts.join("; ")
}

fn advice(details: &PodDetails) -> Vec<String> {
    let pod = &details.pod;
    let read_back = details
        .read_back_failed
        .as_ref()
        .map(|failure| failure.code.as_str());
    let drift = (!details.differences.is_empty()).then(|| ErrorCode::Drift.as_str());
    let said = [pod.reason.as_deref(), pod.last_error.as_deref(), read_back, drift];
    let mut advice: Vec<String> = ErrorCode::all()
        .filter(|(code, _)| said.iter().flatten().any(|text| mentions(text, code)))
        .map(|(code, fix)| format!("{code}: {fix}"))
        .collect();
    if advice.is_empty() {
        advice.extend(pod.reason.as_deref().and_then(meaning).map(str::to_owned));
    }
    if pod.state == State::Out
        && let Some(decided) = details.selection.iter().rev().find(|step| step.decides)
    {
        advice.push(way_in(&decided.check));
    }
    advice
}

/// What a pod waits for that has not failed, by the broker's reason.
fn meaning(reason: &str) -> Option<&'static str> {
    Some(match reason {
        "no-sandbox" => {
            "no-sandbox: the runtime has not added the pod on this node (yet), or it was added before Sluice came; where \
             the netns-opener runs, it is found by itself, else restart the pod"
        }
        "netns-unreachable" => {
            "netns-unreachable: the executor was restarted and is re-opening the pod's netns"
        }
        "no-proxy" => ErrorCode::NoProxy.fix(),
        "proxy-timeout" => ErrorCode::ProxyTimeout.fix(),
        "proxy-connection" => ErrorCode::ProxyConnection.fix(),
        "pod-unknown" => ErrorCode::PodUnknown.fix(),
        _ => return None,
    })
}

/// Whether a text holds a code as a word of its own: `EXE-FD` is not in `EXE-FDLIMIT`.
fn mentions(text: &str, code: &str) -> bool {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '-')
        .any(|word| word == code)
}

/// How a pod that is out would get in, by the check that kept it out.
fn way_in(check: &str) -> String {
    if check.contains("excluded namespace") {
        "to have it in the mesh: take its namespace off excludedNamespaces".into()
    } else if check.contains("hostNetwork") {
        "nothing: a pod on the host's network cannot be in the mesh".into()
    } else if check.contains("sidecar") {
        "to have it in the mesh: switch sidecar injection off and recreate the pod".into()
    } else if check.contains("phase") {
        "nothing: the pod has ended".into()
    } else {
        "to have it in the mesh: label it, or its namespace, istio.io/dataplane-mode=ambient".into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_found_as_a_word_only() {
        assert!(mentions("rules not applied (EXE-FD)", "EXE-FD"));
        assert!(!mentions("EXE-FDLIMIT", "EXE-FD"));
    }
}

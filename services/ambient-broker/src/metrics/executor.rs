//! The executor's own figures. It opens no TCP socket and serves no HTTP, so the broker shows them as they are told.

use std::fmt::{self, Write};

use sluice_proto::pb::executor::{Counter, Histogram, NodeStatusResponse};

/// The figures in the `OpenMetrics` text format, without the final `# EOF`.
pub(crate) fn render(status: &NodeStatusResponse) -> Result<String, fmt::Error> {
    let mut text = String::new();
    head(
        &mut text,
        "executor_add_seconds",
        "histogram",
        "Duration of each step of an ADD inside the executor",
    )?;
    for histogram in &status.add_seconds {
        buckets(&mut text, histogram)?;
    }
    head(
        &mut text,
        "pod_rules_repaired",
        "counter",
        "How often a pod's rules were found damaged and mended",
    )?;
    writeln!(text, "pod_rules_repaired_total {}", status.repaired_pods)?;
    for (name, label, help, counters) in [
        (
            "host_rules_repaired",
            "reason",
            "How often host rules were found damaged and mended, by the worst that was found: table-missing, \
             table-changed (switched off, or chains or sets not as declared), rules-changed, addresses-missing (in the \
             sets), leftovers (of an earlier agent)",
            &status.host_repairs,
        ),
        (
            "executor_refused_descriptors",
            "reason",
            "Handed-over descriptors that were refused",
            &status.refused_descriptors,
        ),
        (
            "executor_refused_peers",
            "socket",
            "Peers that were refused",
            &status.refused_peers,
        ),
        (
            "executor_tracked_connections",
            "outcome",
            "Connections of running pods that conntrack was told of before they were enrolled",
            &status.tracked_connections,
        ),
    ] {
        head(&mut text, name, "counter", help)?;
        for Counter {
            label: value,
            value: count,
        } in counters
        {
            writeln!(text, "{name}_total{{{label}=\"{value}\"}} {count}")?;
        }
    }
    head(
        &mut text,
        "executor_unlisted_enrolments",
        "counter",
        "Running pods that were enrolled although their connections could not be listed",
    )?;
    writeln!(
        text,
        "executor_unlisted_enrolments_total {}",
        status.unlisted_enrolments
    )?;
    for (name, help, value) in [
        (
            "executor_sandboxes",
            "Sandboxes that the executor holds",
            status.sandboxes,
        ),
        (
            "executor_open_descriptors",
            "Open descriptors of the executor",
            status.open_descriptors,
        ),
        (
            "executor_descriptor_limit",
            "How many it may open",
            status.descriptor_limit,
        ),
    ] {
        head(&mut text, name, "gauge", help)?;
        writeln!(text, "{name} {value}")?;
    }
    Ok(text)
}

fn head(text: &mut String, name: &str, kind: &str, help: &str) -> fmt::Result {
    writeln!(text, "# HELP {name} {help}.\n# TYPE {name} {kind}")
}

fn buckets(
    text: &mut String,
    Histogram {
        label,
        bounds,
        counts,
        sum,
    }: &Histogram,
) -> fmt::Result {
    for (bound, count) in bounds.iter().zip(counts) {
        let bound = if bound.is_infinite() {
            "+Inf".to_owned()
        } else {
            bound.to_string()
        };
        writeln!(
            text,
            "executor_add_seconds_bucket{{stage=\"{label}\",le=\"{bound}\"}} {count}"
        )?;
    }
    let all = counts.last().copied().unwrap_or_default();
    writeln!(text, "executor_add_seconds_sum{{stage=\"{label}\"}} {sum}")?;
    writeln!(text, "executor_add_seconds_count{{stage=\"{label}\"}} {all}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_valid_lines_with_their_labels() {
        let status = NodeStatusResponse {
            sandboxes: 3,
            host_repairs: vec![Counter {
                label: "rules-changed".into(),
                value: 2,
            }],
            refused_peers: vec![Counter {
                label: "cni".into(),
                value: 1,
            }],
            tracked_connections: vec![Counter {
                label: "made".into(),
                value: 20,
            }],
            unlisted_enrolments: 4,
            add_seconds: vec![Histogram {
                label: "rules".into(),
                bounds: vec![0.5, f64::INFINITY],
                counts: vec![1, 2],
                sum: 0.75,
            }],
            ..NodeStatusResponse::default()
        };
        let text = render(&status).unwrap();
        for line in [
            "executor_add_seconds_bucket{stage=\"rules\",le=\"0.5\"} 1",
            "executor_add_seconds_bucket{stage=\"rules\",le=\"+Inf\"} 2",
            "executor_add_seconds_count{stage=\"rules\"} 2",
            "host_rules_repaired_total{reason=\"rules-changed\"} 2",
            "executor_refused_peers_total{socket=\"cni\"} 1",
            "executor_tracked_connections_total{outcome=\"made\"} 20",
            "executor_unlisted_enrolments_total 4",
            "executor_sandboxes 3",
        ] {
            assert!(
                text.lines().any(|known| known == line),
                "{line} is not in\n{text}"
            );
        }
    }
}

//! What a broker says of a healthy and of a sick node.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sluice_proto::pb::executor::{Counter, Feature, NodeStatusResponse, ProbeAddress};
use sluice_proto::pb::types::{NetnsIdentity, PodRef};
use sluice_proto::pb::workload::{
    DescribeResponse, ManifestProblem, NodeResponse, Pod, PodState, SelectionStep, StageTiming, ZdsConnection,
};

use crate::fake::Answers;

/// Unix time in milliseconds, so many minutes ago; in the middle of what is shown, so that the clock may go on.
pub(crate) fn minutes_ago(minutes: u64) -> u64 {
    let ago = Duration::from_secs(minutes * 60 + 30);
    let then = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .checked_sub(ago)
        .unwrap();
    u64::try_from(then.as_millis()).unwrap()
}

pub(crate) fn step(check: &str, observed: &str, decides: bool) -> SelectionStep {
    SelectionStep {
        check: check.into(),
        observed: observed.into(),
        decides,
    }
}

pub(crate) fn pod(name: &str, state: PodState, verdict: &str) -> Pod {
    Pod {
        pod: Some(PodRef {
            namespace: "team-a".into(),
            name: name.into(),
            uid: format!("uid-of-{name}"),
        }),
        state: state.into(),
        verdict: verdict.into(),
        addresses: vec!["10.244.0.10".into(), "fd00:10:244::10".into()],
        netns: Some(NetnsIdentity {
            cookie: 17,
            device: 4,
            inode: 4_026_532_700,
            boot_id: "b".into(),
        }),
        ..Pod::default()
    }
}

pub(crate) fn enrolled() -> DescribeResponse {
    DescribeResponse {
        pod: Some(Pod {
            timings: [("netns", 180), ("rules", 1240), ("ack", 310)]
                .map(|(stage, microseconds)| StageTiming {
                    stage: stage.into(),
                    microseconds,
                })
                .to_vec(),
            zds_connection: 3,
            acked_unix_ms: minutes_ago(5),
            rules_version: "5f1c".into(),
            ignored_annotations: "annotation ambient.istio.io/dns-capture: \"yes\" is ignored: \"true\" or \"false\" is allowed".into(),
            ..pod(
                "web-0",
                PodState::Enrolled,
                "pod label istio.io/dataplane-mode=ambient (selector 1)",
            )
        }),
        selection: vec![
            step("excluded namespaces", "team-a not in [kube-system]", false),
            step("spec.hostNetwork", "false", false),
            step("annotation sidecar.istio.io/status", "absent", false),
            step(
                "selector 1",
                "matches: pod label istio.io/dataplane-mode=ambient",
                true,
            ),
        ],
        rules: vec![
            "nat output: tcp -> redirect 15001".into(),
            "nat prerouting: tcp -> redirect 15006".into(),
        ],
        probe_addresses: vec!["10.244.0.10".into(), "fd00:10:244::10".into()],
        ..DescribeResponse::default()
    }
}

pub(crate) fn broken() -> DescribeResponse {
    DescribeResponse {
        pod: Some(Pod {
            reason: "proxy-nack".into(),
            last_error: "ztunnel: add workload: bind 15001: EADDRINUSE (ZT-NACK)".into(),
            retries: 4,
            ..pod(
                "web-1",
                PodState::Broken,
                "namespace label istio.io/dataplane-mode=ambient (selector 2)",
            )
        }),
        differences: vec!["missing: nat output: tcp -> redirect 15001".into()],
        executor_rule_schema: 2,
        rule_schema: 1,
        ..DescribeResponse::default()
    }
}

pub(crate) fn out() -> DescribeResponse {
    DescribeResponse {
        pod: Some(Pod {
            netns: None,
            ..pod("job-x", PodState::Out, "no enablement selector matches")
        }),
        selection: vec![
            step("excluded namespaces", "team-a not in [kube-system]", false),
            step(
                "selector 1",
                "requires pod label istio.io/dataplane-mode=ambient, found no label",
                false,
            ),
            step(
                "selector 2",
                "requires namespace label istio.io/dataplane-mode=ambient, found no label",
                true,
            ),
        ],
        ..DescribeResponse::default()
    }
}

pub(crate) fn feature(name: &str, required: bool, available: bool) -> Feature {
    Feature {
        name: name.into(),
        family: "inet".into(),
        required,
        available,
        error: if available {
            String::new()
        } else {
            "EOPNOTSUPP".into()
        },
    }
}

pub(crate) fn healthy() -> Answers {
    Answers {
        node: NodeResponse {
            version: "0.1.0".into(),
            ready: true,
            zds: vec![ZdsConnection {
                id: 3,
                state: "ready".into(),
                acked: 1,
                pending: 0,
                peer_uid: 1337,
                peer_pid: 4711,
                connected_unix_ms: minutes_ago(180),
            }],
            pods: 2,
            pods_expected: 1,
            pods_enrolled: 1,
            executor: Some(NodeStatusResponse {
                version: "0.1.0".into(),
                sandboxes: 2,
                open_descriptors: 15,
                descriptor_limit: 1_048_576,
                opener_connected: true,
                host_reachable: true,
                probe_set: vec![ProbeAddress {
                    address: "10.244.0.10".into(),
                    owner_uid: "u".into(),
                }],
                broker_connected: true,
                ..NodeStatusResponse::default()
            }),
            preflight: vec![feature("nat output", true, true), feature("ct mark", true, true)],
            ..NodeResponse::default()
        },
        pods: vec![enrolled(), out()],
        changes: Vec::new(),
    }
}

pub(crate) fn sick() -> Answers {
    let mut answers = healthy();
    let node = &mut answers.node;
    node.ready = false;
    node.not_ready_because = vec!["no ready proxy connection".into(), "opener not connected".into()];
    node.zds.clear();
    node.zds_socket =
        "/run/sluice/ztunnel/ztunnel.sock: listening, 0 peers ever connected for 42 s; mode 0660, owner 64807:0, \
         label system_u:object_r:container_file_t:s0"
            .into();
    (node.pods, node.pods_expected, node.pods_broken) = (3, 2, 1);
    node.source_problems = vec![ManifestProblem {
        file: "pods/bad.yaml".into(),
        line: 7,
        field: "metadata.name".into(),
        problem: "\"A b\" is not valid".into(),
    }];
    let executor = node.executor.as_mut().unwrap();
    executor.opener_connected = false;
    executor.rule_schema = 2;
    executor.other_rules = broken().pod.unwrap().pod.into_iter().collect();
    executor.host_differences = vec!["missing: chain postrouting".into(), "missing: set probes".into()];
    executor.refused_descriptors = vec![Counter {
        label: "host netns".into(),
        value: 2,
    }];
    node.preflight.push(feature("fib lookup", true, false));
    answers.pods.push(broken());
    answers
}

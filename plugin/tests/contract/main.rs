//! What a runtime may rely on whatever happens: versions, documents on stdout, errors, exemptions. No agent runs.
#![cfg(test)]

#[path = "../support/run.rs"]
mod run;

mod malformed;

use std::path::Path;
use std::time::Duration;

use run::{Run, config, prev_result};
use serde_json::json;

const NOWHERE: &str = "/nonexistent/sluice";
const VERSIONS: [&str; 4] = ["0.3.1", "0.4.0", "1.0.0", "1.1.0"];

fn nowhere(version: &str) -> serde_json::Value {
    config(version, Path::new(NOWHERE))
}

#[test]
fn version_lists_what_is_spoken_and_echoes_what_was_asked() {
    let done = Run::new("VERSION", &json!({ "cniVersion": "1.0.0" })).go();
    assert_eq!(
        done.json(),
        json!({ "cniVersion": "1.0.0", "supportedVersions": VERSIONS })
    );
    assert_eq!(
        Run::new("VERSION", &json!({})).stdin("").go().json()["cniVersion"],
        "1.1.0"
    );
}

#[test]
fn commands_exist_from_the_version_that_brought_them() {
    let tombstones = tempfile::tempdir().unwrap();
    for (command, since) in [("DEL", 0), ("CHECK", 1), ("STATUS", 3), ("GC", 3)] {
        for (index, version) in VERSIONS.into_iter().enumerate() {
            let done = Run::new(command, &config(version, tombstones.path())).go();
            let refused = done.status == 1 && done.error()["code"] == 1;
            assert_eq!(refused, index < since, "{command} {version}: {done:?}");
        }
    }
    for version in ["0.1.0", "0.3.0", "2.0.0", ""] {
        let error = Run::new("ADD", &nowhere(version)).go().error();
        assert_eq!(error["code"], 1);
        let msg = error["msg"].as_str().unwrap();
        assert!(msg.contains("supported are 0.3.1, 0.4.0, 1.0.0, 1.1.0"), "{msg}");
    }
}

#[test]
fn an_exempt_pod_gets_the_result_before_it_byte_for_byte() {
    for version in VERSIONS {
        for run in [
            Run::new("ADD", &nowhere(version)).pod("kube-system", "coredns-1"),
            Run::new("ADD", &nowhere(version)).pod("sluice-system", "sluice-abc12"),
            Run::new("ADD", &nowhere(version)).env("CNI_ARGS", "IgnoreUnknown=1"),
            Run::new("ADD", &nowhere(version)).without("CNI_ARGS"),
            Run::new("ADD", &nowhere(version)).env("CNI_IFNAME", "net1"),
        ] {
            let done = run.go();
            assert_eq!(
                (done.status, done.stdout.trim_end()),
                (0, &*prev_result(version).to_string())
            );
            assert!(done.stderr.is_empty(), "{done:?}");
            assert!(done.elapsed < Duration::from_secs(1), "{done:?}");
        }
    }
}

#[test]
fn only_a_daemon_sets_pod_in_its_namespace_counts_as_our_own() {
    for (namespace, name) in [
        ("team-a", "sluice-abc12"),
        ("sluice-system", "sluice-abc123"),
        ("sluice-system", "sluice-ABCDE"),
        ("sluice-system", "sluice-webhook-abc12"),
        ("sluice-system", "sluice"),
    ] {
        let error = Run::new("ADD", &nowhere("1.0.0")).pod(namespace, name).go();
        assert_ne!(error.status, 0, "{namespace}/{name}");
    }
}

#[test]
fn without_an_agent_a_pod_is_never_passed() {
    let started = std::time::Instant::now();
    let error = Run::new("ADD", &nowhere("1.0.0")).go().error();
    assert_eq!(error["code"], 11);
    assert_eq!(error["cniVersion"], "1.0.0");
    let msg = error["msg"].as_str().unwrap();
    for part in ["plugin", "connect to the executor", "ENOENT", "team-a/web-0"] {
        assert!(msg.contains(part), "{part}: {msg}");
    }
    assert!(
        error["details"].as_str().unwrap().starts_with("PLG-CONN: "),
        "{error}"
    );
    assert!(started.elapsed() < Duration::from_secs(3));
}

#[test]
fn without_a_result_before_it_an_empty_one_is_printed() {
    for version in VERSIONS {
        let mut config = nowhere(version);
        config.as_object_mut().unwrap().remove("prevResult");
        let done = Run::new("ADD", &config).pod("kube-system", "x").go();
        assert_eq!((done.status, done.json()), (0, json!({ "cniVersion": version })));
    }
}

#[test]
fn a_missing_or_malformed_variable_is_named() {
    let add = || Run::new("ADD", &nowhere("1.0.0"));
    for (run, named) in [
        (add().without("CNI_COMMAND"), "CNI_COMMAND"),
        (
            add().env("CNI_COMMAND", "PUNT"),
            "ADD, DEL, CHECK, GC, STATUS, VERSION",
        ),
        (add().without("CNI_CONTAINERID"), "CNI_CONTAINERID"),
        (add().env("CNI_CONTAINERID", "../x"), "CNI_CONTAINERID"),
        (add().without("CNI_IFNAME"), "CNI_IFNAME"),
        (add().env("CNI_IFNAME", "eth0;flush ruleset"), "CNI_IFNAME"),
        (add().env("CNI_NETNS", ""), "CNI_NETNS"),
        (add().env("CNI_NETNS", "/run/../x"), "CNI_NETNS"),
        (add().env("CNI_ARGS", "K8S_POD_NAME=x"), "K8S_POD_NAMESPACE"),
        (
            add().env("CNI_ARGS", "K8S_POD_NAMESPACE=A_b;K8S_POD_NAME=x"),
            "K8S_POD_NAMESPACE",
        ),
        (
            add().env("CNI_ARGS", "K8S_POD_NAMESPACE=a;K8S_POD_NAME=x"),
            "K8S_POD_UID",
        ),
        (add().env("CNI_ARGS", "nonsense"), "nonsense"),
    ] {
        let error = run.go().error();
        assert_eq!(error["code"], 4, "{named}: {error}");
        assert!(error["msg"].as_str().unwrap().contains(named), "{named}: {error}");
        assert!(
            error["details"].as_str().unwrap().starts_with("PLG-ENV: "),
            "{error}"
        );
    }
}

#[test]
fn a_mistake_in_the_configuration_is_named_with_what_is_allowed() {
    let with = |key: &str, value: serde_json::Value| {
        let mut config = nowhere("1.0.0");
        config[key] = value;
        Run::new("ADD", &config)
    };
    for (run, code, named) in [
        (with("failOpen", json!(true)), 7, "failOpen"),
        (
            with("runDirectory", json!("/x")),
            7,
            "ours are ifname, kubeconfig, logLevel, runDir, selection, standAlone, staticPods, status",
        ),
        (
            with("runDir", json!("relative")),
            7,
            "runDir: \"relative\" is not valid: an absolute path",
        ),
        (
            with("kubeconfig", json!("x/y")),
            7,
            "kubeconfig: \"x/y\" is not valid: an absolute path",
        ),
        (with("logLevel", json!("loud")), 7, "expected one of `off`"),
        (with("ifname", json!("a/b")), 7, "ifname: "),
        (with("standAlone", json!("yes")), 7, "standAlone: "),
        (with("status", json!({ "gate": 1 })), 7, "expected `gateNode`"),
        (
            with("selection", json!({ "excludedNamespaces": ["X"] })),
            7,
            "excludedNamespaces",
        ),
        (with("name", json!("")), 7, "network name"),
        (with("name", json!(7)), 6, "invalid type"),
        (
            with("prevResult", json!({ "ips": [{ "address": "x" }] })),
            7,
            "ips[0].address",
        ),
    ] {
        let error = run.go().error();
        assert_eq!(error["code"], code, "{named}: {error}");
        assert!(error["msg"].as_str().unwrap().contains(named), "{named}: {error}");
        assert!(
            error["details"].as_str().unwrap().starts_with("PLG-CONF: "),
            "{error}"
        );
    }
}

#[test]
fn keys_of_cni_and_of_its_callers_are_accepted() {
    let mut config = nowhere("1.1.0");
    for key in [
        "runtimeConfig",
        "args",
        "capabilities",
        "dns",
        "ipam",
        "cni.dev/attachments",
        "cni.dev/x",
    ] {
        config[key] = json!({ "any": ["thing"] });
    }
    config["ipMasq"] = json!(true);
    assert_eq!(Run::new("ADD", &config).pod("kube-system", "x").go().status, 0);
}

#[test]
fn a_namespace_that_is_gone_is_named() {
    let error = Run::new("ADD", &nowhere("1.0.0"))
        .env("CNI_NETNS", "/var/run/netns/gone-1")
        .go()
        .error();
    assert_eq!(error["code"], 5);
    let msg = error["msg"].as_str().unwrap();
    assert!(msg.contains("/var/run/netns/gone-1: ENOENT"), "{msg}");
    let error = Run::new("ADD", &nowhere("1.0.0"))
        .env("CNI_NETNS", "/etc/passwd")
        .go()
        .error();
    assert!(error["msg"].as_str().unwrap().contains("EINVAL"), "{error}");
}

#[test]
fn status_succeeds_at_once_and_silently_unless_it_was_opted_in() {
    let mut config = nowhere("1.1.0");
    let done = Run::new("STATUS", &config).go();
    done.succeeded_silently();
    assert!(done.elapsed < Duration::from_millis(100), "{done:?}");
    // A mistake in the configuration must not make the node NotReady either.
    Run::new(
        "STATUS",
        &json!({ "cniVersion": "1.1.0", "name": "x", "runDir": 7 }),
    )
    .go()
    .succeeded_silently();
    config["status"] = json!({ "gateNode": true });
    let done = Run::new("STATUS", &config).go();
    assert_eq!(done.error()["code"], 50);
    assert!(done.elapsed < Duration::from_millis(200), "{done:?}");
}

#[test]
fn a_mistake_in_our_settings_does_not_keep_a_pod_from_being_deleted() {
    let config = json!({ "cniVersion": "1.0.0", "name": "x", "selection": 7, "ifname": "eth0", "typo": 1 });
    let done = Run::new("DEL", &config).env("CNI_IFNAME", "net1").go();
    done.succeeded_silently();
    assert!(done.stderr.contains("typo"), "{done:?}");
}

#[test]
fn del_leaves_one_tombstone_an_attachment() {
    let run_dir = tempfile::tempdir().unwrap();
    let run = Run::new("DEL", &config("1.0.0", run_dir.path())).env("CNI_NETNS", "");
    run.go().succeeded_silently();
    run.go().succeeded_silently();
    run.clone().without("CNI_NETNS").go().succeeded_silently();
    run.clone().env("CNI_IFNAME", "net1").go().succeeded_silently();
    let files: Vec<_> = std::fs::read_dir(run_dir.path().join("cni/tombstones"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    assert_eq!(files.len(), 1, "{files:?}");
    let tombstone: serde_json::Value = serde_json::from_slice(&std::fs::read(&files[0]).unwrap()).unwrap();
    assert_eq!(
        tombstone["attachment"],
        json!({ "network_name": "k8s-pod-network", "container_id": "c0ffee", "ifname": "eth0" })
    );
    assert!(tombstone["deleted_unix_ms"].as_u64().unwrap() > 1_600_000_000_000);
}

#[test]
fn del_without_a_run_directory_leaves_nothing() {
    Run::new("DEL", &nowhere("1.0.0")).go().succeeded_silently();
    assert!(!Path::new(NOWHERE).exists());
}

#[test]
fn check_needs_the_result_of_add() {
    let mut config = nowhere("1.0.0");
    config.as_object_mut().unwrap().remove("prevResult");
    let error = Run::new("CHECK", &config).go().error();
    assert_eq!(error["code"], 7);
    assert!(
        error["msg"].as_str().unwrap().contains("prevResult is missing"),
        "{error}"
    );
}

#[test]
fn gc_without_the_list_of_valid_attachments_removes_nothing_and_says_so() {
    let error = Run::new("GC", &nowhere("1.1.0")).go().error();
    assert!(
        error["msg"]
            .as_str()
            .unwrap()
            .contains("cni.dev/valid-attachments"),
        "{error}"
    );
    assert_eq!(error["code"], 7);
}

#[test]
fn a_panic_is_one_cni_error() {
    for stage in ["parse", "netns"] {
        let run = Run::new("ADD", &nowhere("0.4.0"))
            .env("SLUICE_CNI_TEST_PANIC", stage)
            .env("RUST_BACKTRACE", "1");
        for done in [run.go(), run.clone().closed(&[2]).go()] {
            let error = done.error();
            assert_eq!(
                (&error["code"], &error["cniVersion"]),
                (&json!(113), &json!("0.4.0")),
                "{error}"
            );
            assert!(
                error["details"].as_str().unwrap().starts_with("PLG-BUG: "),
                "{error}"
            );
        }
    }
}

#[test]
fn a_hostile_environment_changes_nothing_on_stdout() {
    let hostile = |run: Run| {
        run.env("RUST_LOG", "trace")
            .env("RUST_BACKTRACE", "full")
            .env("LC_ALL", "xx_YY")
            .env("SSL_CERT_FILE", "/nonexistent")
    };
    for command in ["ADD", "DEL", "CHECK", "STATUS", "GC", "VERSION"] {
        let plain = Run::new(command, &nowhere("1.1.0"));
        let expected = plain.go();
        for closed in [&[][..], &[2], &[0], &[0, 2]] {
            let done = hostile(plain.clone()).closed(closed).go();
            if closed.contains(&0) {
                let documents = serde_json::Deserializer::from_str(&done.stdout)
                    .into_iter::<serde_json::Value>()
                    .map(Result::unwrap);
                assert!(documents.count() <= 1, "{command} {closed:?}: {done:?}");
            } else {
                assert_eq!(
                    (done.status, &done.stdout),
                    (expected.status, &expected.stdout),
                    "{command}"
                );
            }
        }
    }
}

#[test]
fn an_answer_that_cannot_be_written_is_a_failure() {
    let done = Run::new("ADD", &nowhere("1.0.0"))
        .pod("kube-system", "x")
        .closed(&[1])
        .go();
    // std opens /dev/null in place of a closed descriptor, so nothing is lost that anybody could have read.
    assert!(done.stdout.is_empty(), "{done:?}");
}

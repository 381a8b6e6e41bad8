//! Whatever the API server does, or whoever sits in its place: an answer within 5 s, and never a pod that passes undecided.

use std::time::Duration;

use serde_json::json;

use crate::api_server::{Answer, ApiServer, namespace, pod, write_kubeconfig};
use crate::executor::{Behaviour, FakeExecutor};
use crate::{add, ambient, each, node, objects, outside, passed, refused};

const LIMIT: Duration = Duration::from_secs(5);

#[test]
fn an_api_server_that_refuses_says_so_in_the_pods_events() {
    let cases = [
        (401, "pod", "PLG-AUTH"),
        (403, "pod", "PLG-AUTH"),
        (403, "namespace", "PLG-AUTH"),
        (404, "pod", "PLG-POD"),
        (404, "namespace", "PLG-POD"),
        (429, "pod", "PLG-UNDECIDED"),
        (500, "pod", "PLG-UNDECIDED"),
        (503, "namespace", "PLG-UNDECIDED"),
    ];
    each(cases, |(status, of, code)| {
        let (run_dir, api) = node(Answer::Status { of, status });
        let done = add(run_dir.path()).go();
        let msg = refused(&done, code);
        let expected = format!("ask the API server: {} answers GET {of} by {status}", api.address);
        assert!(msg.contains(&expected), "{msg}");
        assert!(msg.contains("the agent is away"), "{msg}");
        assert!(done.elapsed < LIMIT, "{done:?}");
    });
}

#[test]
fn an_expired_token_is_no_decision() {
    let (run_dir, api) = node(outside());
    let mut kubeconfig = api.kubeconfig();
    kubeconfig["users"][0]["user"]["token"] = json!("expired");
    write_kubeconfig(run_dir.path(), &kubeconfig.to_string());
    let msg = refused(&add(run_dir.path()).go(), "PLG-AUTH");
    assert!(msg.contains("401 Unauthorized (the server says 401)"), "{msg}");
}

#[test]
fn an_api_server_that_does_not_answer_is_given_up_in_time() {
    let answers = [Answer::Silence, Answer::Mute, Answer::Drip];
    let cases = answers.map(|answer| [(answer.clone(), false), (answer, true)]);
    each(cases.into_iter().flatten(), |(answer, broker_away)| {
        let (run_dir, _api) = node(answer.clone());
        let patience = Duration::from_secs(2);
        let _executor =
            broker_away.then(|| FakeExecutor::start(run_dir.path(), Behaviour::NoBrokerAfter(patience)));
        let done = add(run_dir.path()).go();
        let msg = refused(&done, "PLG-UNDECIDED");
        assert!(done.elapsed < LIMIT, "{answer:?}: {done:?}");
        assert!(
            matches!(answer, Answer::Drip) || msg.contains("no answer within"),
            "{msg}"
        );
    });
}

#[test]
fn an_api_server_that_is_down_is_named() {
    let (run_dir, api) = node(outside());
    let mut kubeconfig = api.kubeconfig();
    kubeconfig["clusters"][0]["cluster"]["server"] = json!("https://127.0.0.1:1");
    write_kubeconfig(run_dir.path(), &kubeconfig.to_string());
    let done = add(run_dir.path()).go();
    let msg = refused(&done, "PLG-UNDECIDED");
    assert!(
        msg.contains("cannot connect to 127.0.0.1:1: ECONNREFUSED"),
        "{msg}"
    );
    assert!(msg.contains("ENOENT"), "why the agent was not asked: {msg}");
    assert!(done.elapsed < LIMIT, "{done:?}");
}

#[test]
fn a_server_whose_certificate_is_anothers_is_not_even_asked() {
    let (run_dir, api) = node(outside());
    let other = ApiServer::start(outside());
    let mut kubeconfig = other.kubeconfig();
    kubeconfig["clusters"][0]["cluster"]["server"] = json!(format!("https://{}", api.address));
    write_kubeconfig(run_dir.path(), &kubeconfig.to_string());
    let msg = refused(&add(run_dir.path()).go(), "PLG-UNDECIDED");
    assert!(
        msg.contains("no TLS connection") && msg.contains("invalid peer certificate"),
        "{msg}"
    );
    assert!(api.asked().is_empty() && other.asked().is_empty());
}

#[test]
fn the_certificate_must_name_the_address_or_the_configured_name() {
    let (run_dir, api) = node(outside());
    let mut kubeconfig = api.kubeconfig();
    let named = |kubeconfig: &mut serde_json::Value, name: &str| {
        kubeconfig["clusters"][0]["cluster"]["tls-server-name"] = json!(name);
        write_kubeconfig(run_dir.path(), &kubeconfig.to_string());
        add(run_dir.path()).go()
    };
    passed(&named(&mut kubeconfig, "kubernetes.default.svc"));
    let msg = refused(&named(&mut kubeconfig, "kubernetes.example"), "PLG-UNDECIDED");
    assert!(msg.contains("not valid for name"), "{msg}");
}

#[test]
fn an_api_server_over_ipv6_is_asked() {
    let run_dir = tempfile::tempdir().unwrap();
    let api = ApiServer::start_at("[::1]:0", outside());
    api.write_kubeconfig(run_dir.path());
    passed(&add(run_dir.path()).go());
    assert!(
        api.asked()[0]
            .head
            .to_lowercase()
            .contains(&format!("host: {}\r\n", api.address))
    );
}

#[test]
fn a_redirect_is_not_followed() {
    let elsewhere = ApiServer::start(outside());
    let to = format!(
        "https://{}/api/v1/namespaces/team-a/pods/web-0",
        elsewhere.address
    );
    let (run_dir, _api) = node(Answer::Redirect(to));
    let msg = refused(&add(run_dir.path()).go(), "PLG-UNDECIDED");
    assert!(msg.contains("302"), "{msg}");
    assert!(elsewhere.asked().is_empty());
}

#[test]
fn an_answer_that_is_no_object_decides_nothing() {
    let mut large = pod(&json!({}), &json!({})).to_string().into_bytes();
    large.resize(4 << 20, b' ');
    let cases = [
        (large, "longer than"),
        (b"<html>".to_vec(), "malformed"),
        (b"{}".to_vec(), "malformed"),
        (Vec::new(), "malformed"),
    ];
    each(cases, |(body, named)| {
        let (run_dir, _api) = node(Answer::Body(body));
        let done = add(run_dir.path()).go();
        let msg = refused(&done, "PLG-UNDECIDED");
        assert!(msg.contains(named), "{named}: {msg}");
        assert!(done.elapsed < LIMIT, "{done:?}");
    });
    let (run_dir, _api) = node(Answer::Half);
    refused(&add(run_dir.path()).go(), "PLG-UNDECIDED");
}

#[test]
fn a_large_pod_is_read() {
    let annotations = json!({ "large": "x".repeat(1 << 20) });
    let (run_dir, _api) = node(Answer::Objects {
        pod: pod(&json!({}), &annotations),
        namespace: namespace(&json!({})),
    });
    passed(&add(run_dir.path()).go());
}

#[test]
fn another_pod_of_that_name_decides_nothing() {
    let mut other = pod(&json!({}), &json!({}));
    other["metadata"]["uid"] = json!("22222222-2222-3333-4444-555555555555");
    let (run_dir, _api) = node(Answer::Objects {
        pod: other,
        namespace: namespace(&json!({})),
    });
    let msg = refused(&add(run_dir.path()).go(), "PLG-POD");
    assert!(msg.contains("has UID \"22222222-"), "{msg}");
}

#[test]
fn metadata_alone_is_asked_for() {
    let (run_dir, api) = node(objects(&json!({}), &json!({})));
    passed(&add(run_dir.path()).go());
    for asked in api.asked() {
        let head = asked.head.to_lowercase();
        assert!(
            head.contains("accept: application/json;as=partialobjectmetadata"),
            "{head}"
        );
    }
}

#[test]
fn a_kubeconfig_that_cannot_be_used_is_named() {
    let (run_dir, api) = node(objects(&json!({}), &ambient()));
    let yaml = "apiVersion: v1\nkind: Config\n";
    let insecure = {
        let mut kubeconfig = api.kubeconfig();
        kubeconfig["clusters"][0]["cluster"]["insecure-skip-tls-verify"] = json!(true);
        kubeconfig.to_string()
    };
    for text in [
        "",
        "{",
        yaml,
        &insecure,
        &api.kubeconfig().to_string().replace("Bearer", "")[..200],
    ] {
        write_kubeconfig(run_dir.path(), text);
        let done = add(run_dir.path()).go();
        let msg = refused(&done, "PLG-KUBECONFIG");
        assert!(msg.contains("read the kubeconfig"), "{msg}");
        assert!(done.elapsed < LIMIT, "{done:?}");
    }
    assert!(api.asked().is_empty());
}

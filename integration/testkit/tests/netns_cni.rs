//! The chain runner behaves as libcni, with the real `bridge` and `host-local` plugins. Needs root.
#![expect(clippy::unwrap_used, reason = "a step that fails is the test's failure")]

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use serde_json::{Value, json};
use sluice_testkit::cni::{Attachment, Chain};
use sluice_testkit::node::Node;
use sluice_testkit::process;
use sluice_testkit::wait::poll_true;

/// A plugin that writes down its environment and input, waits if `wait` is in its configuration, and passes
/// prevResult on.
const RECORDER: &str = r#"#!/bin/sh
input=$(cat)
dir=$(dirname "$0")
printf '%s %s netns=%s args=%s %s\n' "$CNI_COMMAND" "$CNI_CONTAINERID" "$CNI_NETNS" "$CNI_ARGS" "$input" >> "$dir/calls"
case "$input" in *'"hang":true'*) exec sleep 60 ;; *'"fail":true'*) echo '{"cniVersion":"1.0.0","code":7,"msg":"told to fail"}'; exit 1 ;; esac
[ "$CNI_COMMAND" = ADD ] && printf '%s' "$input" | sed 's/.*"prevResult":\(.*\)}$/\1/'
exit 0
"#;

fn recorder(node: &Node) -> std::path::PathBuf {
    let dir = node.dir().join("plugins");
    std::fs::create_dir(&dir).unwrap();
    let path = dir.join("recorder");
    std::fs::write(&path, RECORDER).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    dir
}

#[test]
fn real_bridge_and_host_local_wire_a_pod_and_del_takes_it_down() {
    let node = Node::new().unwrap();
    let plugins = vec![
        Chain::bridge_plugin("cni1", "10.99.0.0/24", &node.dir().join("ipam")),
        json!({ "type": "recorder", "capabilities": {} }),
    ];
    let chain = Chain::new(node.place(), "net", "1.0.0", plugins).bin_dir(recorder(&node));
    let pod = node.pod("real").create_unwired().unwrap();
    let attachment = Attachment::from(&pod);
    let added = chain.add(&attachment, None).unwrap().ok().unwrap();
    let result = added.result.unwrap();
    assert_eq!(
        result,
        added.executions[0].json().unwrap(),
        "the second plugin passed the first one's result on"
    );
    let address = result["ips"][0]["address"]
        .as_str()
        .unwrap()
        .split('/')
        .next()
        .unwrap()
        .to_owned();
    let shown = process::json(
        &pod.netns().into(),
        "ip",
        &["-j", "address", "show", "dev", "eth0"],
    )
    .unwrap();
    assert!(shown.to_string().contains(&address), "{shown}");
    assert!(chain.check(&attachment, Some(&result)).unwrap().succeeded());
    chain.del(&attachment, Some(&result)).unwrap().ok().unwrap();
    let shown = process::json(&pod.netns().into(), "ip", &["-j", "link"]).unwrap();
    assert!(!shown.to_string().contains("eth0"), "{shown}");
}

#[test]
fn chained_plugin_gets_what_a_runtime_gives_it() {
    let node = Node::new().unwrap();
    let dir = recorder(&node);
    let chain = Chain::new(node.place(), "net", "1.1.0", vec![json!({ "type": "recorder" })]).bin_dir(&dir);
    let pod = node.pod("web-0").namespace("shop").create().unwrap();
    let attachment = Attachment::from(&pod);
    let prev = pod.prev_result("1.1.0");
    let result = chain
        .add(&attachment, Some(&prev))
        .unwrap()
        .ok()
        .unwrap()
        .result
        .unwrap();
    assert_eq!(result, prev);
    chain.status().unwrap().ok().unwrap();
    chain.gc(std::slice::from_ref(&attachment)).unwrap().ok().unwrap();
    let lost = Attachment {
        netns: String::new(),
        ..attachment.clone()
    };
    chain.del(&lost, Some(&prev)).unwrap().ok().unwrap();
    let calls = std::fs::read_to_string(dir.join("calls")).unwrap();
    let lines: Vec<&str> = calls.lines().collect();
    assert_eq!(lines.len(), 4);
    assert!(lines[0].starts_with(&format!(
        "ADD {} netns={}",
        pod.container_id(),
        pod.netns_path().display()
    )));
    assert!(lines[0].contains("K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0"));
    assert!(lines[1].starts_with("STATUS  netns= args= {"));
    let gc: Value = serde_json::from_str(&lines[2][lines[2].find('{').unwrap()..]).unwrap();
    assert_eq!(
        gc["cni.dev/valid-attachments"],
        json!([{ "containerID": pod.container_id(), "ifname": "eth0" }])
    );
    assert!(lines[3].starts_with(&format!("DEL {} netns= args=", pod.container_id())));
    let del: Value = serde_json::from_str(&lines[3][lines[3].find('{').unwrap()..]).unwrap();
    assert_eq!((&del["prevResult"], &del["name"]), (&prev, &json!("net")));
}

#[test]
fn failing_plugin_ends_the_chain() {
    let node = Node::new().unwrap();
    let plugins = vec![
        json!({ "type": "recorder", "fail": true }),
        json!({ "type": "recorder" }),
    ];
    let chain = Chain::new(node.place(), "net", "1.0.0", plugins).bin_dir(recorder(&node));
    let pod = node.pod("p").create().unwrap();
    let outcome = chain
        .add(&(&pod).into(), Some(&pod.prev_result("1.0.0")))
        .unwrap();
    assert!(!outcome.succeeded() && outcome.result.is_none());
    assert_eq!(outcome.executions.len(), 1);
    assert_eq!(outcome.last().json().unwrap()["code"], 7);
    assert!(outcome.ok().unwrap_err().to_string().contains("told to fail"));
}

#[test]
fn plugin_can_be_killed_in_the_middle() {
    let node = Node::new().unwrap();
    let dir = recorder(&node);
    let chain = Chain::new(node.place(), "net", "1.0.0", vec![]).bin_dir(&dir);
    let pod = node.pod("p").create().unwrap();
    let plugin = json!({ "type": "recorder", "hang": true });
    let running = chain.start(&plugin, "ADD", Some(&(&pod).into()), None).unwrap();
    poll_true("plugin has started", Duration::from_secs(3), || {
        dir.join("calls").exists()
    })
    .unwrap();
    running.kill();
    let execution = running.wait().unwrap();
    assert!(execution.status.code().is_none() && execution.stdout.is_empty());
}

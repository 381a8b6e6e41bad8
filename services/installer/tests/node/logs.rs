//! The plugin's log lines.

use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{Node, SOON, wait_for};

fn lines(node: &Node) -> Vec<Value> {
    node.log_text()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect()
}

#[test]
fn lines_of_the_plugin_are_written_with_ours_and_garbage_is_counted() {
    let node = Node::new();
    // What an earlier process left.
    std::fs::write(node.run.plugin_log_socket(), "stale").unwrap();
    let _broker = node.broker();
    let _installer = node.start_ready();
    let path = node.run.plugin_log_socket();
    let metadata = std::fs::metadata(&path).unwrap();
    assert!(metadata.file_type().is_socket());
    assert_eq!(metadata.permissions().mode() & 0o7777, 0o600);

    let plugin = UnixDatagram::unbound().unwrap();
    plugin.connect(&path).unwrap();
    plugin.set_nonblocking(true).unwrap();
    let line =
        br#"{"unix_ms":1,"level":"warn","service":"sluice-cni","message":"no executor","pod":"a/b\n{}"}"#;
    plugin.send(line).unwrap();
    plugin.send(b"garbage").unwrap();
    plugin.send(b"").unwrap();
    plugin.send(line).unwrap();
    let found = wait_for("both lines", SOON, || {
        let found: Vec<Value> = lines(&node)
            .into_iter()
            .filter(|line| line["target"] == "plugin")
            .collect();
        (found.len() == 2).then_some(found)
    });
    assert_eq!(found[0]["message"], "no executor");
    assert_eq!(found[0]["pod"], "a/b\n{}");
    assert_eq!(found[0]["unix_ms"], 1);
    wait_for("the count", SOON, || {
        lines(&node)
            .iter()
            .any(|line| line["message"] == "dropped what is no log line of the plugin")
            .then_some(())
    });
}

#[test]
fn a_flood_makes_neither_the_plugin_wait_nor_the_installer_deaf() {
    let node = Node::new();
    let _broker = node.broker();
    let _installer = node.start_ready();
    let plugin = UnixDatagram::unbound().unwrap();
    plugin.connect(node.run.plugin_log_socket()).unwrap();
    plugin.set_nonblocking(true).unwrap();
    let line = format!(r#"{{"level":"info","message":"{}"}}"#, "x".repeat(1000));
    let start = Instant::now();
    let mut longest = Duration::ZERO;
    while start.elapsed() < Duration::from_secs(2) {
        let before = Instant::now();
        let _ = plugin.send(line.as_bytes());
        longest = longest.max(before.elapsed());
    }
    assert!(longest < Duration::from_millis(500), "{longest:?}");
    assert_eq!(node.health(), "ready");
    std::fs::remove_file(node.net.join(crate::support::OWNED)).unwrap();
    wait_for("our file", SOON, || node.read(crate::support::OWNED));
}

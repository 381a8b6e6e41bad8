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

#[test]
fn a_plugin_of_the_other_agent_finds_its_log_endpoint() {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    let node = Node::new();
    let directory = node.root().join("istio-cni");
    std::fs::create_dir(&directory).unwrap();
    let node = node.args(&["--istio-run-dir", directory.to_str().unwrap()]);
    let _broker = node.broker();
    let _installer = node.start_ready();
    let post = |path: &str, body: &str| {
        let mut stream = UnixStream::connect(directory.join("log.sock")).unwrap();
        let length = body.len();
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: unix\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
        );
        stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let body = r#"["{\"level\":\"info\",\"time\":\"2026-01-02T03:04:05.000006Z\",\"msg\":\"added\"}"]"#;
    for (path, body) in [("/log", body), ("/log", "garbage"), ("/other", body)] {
        assert!(post(path, body).starts_with("HTTP/1.1 200 OK\r\n"));
    }
    // As that agent does when it ends, whoever's socket it is by then.
    std::fs::remove_file(directory.join("log.sock")).unwrap();
    wait_for("the endpoint", SOON, || {
        directory.join("log.sock").exists().then_some(())
    });
    assert!(post("/log", "[]").starts_with("HTTP/1.1 200 OK\r\n"));
    let found: Vec<Value> = lines(&node)
        .into_iter()
        .filter(|line| line["target"] == "istio-cni")
        .collect();
    assert_eq!(found.len(), 1);
    assert_eq!(
        (&found[0]["message"], &found[0]["time"]),
        (&"added".into(), &"2026-01-02T03:04:05.000006Z".into())
    );
}

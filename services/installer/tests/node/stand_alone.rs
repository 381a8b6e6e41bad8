//! A network of our own, in the directory of a plugin that delegates (Multus).

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use sluice_proto::pb::node::Lifecycle;

use crate::support::{Node, PODNET, SOON, wait_for};

const FILE: &str = "zz-sluice.conf";

fn node() -> Node {
    let node = Node::new().args(&["--mode", "stand-alone"]);
    node.primary(
        "90-multus.conf",
        r#"{"cniVersion":"0.3.1","name":"multus-cni-network","type":"multus"}"#,
    );
    node
}

/// What would tell that another's file was written or replaced: inode, times, mode.
fn others(node: &Node) -> Vec<(String, u64, i64, i64, u32)> {
    let names = node.names().into_iter().filter(|name| name != FILE);
    let look = |name: String| {
        let metadata = fs::metadata(node.net.join(&name)).unwrap();
        (
            name,
            metadata.ino(),
            metadata.mtime_nsec(),
            metadata.ctime_nsec(),
            metadata.mode(),
        )
    };
    names.map(look).collect()
}

#[test]
fn its_one_file_comes_is_kept_right_and_goes_and_no_other_is_touched() {
    let node = node();
    let before = others(&node);
    let broker = node.broker();
    let mut installer = node.start_ready();
    assert_eq!(node.names(), ["10-podnet.conflist", "90-multus.conf", FILE]);
    let text = node.read(FILE).unwrap();
    let conf: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(conf["name"], "sluice-cni");
    assert_eq!(conf["runDir"], node.run.root().to_str().unwrap());
    assert_eq!(fs::metadata(node.net.join(FILE)).unwrap().mode() & 0o7777, 0o600);
    let report = wait_for("a report", SOON, || broker.report().filter(|report| report.ready));
    assert_eq!(report.mode, "stand-alone");
    assert_eq!(report.effective_file, format!("/etc/cni/net.d/{FILE}"));
    assert_eq!(report.primary_file, "");

    let again = || {
        wait_for("it is right again", Duration::from_secs(2), || {
            (node.read(FILE).as_ref() == Some(&text)).then_some(())
        });
    };
    fs::remove_file(node.net.join(FILE)).unwrap();
    again();
    node.primary(FILE, PODNET);
    again();
    fs::remove_file(node.installed()).unwrap();
    wait_for("the plugin", Duration::from_secs(2), || {
        node.installed().exists().then_some(())
    });
    // A primary that comes, changes and goes is nobody's business here.
    node.primary(
        "05-edge.conf",
        r#"{"cniVersion":"1.0.0","name":"edge","type":"macvlan"}"#,
    );
    fs::remove_file(node.net.join("05-edge.conf")).unwrap();
    node.wait_ready();
    assert_eq!(others(&node), before);

    installer.terminate();
    broker.say(|state| {
        state.r#final = true;
        state.lifecycle = Lifecycle::Remove.into();
    });
    assert!(installer.wait(SOON).success());
    assert_eq!(others(&node), before);
    assert_eq!(node.names(), ["10-podnet.conflist", "90-multus.conf"]);
}

#[test]
fn a_directory_without_any_network_is_enough() {
    let node = node();
    for name in node.names() {
        fs::remove_file(node.net.join(name)).unwrap();
    }
    let _broker = node.broker();
    let _installer = node.start_ready();
    assert_eq!(node.names(), [FILE]);
}

#[test]
fn a_change_of_the_mode_leaves_nothing_of_the_other() {
    let mut node = node();
    let _broker = node.broker();
    node.start_ready().kill();
    node.args = Vec::new();
    node.start_ready().kill();
    assert_eq!(
        node.names(),
        ["02-sluice.conflist", "10-podnet.conflist", "90-multus.conf"]
    );
    node.args = vec!["--mode".into(), "stand-alone".into()];
    node.start_ready().kill();
    assert_eq!(node.names(), ["10-podnet.conflist", "90-multus.conf", FILE]);
}

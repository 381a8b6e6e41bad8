//! What is counted of installations, for the metric that Istio's node agent has.

use std::fs;
use std::os::unix::fs::chown;
use std::path::Path;

use sluice_proto::pb::node::Installs;

use crate::support::{FakeBroker, Node, SOON, wait_for};

/// Waits for a report with counts such as these.
fn wait_counts(broker: &FakeBroker, what: &str, such: impl Fn(&Installs) -> bool) -> Installs {
    wait_for(what, SOON, || {
        broker.report().and_then(|report| report.installs).filter(&such)
    })
}

/// Root without capabilities cannot write there.
fn close(directory: &Path) {
    chown(directory, Some(1000), Some(1000)).expect("root is needed");
}

fn open(directory: &Path) {
    chown(directory, Some(0), Some(0)).unwrap();
}

#[test]
fn each_kind_of_failure_is_counted_apart_from_the_others() {
    let node = Node::new();
    let credentials = node.root().join("credentials");
    fs::create_dir(&credentials).unwrap();
    let kubeconfig = credentials.join("kubeconfig");
    let node = node.args(&["--kubeconfig", kubeconfig.to_str().unwrap()]);
    for directory in [&node.bin, &credentials, &node.net] {
        close(directory);
    }
    let broker = node.broker();
    let _installer = node.start();
    let counts = wait_counts(&broker, "the plugin failed", |counts| counts.plugin_failed > 0);
    assert_eq!(
        (
            counts.kubeconfig_failed,
            counts.configuration_failed,
            counts.succeeded
        ),
        (0, 0, 0),
        "nothing is tried after a failure"
    );
    open(&node.bin);
    let counts = wait_counts(&broker, "the kubeconfig failed", |counts| {
        counts.kubeconfig_failed > 0
    });
    assert_eq!((counts.configuration_failed, counts.succeeded), (0, 0));
    open(&credentials);
    wait_counts(&broker, "the configuration failed", |counts| {
        counts.configuration_failed > 0
    });
    assert_eq!(node.names(), ["10-podnet.conflist"]);
    open(&node.net);
    node.wait_ready();
    let counts = wait_counts(&broker, "success", |counts| counts.succeeded > 0);
    assert_eq!(counts.succeeded, 1);
}

#[test]
fn success_is_counted_each_time_that_all_becomes_ready() {
    let node = Node::new();
    let broker = node.broker();
    let _installer = node.start_ready();
    wait_counts(&broker, "the first success", |counts| counts.succeeded == 1);
    let aside = node.root().join("aside");
    fs::rename(node.net.join("10-podnet.conflist"), &aside).unwrap();
    node.wait_health("no-primary", SOON);
    fs::rename(&aside, node.net.join("10-podnet.conflist")).unwrap();
    node.wait_ready();
    let counts = wait_counts(&broker, "the second success", |counts| counts.succeeded == 2);
    assert_eq!(
        (
            counts.plugin_failed,
            counts.kubeconfig_failed,
            counts.configuration_failed
        ),
        (0, 0, 0)
    );
}

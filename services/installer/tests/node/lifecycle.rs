//! From the first installation to the last file that is gone.

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::time::Duration;

use sluice_proto::pb::node::{Lifecycle, NodeState};

use crate::support::{Node, OWNED, PODNET, SOON, credentials, serving, wait_for};

#[test]
fn everything_is_installed_once_the_broker_can_serve() {
    let node = Node::new();
    let broker = node.broker_saying(NodeState {
        why_not: "the executor is not connected".into(),
        ..NodeState::default()
    });
    let _installer = node.start();
    node.wait_health(
        "waiting for the agent to be able to serve pods: the executor is not connected",
        SOON,
    );
    // The plugin is there before anything names it.
    assert!(node.installed().exists());
    assert_eq!(node.chain(), ["ptp", "portmap"]);

    broker.state.send_replace(serving());
    node.wait_ready();
    assert_eq!(node.chain(), ["ptp", "portmap", "sluice-cni"]);
    assert_eq!(node.names(), [OWNED, "10-podnet.conflist"]);
    assert_eq!(node.read("10-podnet.conflist").unwrap(), PODNET);
    let mode = |path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(node.net.join(OWNED)), 0o600);
    assert_eq!(mode(node.installed()), 0o755);
    assert_eq!(mode(node.run.kubeconfig()), 0o600);
    assert!(
        fs::read_to_string(node.run.kubeconfig())
            .unwrap()
            .contains("first-token")
    );
    assert_eq!(
        fs::read(node.installed()).unwrap(),
        fs::read(node.image().join("sluice-cni")).unwrap()
    );

    let report = wait_for("a report", SOON, || broker.report().filter(|report| report.ready));
    assert_eq!(report.mode, "owned");
    assert_eq!(report.effective_file, "/etc/cni/net.d/02-sluice.conflist");
    assert_eq!(report.primary_file, "/etc/cni/net.d/10-podnet.conflist");
    assert_eq!((report.problem.as_str(), report.repairs), ("", 0));
}

#[test]
fn what_is_installed_stays_when_the_broker_cannot_serve_any_more() {
    let node = Node::new();
    let broker = node.broker();
    let _installer = node.start_ready();
    broker.say(|state| state.can_serve = false);
    // A change that it must notice, so that it has looked after the broker's word.
    fs::remove_file(node.installed()).unwrap();
    wait_for("the plugin is back", SOON, || {
        node.installed().exists().then_some(())
    });
    assert_eq!(node.chain(), ["ptp", "portmap", "sluice-cni"]);
    broker.stop();
    fs::remove_file(node.net.join(OWNED)).unwrap();
    wait_for("our file is back", SOON, || node.read(OWNED));
    node.wait_ready();
}

#[test]
fn an_upgrade_or_reboot_leaves_everything_where_it_is() {
    for last in [Lifecycle::Keep, Lifecycle::Unspecified] {
        let node = Node::new();
        let broker = node.broker();
        let mut installer = node.start_ready();
        installer.terminate();
        broker.say(|state| {
            state.r#final = true;
            state.lifecycle = last.into();
        });
        assert!(installer.wait(SOON).success());
        assert_eq!(node.chain(), ["ptp", "portmap", "sluice-cni"]);
        assert!(node.run.kubeconfig().exists() && node.installed().exists());
        let directory = node.run.plugin_log_socket();
        let run = fs::read_dir(directory.parent().unwrap()).unwrap();
        let sockets = run.filter(|entry| entry.as_ref().unwrap().file_type().unwrap().is_socket());
        assert_eq!(sockets.count(), 0, "of the installer, which has ended");
    }
}

#[test]
fn a_second_installer_ends_and_the_first_goes_on() {
    let node = Node::new();
    let _broker = node.broker();
    let first = node.start_ready();
    let mut second = node.start();
    assert_eq!(second.wait(SOON).code(), Some(1));
    let log = node.log_text();
    let owner = format!("installer.sock: process {} (uid 0) listens there", first.pid());
    assert!(log.contains(&owner), "{log}");
    fs::remove_file(node.installed()).unwrap();
    wait_for("the first mends", SOON, || {
        node.installed().exists().then_some(())
    });
    node.wait_ready();
}

#[test]
fn a_broker_that_says_nothing_at_the_end_leaves_everything_where_it_is() {
    let node = Node::new().args(&["--shutdown-seconds", "1"]);
    let _broker = node.broker();
    let mut installer = node.start_ready();
    installer.terminate();
    assert!(installer.wait(SOON).success());
    assert_eq!(node.chain(), ["ptp", "portmap", "sluice-cni"]);
}

#[test]
fn a_node_that_is_left_gets_back_its_configuration_first() {
    let node = Node::new();
    let broker = node.broker();
    let mut installer = node.start_ready();
    fs::create_dir(node.run.unprotected()).unwrap();
    fs::write(node.run.unprotected().join("0123.json"), "{}").unwrap();
    installer.terminate();
    broker.say(|state| {
        state.r#final = true;
        state.lifecycle = Lifecycle::Remove.into();
        state.lifecycle_reason = "the DaemonSet is gone".into();
    });
    assert!(installer.wait(SOON).success());
    assert_eq!(node.names(), ["10-podnet.conflist"]);
    assert_eq!(node.read("10-podnet.conflist").unwrap(), PODNET);
    let run = fs::read_dir(node.run.kubeconfig().parent().unwrap()).unwrap();
    let left: Vec<_> = run.map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
    // Only the stand-in is left, until it is purged.
    let stand_in = fs::read(node.image().join("sluice-cni-removed")).unwrap();
    assert_eq!(fs::read(node.installed()).unwrap(), stand_in);
    let log = node.log_text();
    let order: Vec<usize> = [
        "02-sluice.conflist\"",
        "plugin/kubeconfig\"",
        "replace the plugin by its stand-in",
    ]
    .iter()
    .map(|part| log.rfind(part).unwrap())
    .collect();
    assert!(order.is_sorted(), "{log}");
    assert!(node.once("purge", &[]).status.success());
    assert!(!node.installed().exists());
}

#[test]
fn the_brokers_last_word_may_come_before_the_signal() {
    let node = Node::new();
    let broker = node.broker();
    let mut installer = node.start_ready();
    broker.say(|state| {
        state.r#final = true;
        state.lifecycle = Lifecycle::Remove.into();
    });
    wait_for("it has heard", SOON, || {
        node.log_text().contains("the broker is stopping").then_some(())
    });
    broker.stop();
    installer.terminate();
    assert!(installer.wait(Duration::from_secs(4)).success());
    assert_eq!(node.names(), ["10-podnet.conflist"]);
}

/// The broker of the next agent may be there before the old installer is asked to stop.
#[test]
fn the_next_agents_broker_is_not_waited_for_and_takes_no_last_word_back() {
    for last in [None, Some(Lifecycle::Remove)] {
        let node = Node::new().args(&["--pod-name", "own", "--shutdown-seconds", "60"]);
        let own = node.broker_saying(NodeState {
            agent: "own".into(),
            ..serving()
        });
        let mut installer = node.start_ready();
        if let Some(last) = last {
            own.say(|state| {
                state.r#final = true;
                state.lifecycle = last.into();
            });
            wait_for("it has heard", SOON, || {
                node.log_text().contains("the broker is stopping").then_some(())
            });
        }
        own.stop();
        let next = node.broker_saying(NodeState {
            agent: "next".into(),
            ..serving()
        });
        wait_for("it reports to the next one", SOON, || next.report());
        installer.terminate();
        assert!(installer.wait(SOON).success());
        let left = node.names() == ["10-podnet.conflist"];
        assert_eq!(left, last.is_some(), "{:?}", node.names());
    }
}

#[test]
fn new_credentials_reach_the_plugin_and_lost_ones_come_back() {
    let node = Node::new();
    let broker = node.broker();
    let _installer = node.start_ready();
    let has = |token: &str| fs::read_to_string(node.run.kubeconfig()).is_ok_and(|text| text.contains(token));
    for number in 0..100 {
        let token = format!("eyJhbGciOiJSUzI1NiJ9.token-{number}.signature");
        broker.say(|state| state.credentials = Some(credentials(&token)));
        wait_for("the new token", Duration::from_secs(2), || {
            has(&token).then_some(())
        });
    }
    fs::remove_file(node.run.kubeconfig()).unwrap();
    wait_for("the kubeconfig is back", Duration::from_secs(2), || {
        has("token-99").then_some(())
    });
    // The broker may lack a token for a while; the one on disk is still good.
    broker.say(|state| state.credentials = None);
    assert_eq!(node.health(), "ready");
    let log = node.log_text();
    assert!(
        !log.contains("token-") && !log.contains("eyJ") && !log.contains("BEGIN CERT"),
        "{log}"
    );
}

//! Taking the place of Istio's node agent, and giving it back.

use std::fs;

use sluice_proto::pb::node::NodeState;

use crate::support::{Node, Reader, SOON, kinds, serving, wait_for};

const WITH_ISTIO: &str = r#"{
  "cniVersion": "0.3.1",
  "name": "podnet",
  "plugins": [
    {
      "type": "ptp"
    },
    {
      "ambient_enabled": true,
      "cni_agent_run_dir": "/var/run/istio-cni",
      "dns": {},
      "exclude_namespaces": null,
      "ipam": {},
      "name": "istio-cni",
      "plugin_log_level": "info",
      "type": "istio-cni"
    }
  ]
}
"#;

#[test]
fn without_leave_to_do_so_another_mesh_is_left_alone() {
    let node = Node::new();
    node.primary("10-podnet.conflist", WITH_ISTIO);
    let _broker = node.broker();
    let _installer = node.start();
    node.wait_health("another-mesh: 10-podnet.conflist calls istio-cni", SOON);
    assert_eq!(node.names(), ["10-podnet.conflist"]);
    assert_eq!(node.read("10-podnet.conflist").unwrap(), WITH_ISTIO);
}

#[test]
fn the_place_is_taken_when_pods_can_be_served_and_given_back_at_the_end() {
    for mode in ["owned", "chained"] {
        let node = Node::new().args(&["--take-over", "--mode", mode]);
        node.primary("10-podnet.conflist", WITH_ISTIO);
        let reader = Reader::start(&node.net);
        let broker = node.broker_saying(NodeState::default());
        let mut installer = node.start();
        node.wait_health("waiting for the agent", SOON);
        assert_eq!(node.chain(), ["ptp", "istio-cni"]);
        broker.state.send_replace(serving());
        node.wait_ready();
        assert_eq!(node.chain(), ["ptp", "sluice-cni"]);
        installer.kill();
        assert!(node.once("uninstall", &[]).status.success());
        reader.assert_always_valid();
        // From a file of our own the way back is at once; from an edited one Istio's agent has to take it.
        let after = if mode == "owned" {
            vec!["ptp", "istio-cni"]
        } else {
            vec!["ptp"]
        };
        assert_eq!(node.chain(), after);
    }
}

#[test]
fn the_other_agents_own_file_is_overtaken() {
    let node = Node::new().args(&["--take-over"]);
    node.primary("02-istio-cni.conflist", WITH_ISTIO);
    let reader = Reader::start(&node.net);
    let _broker = node.broker();
    let _installer = node.start_ready();
    assert_eq!(
        node.names(),
        [
            "01-sluice.conflist",
            "02-istio-cni.conflist",
            "10-podnet.conflist"
        ]
    );
    assert_eq!(node.chain(), ["ptp", "sluice-cni"]);
    // Istio's agent leaves the node and takes its file with it.
    fs::remove_file(node.net.join("02-istio-cni.conflist")).unwrap();
    wait_for("the primary network's own file counts", SOON, || {
        let list = serde_json::from_str(&node.read("01-sluice.conflist")?).ok()?;
        (kinds(&list) == ["ptp", "portmap", "sluice-cni"]).then_some(())
    });
    node.wait_ready();
    reader.assert_always_valid();
}

#[test]
fn an_agent_that_adds_its_entry_again_is_told_of() {
    let node = Node::new().args(&["--take-over"]);
    node.primary("10-podnet.conflist", WITH_ISTIO);
    let broker = node.broker();
    let _installer = node.start_ready();
    // It edits whatever file is in force, once a second at most.
    for _ in 0..6 {
        let text = node.read("01-sluice.conflist").unwrap();
        let both = text.replacen(
            "{\n      \"type\": \"sluice-cni\"",
            "{\"type\":\"istio-cni\"},\n    {\n      \"type\": \"sluice-cni\"",
            1,
        );
        assert_ne!(both, text);
        node.primary("01-sluice.conflist", &both);
        wait_for("ours again", SOON, || {
            (node.chain() == ["ptp", "sluice-cni"]).then_some(())
        });
    }
    let report = wait_for("a conflict", SOON, || {
        broker
            .report()
            .filter(|report| report.problem.starts_with("conflict: "))
    });
    assert!(report.problem.contains("01-sluice.conflist"), "{report:?}");
}

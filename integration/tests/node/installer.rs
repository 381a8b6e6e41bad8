//! What the installer writes is what the plugin takes: both real, with the real executor and broker behind them.

use serde_json::{Value, json};
use sluice_integration::adds::mesh_with;
use sluice_integration::manifests::PodOptions;
use sluice_integration::mesh::{Mesh, MeshOptions, NETWORK};
use sluice_integration::scene::PATIENCE;
use sluice_proto::pb::workload::PodState;
use sluice_testkit::cni::{Attachment, Chain};
use sluice_testkit::process::{binary, text};

const PRIMARY: &str = r#"{"cniVersion":"1.1.0","name":"podnet","plugins":[{"type":"bridge"}]}"#;

/// The entry that the installer would write on this node with these settings, taken from its plan.
fn entry(mesh: &Mesh, selection: &str, settings: &[&str]) -> Value {
    let root = mesh.node().dir().join("installer");
    let (net, bin) = (root.join("net.d"), root.join("bin"));
    for directory in [&net, &bin] {
        std::fs::create_dir_all(directory).unwrap();
    }
    let file = root.join("selection.yaml");
    std::fs::write(&file, selection).unwrap();
    std::fs::write(net.join("10-podnet.conflist"), PRIMARY).unwrap();
    std::fs::write(bin.join("bridge"), "").unwrap();
    let plugin = binary("sluice-cni").unwrap();
    let path = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let mut args = vec!["plan".to_owned(), "--selection".to_owned(), path(&file)];
    for (flag, value) in [
        ("--run-dir", mesh.run.root()),
        ("--cni-net-dir", &net),
        ("--cni-bin-dir", &bin),
        ("--source-dir", plugin.parent().unwrap()),
    ] {
        args.extend([flag.to_owned(), path(value)]);
    }
    args.extend(settings.iter().map(ToString::to_string));
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let installer = path(&binary("installer").unwrap());
    let plan = text(mesh.node().place(), &installer, &args, b"").unwrap();
    let added: String = plan
        .lines()
        .filter(|line| !line.starts_with("+++"))
        .filter_map(|line| line.strip_prefix('+'))
        .collect();
    let list: Value = serde_json::from_str(&added).unwrap_or_else(|error| panic!("{error}: {plan}"));
    let plugins = list["plugins"].as_array().unwrap();
    assert_eq!(plugins[0], json!({"type": "bridge"}));
    plugins[1].clone()
}

fn chain(mesh: &Mesh, entry: Value) -> Chain {
    let plugin = binary("sluice-cni").unwrap();
    Chain::new(mesh.node().place(), NETWORK, "1.1.0", vec![entry]).bin_dir(plugin.parent().unwrap())
}

#[test]
fn a_pod_is_enrolled_through_the_entry_that_the_installer_writes() {
    let mesh = mesh_with(MeshOptions::default()).unwrap();
    let chain = chain(
        &mesh,
        entry(&mesh, "# the defaults, as the broker has them\n", &[]),
    );
    let pod = mesh.node().pod("web").create().unwrap();
    mesh.manifests.pod(&pod, &PodOptions::default()).unwrap();
    let result = pod.prev_result("1.1.0");
    chain
        .add(&Attachment::from(&pod), Some(&result))
        .unwrap()
        .ok()
        .unwrap();
    mesh.wait_state(&pod, PodState::Enrolled, PATIENCE).unwrap();
    chain
        .del(&Attachment::from(&pod), Some(&result))
        .unwrap()
        .ok()
        .unwrap();
}

#[test]
fn every_setting_of_the_installer_is_one_that_the_plugin_knows() {
    let mesh = mesh_with(MeshOptions::default()).unwrap();
    let selection = "enablementSelectors:
- podSelector: {matchExpressions: [{key: a/b, operator: In, values: [c]}]}
- namespaceSelector: {matchLabels: {d: e}}
excludedNamespaces: [kube-system, other]
systemNamespace: mesh
ownPods: {namespace: sluice-system, daemonSet: sluice-node}
dnsCapture: false
ipv6: false
";
    let settings = [
        "--plugin-log-level",
        "debug",
        "--static-pods",
        "refuse",
        "--gate-node",
        "--ifname",
        "eth1",
        "--kubeconfig",
        "/var/lib/sluice/kubeconfig",
    ];
    let entry = entry(&mesh, selection, &settings);
    for key in [
        "runDir",
        "logLevel",
        "staticPods",
        "status",
        "ifname",
        "kubeconfig",
        "selection",
    ] {
        assert!(entry.get(key).is_some(), "{key} is not written: {entry}");
    }
    // GC reads every key, and refuses one that it does not know or whose value is wrong.
    chain(&mesh, entry.clone()).gc(&[]).unwrap().ok().unwrap();
    let mut unknown = entry;
    unknown["surprise"] = json!(1);
    assert!(chain(&mesh, unknown).gc(&[]).unwrap().ok().is_err());
}

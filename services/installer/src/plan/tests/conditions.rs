//! What must hold before our entry is installed.

use std::collections::BTreeSet;

use super::*;

#[test]
fn an_entry_is_installed_once_pods_can_be_served_and_then_kept_right() {
    let mut node = given(&[], &[("10-podnet.conflist", PTP)]);
    node.not_serving = Some("no executor");
    let plan = node.plan();
    assert_eq!(plan.steps, []);
    assert!(problems(&plan).ends_with("no executor"));
    node.not_serving = None;
    node.settle();
    node.not_serving = Some("no executor");
    let changed = r#"{"cniVersion":"1.0.0","name":"podnet","plugins":[{"type":"ptp","mtu":1400}]}"#;
    node.net
        .files
        .append(&mut net(&[("10-podnet.conflist", changed)]).files);
    let plan = node.settle();
    assert!(node.text("02-sluice.conflist").contains("1400"));
    assert!(problems(&plan).ends_with("no executor"), "not ready all the same");
}

#[test]
fn a_version_that_our_plugin_does_not_speak_keeps_it_out() {
    for version in [
        r#""cniVersion":"0.2.0","#,
        "",
        r#""cniVersion":"2.0.0","cniVersions":["9.9.9"],"#,
    ] {
        let text = format!(r#"{{{version}"name":"n","plugins":[{{"type":"ptp"}}]}}"#);
        let plan = given(&[], &[("10-podnet.conflist", &text)]).plan();
        assert_eq!(plan.steps, []);
        assert!(
            problems(&plan).contains("our plugin speaks 0.3.1, 0.4.0, 1.0.0, 1.1.0"),
            "{}",
            problems(&plan)
        );
    }
    let text = r#"{"cniVersion":"0.2.0","cniVersions":["1.1.0"],"name":"n","plugins":[{"type":"ptp"}]}"#;
    assert_eq!(
        problems(&given(&[], &[("10-podnet.conflist", text)]).settle()),
        ""
    );
}

#[test]
fn a_plugin_directory_without_the_primarys_plugin_is_the_wrong_one() {
    let mut node = given(&[], &[("10-podnet.conflist", PTP)]);
    node.bins[0].names = BTreeSet::new();
    let plan = node.plan();
    assert_eq!(plan.steps, []);
    let text = problems(&plan);
    assert!(
        text.contains("ptp") && text.contains("/opt/cni/bin") && text.contains("--bin-dir-check"),
        "{text}"
    );

    let mut node = given(&["--bin-dir-check", "warn"], &[("10-podnet.conflist", PTP)]);
    node.bins[0].names = BTreeSet::new();
    let plan = node.settle();
    assert_eq!(problems(&plan), "");
    assert!(plan.notes[0].starts_with("bin-dir-not-searched"));
}

#[test]
fn the_directories_that_the_runtime_names_are_the_right_ones() {
    let runtime = |plugins: &[&str], configurations: Option<&str>| {
        vec![Ok(RuntimeDirs {
            file: "/host/etc/containerd/config.toml".into(),
            plugins: plugins.iter().map(PathBuf::from).collect(),
            configurations: configurations.map(PathBuf::from),
        })]
    };
    let mut node = given(&[], &[("10-podnet.conflist", PTP)]);
    node.runtimes = runtime(&["/var/lib/k3s/bin"], None);
    let plan = node.plan();
    assert_eq!(plan.steps, []);
    let text = problems(&plan);
    assert!(
        text.contains("/opt/cni/bin") && text.contains("/var/lib/k3s/bin") && text.contains("config.toml"),
        "{text}"
    );

    node.runtimes = runtime(&["/opt/cni/bin"], Some("/var/lib/k3s/net.d"));
    let plan = node.plan();
    assert_eq!(plan.steps, []);
    let text = problems(&plan);
    assert!(
        text.contains("/etc/cni/net.d") && text.contains("/var/lib/k3s/net.d"),
        "{text}"
    );

    // What it says counts more than where the primary's plugin is.
    node.runtimes = runtime(&["/usr/lib/cni", "/opt/cni/bin"], Some("/etc/cni/net.d"));
    node.bins[0].names = BTreeSet::new();
    assert_eq!(problems(&node.settle()), "");

    let mut node = given(&["--bin-dir-check", "warn"], &[("10-podnet.conflist", PTP)]);
    node.runtimes = runtime(&["/var/lib/k3s/bin"], None);
    node.runtimes.push(Err("crio.conf is not TOML".into()));
    let plan = node.settle();
    assert_eq!(problems(&plan), "");
    let notes = plan.notes.join("\n");
    assert!(
        notes.contains("/var/lib/k3s/bin") && notes.contains("crio.conf"),
        "{notes}"
    );
}

#[test]
fn the_plugin_comes_before_whatever_names_it() {
    let mut node = given(&[], &[("10-podnet.conflist", PTP)]);
    node.bins[0].ours = Ok(Binary::Missing);
    let plan = node.plan();
    assert!(
        matches!(
            plan.steps.as_slice(),
            [Step::InstallBinary(0), Step::Write { .. }]
        ),
        "{plan:?}"
    );
    node.bins[0].ours = Err("EACCES".into());
    let plan = node.plan();
    assert_eq!(
        plan.steps,
        [],
        "a directory that cannot be read may lack the plugin"
    );
}

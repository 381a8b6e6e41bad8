use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use clap::Parser;

use super::*;
use crate::config::Cli;
use crate::entry::tests::plain;
use crate::node::File;

const OURS: &str = r#"{"type":"sluice-cni","runDir":"/run/sluice","logLevel":"warn"}"#;
const PTP: &str = r#"{"cniVersion":"1.0.0","name":"podnet","plugins":[{"type":"ptp"}]}"#;
const WITH_ISTIO: &str =
    r#"{"cniVersion":"1.0.0","name":"podnet","plugins":[{"type":"ptp"},{"type":"istio-cni"}]}"#;

fn ptp_and_ours() -> String {
    format!(r#"{{"cniVersion":"1.0.0","name":"podnet","plugins":[{{"type":"ptp"}},{OURS}]}}"#)
}

/// A node where everything that a test does not say is as it should be.
struct Given {
    flags: Flags,
    net: NetDir,
    bins: Vec<BinDir>,
    runtimes: Vec<Result<RuntimeDirs, String>>,
    not_serving: Option<&'static str>,
    primary_gone: Duration,
}

fn given(args: &[&str], files: &[(&str, &str)]) -> Given {
    let arguments = [["installer", "--require-kubeconfig", "false"].as_slice(), args].concat();
    let names = ["ptp", "portmap", "macvlan", "other", "multus"];
    Given {
        flags: Cli::try_parse_from(arguments).unwrap().flags,
        net: net(files),
        bins: vec![BinDir {
            host: PathBuf::from("/opt/cni/bin"),
            ours: Ok(Binary::Current),
            names: names.map(str::to_owned).into_iter().collect(),
        }],
        runtimes: Vec::new(),
        not_serving: None,
        primary_gone: Duration::ZERO,
    }
}

fn net(files: &[(&str, &str)]) -> NetDir {
    let mut net = NetDir::default();
    for (name, text) in files {
        let file = File {
            content: Ok(text.as_bytes().to_vec()),
            mode: if name.ends_with("-sluice.conflist") {
                0o600
            } else {
                0o644
            },
            uid: rustix::process::geteuid().as_raw(),
            link: false,
        };
        match name.split_once('/') {
            Some((network, name)) => {
                let files: &mut BTreeMap<_, _> = net.drop_ins.entry(network.to_owned()).or_default();
                files.insert(name.to_owned(), file);
            }
            None => {
                net.files.insert((*name).to_owned(), file);
            }
        }
    }
    net
}

impl Given {
    fn plan(&self) -> Plan {
        plan_install(&Situation {
            flags: &self.flags,
            entry: &plain(),
            net: &self.net,
            bins: &self.bins,
            runtimes: &self.runtimes,
            kubeconfig: &Kubeconfig::Missing,
            credentials: None,
            not_serving: self.not_serving,
            primary_gone: self.primary_gone,
        })
    }

    /// Plans and does it, as far as files are concerned, until nothing is left to do; gives the last plan.
    fn settle(&mut self) -> Plan {
        for _ in 0..4 {
            let plan = self.plan();
            if plan.steps.is_empty() {
                return plan;
            }
            for step in plan.steps {
                self.perform(step);
            }
        }
        panic!("it never ends: {:?}", self.plan());
    }

    fn perform(&mut self, step: Step) {
        match step {
            Step::Write {
                name, content, mode, ..
            } => {
                let text = String::from_utf8(content).unwrap();
                let mut made = net(&[(name.as_str(), text.as_str())]);
                if let (FileMode::Exactly(mode), Some(file)) = (mode, made.files.get_mut(&name)) {
                    file.mode = mode;
                }
                self.net.files.append(&mut made.files);
                for (network, mut files) in made.drop_ins {
                    self.net.drop_ins.entry(network).or_default().append(&mut files);
                }
            }
            Step::Delete { name, .. } => match name.split_once('/') {
                Some((network, name)) => {
                    drop(self.net.drop_ins.get_mut(network).unwrap().remove(name).unwrap());
                }
                None => drop(self.net.files.remove(&name).unwrap()),
            },
            other => panic!("{other:?}"),
        }
    }

    fn text(&self, name: &str) -> &str {
        std::str::from_utf8(self.net.files[name].bytes().unwrap()).unwrap()
    }

    fn names(&self) -> Vec<&str> {
        self.net.files.keys().map(String::as_str).collect()
    }
}

fn problems(plan: &Plan) -> String {
    let texts: Vec<String> = plan.problems.iter().map(ToString::to_string).collect();
    texts.join("; ")
}

#[test]
fn our_file_is_a_copy_of_the_primary_with_our_entry() {
    let mut node = given(&[], &[("10-podnet.conflist", PTP)]);
    let plan = node.settle();
    assert_eq!(problems(&plan), "");
    assert_eq!(plan.effective.as_deref(), Some("02-sluice.conflist"));
    assert_eq!(plan.primary.as_deref(), Some("10-podnet.conflist"));
    assert_eq!(node.text("02-sluice.conflist"), ptp_and_ours());
    assert_eq!(node.text("10-podnet.conflist"), PTP);
    assert_eq!(node.net.files["02-sluice.conflist"].mode, 0o600);
}

#[test]
fn any_change_of_the_primary_is_followed() {
    let mut node = given(&[], &[("10-podnet.conflist", PTP)]);
    node.settle();
    for changed in [
        r#"{"cniVersion":"1.0.0","name":"podnet","plugins":[{"type":"ptp","mtu":1400}]}"#,
        r#"{"cniVersion":"1.0.0","name":"podnet","plugins":[{"type":"ptp","mtu":1400},{"type":"portmap"}]}"#,
        r#"{"cniVersion":"0.4.0","name":"other","plugins":[{"type":"ptp"}]}"#,
    ] {
        node.net
            .files
            .append(&mut net(&[("10-podnet.conflist", changed)]).files);
        node.settle();
        assert!(
            node.text("02-sluice.conflist")
                .starts_with(&changed[..changed.len() - 2]),
            "{changed}"
        );
    }
}

#[test]
fn a_single_plugin_is_copied_as_a_list_and_not_renamed() {
    let text = r#"{"cniVersion":"1.0.0","name":"edge","type":"macvlan"}"#;
    let mut node = given(&[], &[("05-edge.conf", text)]);
    assert_eq!(problems(&node.settle()), "");
    assert_eq!(node.names(), ["02-sluice.conflist", "05-edge.conf"]);
    assert_eq!(node.text("05-edge.conf"), text);
    assert!(node.text("02-sluice.conflist").contains("\"name\": \"edge\""));
}

#[test]
fn group_may_read_our_file_on_request() {
    let mut node = given(
        &["--group-read"],
        &[
            ("10-podnet.conflist", PTP),
            ("02-sluice.conflist", &ptp_and_ours()),
        ],
    );
    node.settle();
    assert_eq!(node.net.files["02-sluice.conflist"].mode, 0o640);
}

#[test]
fn an_edited_file_keeps_its_name_and_mode() {
    let mut node = given(&["--mode", "chained"], &[("10-podnet.conflist", PTP)]);
    let plan = node.plan();
    let [Step::Write { mode, expect, .. }] = plan.steps.as_slice() else {
        panic!("{plan:?}")
    };
    assert_eq!((*mode, expect.as_deref()), (FileMode::Kept, Some(PTP.as_bytes())));
    let plan = node.settle();
    assert_eq!(plan.effective.as_deref(), Some("10-podnet.conflist"));
    assert_eq!(node.text("10-podnet.conflist"), ptp_and_ours());
    assert_eq!(node.names(), ["10-podnet.conflist"]);
}

#[test]
fn an_edited_single_plugin_becomes_a_list_before_its_old_file_goes() {
    let text = r#"{"cniVersion":"1.0.0","name":"edge","type":"macvlan"}"#;
    let mut node = given(
        &["--mode", "chained"],
        &[("05-edge.conf", text), ("05-edge.conflist", PTP)],
    );
    let plan = node.plan();
    assert!(
        matches!(plan.steps.as_slice(), [
            Step::Write { name: list, mode: FileMode::Exactly(0o644), .. },
            Step::Delete { name: conf, expect: Some(_) },
        ] if list == "05-edge.conflist" && conf == "05-edge.conf"),
        "{plan:?}"
    );
    assert_eq!(problems(&node.settle()), "");
    assert_eq!(node.names(), ["05-edge.conflist"]);
}

#[test]
fn a_list_without_inline_plugins_gets_a_file_of_ours_after_its_own() {
    let files = [
        ("10-podnet.conflist", r#"{"cniVersion":"1.1.0","name":"podnet"}"#),
        ("podnet/10-ptp.conf", r#"{"type":"ptp"}"#),
    ];
    let mut node = given(&["--mode", "chained"], &files);
    let plan = node.settle();
    assert_eq!(
        (problems(&plan).as_str(), plan.effective.as_deref()),
        ("", Some("10-podnet.conflist"))
    );
    assert_eq!(node.text("10-podnet.conflist"), files[0].1);
    assert!(node.net.drop_ins["podnet"].contains_key("zz-sluice-cni.conf"));

    let mut node = given(&[], &files);
    assert_eq!(problems(&node.settle()), "");
    let list = node.net.load("02-sluice.conflist").unwrap();
    assert_eq!(list.kinds(), ["ptp", "sluice-cni"]);
    assert!(
        list.drop_ins.is_empty(),
        "the files are not appended after our entry"
    );
}

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
fn neighbours_that_are_no_configurations_are_passed_over_and_named() {
    let mut node = given(
        &[],
        &[
            ("00-a.conf", "not json"),
            ("01-b.conflist", r#"{"plugins":[{"type":"x"}]}"#),
            ("03-c.conflist", r#"{"name":"c","plugin":[]}"#),
            ("04-d.conf", r#"{"name":"d"}"#),
            ("05-e.CONF", PTP),
            ("10-podnet.conflist", PTP),
        ],
    );
    let plan = node.settle();
    assert_eq!(problems(&plan), "");
    assert_eq!(plan.primary.as_deref(), Some("10-podnet.conflist"));
    let notes = plan.notes.join("\n");
    assert!(
        notes.contains("00-a.conf") && notes.contains("01-b.conflist") && !notes.contains("03-c"),
        "{notes}"
    );
}

#[test]
fn without_a_primary_it_is_waited_for() {
    let plan = given(&[], &[("10-a.conflist", "{}")]).plan();
    assert_eq!(plan.steps, []);
    let text = problems(&plan);
    assert!(
        text.starts_with("no-primary: /etc/cni/net.d") && text.contains("10-a.conflist"),
        "{text}"
    );
}

#[test]
fn a_copy_outlives_its_primary_for_a_grace_only() {
    let mut node = given(&[], &[("02-sluice.conflist", &ptp_and_ours())]);
    let plan = node.plan();
    assert!(plan.steps.is_empty() && plan.primary_gone);
    node.primary_gone = Duration::from_secs(10);
    node.settle();
    assert_eq!(node.names(), Vec::<&str>::new());

    // Somebody is writing the primary's file.
    let mut node = given(
        &[],
        &[
            ("02-sluice.conflist", &ptp_and_ours()),
            ("10-podnet.conflist", "{\"na"),
        ],
    );
    node.primary_gone = Duration::from_secs(10);
    let plan = node.plan();
    assert!(plan.steps.is_empty() && !plan.primary_gone);
}

#[test]
fn another_primary_is_followed_when_the_first_one_goes() {
    let other = r#"{"cniVersion":"1.0.0","name":"other","plugins":[{"type":"other"}]}"#;
    let mut node = given(&[], &[("10-podnet.conflist", PTP), ("20-other.conflist", other)]);
    node.settle();
    node.net.files.remove("10-podnet.conflist");
    assert_eq!(node.settle().primary.as_deref(), Some("20-other.conflist"));
    assert!(node.text("02-sluice.conflist").contains("\"other\""));
}

#[test]
fn a_named_primary_may_have_the_other_extension_or_any() {
    for (named, is) in [
        ("10-podnet.conf", "10-podnet.conflist"),
        ("10-podnet.conflist", "10-podnet.conf"),
        ("x.file", "x.file"),
    ] {
        let text = if is == "10-podnet.conf" {
            r#"{"cniVersion":"1.0.0","type":"ptp"}"#
        } else {
            PTP
        };
        let mut node = given(&["--primary", named], &[("05-first.conflist", PTP)]);
        node.net.files.append(&mut net(&[(is, text)]).files);
        let plan = node.settle();
        assert_eq!(
            (plan.primary.as_deref(), problems(&plan).as_str()),
            (Some(is), "")
        );
    }
    let plan = given(&["--primary", "absent.conflist"], &[("05-first.conflist", PTP)]).plan();
    assert!(plan.steps.is_empty() && problems(&plan).contains("absent.conflist cannot be used"));
}

#[test]
fn a_file_that_the_runtime_prefers_is_told_and_not_fought() {
    for newcomer in ["000-other.conflist", "000-other.json"] {
        let text = if newcomer.ends_with("json") {
            r#"{"type":"other"}"#
        } else {
            PTP
        };
        let mut node = given(&[], &[("10-podnet.conflist", PTP)]);
        node.settle();
        node.net.files.append(&mut net(&[(newcomer, text)]).files);
        let plan = node.plan();
        assert_eq!(plan.steps, [], "{newcomer}");
        assert!(
            problems(&plan).starts_with(&format!("not-first-in-cni-dir: {newcomer}")),
            "{}",
            problems(&plan)
        );
        assert_eq!(plan.effective, None);
        assert_eq!(plan.primary.as_deref(), Some("10-podnet.conflist"));
    }
}

#[test]
fn a_preferred_file_takes_our_entry_on_request() {
    let mut node = given(
        &["--when-preempted", "chain"],
        &[("10-podnet.conflist", PTP), ("000-other.conflist", PTP)],
    );
    let plan = node.settle();
    assert_eq!(
        (problems(&plan).as_str(), plan.effective.as_deref()),
        ("", Some("000-other.conflist"))
    );
    let mut node = given(
        &["--mode", "chained"],
        &[
            ("10-podnet.conflist", &ptp_and_ours()),
            ("000-other.conflist", PTP),
        ],
    );
    let plan = node.settle();
    assert_eq!(
        (problems(&plan).as_str(), plan.effective.as_deref()),
        ("", Some("000-other.conflist"))
    );
}

#[test]
fn a_file_that_hands_over_to_ours_may_come_first() {
    let nested = format!(
        r#"{{"type":"multus","name":"m","delegates":[{{"name":"podnet","plugins":[{{"type":"ptp"}},{OURS}]}}]}}"#
    );
    let named = r#"{"type":"multus","name":"m","clusterNetwork":"/host/etc/cni/net.d/02-sluice.conflist"}"#;
    for text in [nested.as_str(), named] {
        let mut node = given(&[], &[("10-podnet.conflist", PTP), ("00-multus.conf", text)]);
        let plan = node.settle();
        assert_eq!(problems(&plan), "");
        assert_eq!(plan.primary.as_deref(), Some("10-podnet.conflist"));
        assert!(plan.notes[0].contains("00-multus.conf"), "{:?}", plan.notes);
    }
}

#[test]
fn never_are_two_meshes_in_a_chain() {
    for mode in ["owned", "chained"] {
        let node = given(&["--mode", mode], &[("10-podnet.conflist", WITH_ISTIO)]);
        let plan = node.plan();
        assert_eq!(plan.steps, []);
        assert!(problems(&plan).starts_with("another-mesh: 10-podnet.conflist"));

        let mut node = given(
            &["--mode", mode, "--take-over"],
            &[("10-podnet.conflist", WITH_ISTIO)],
        );
        let plan = node.settle();
        assert_eq!(problems(&plan), "");
        let effective = plan.effective.unwrap();
        assert_eq!(node.net.load(&effective).unwrap().kinds(), ["ptp", "sluice-cni"]);
        // The way back from owned mode: the primary has kept the entry.
        assert_eq!(
            node.text("10-podnet.conflist").contains("istio-cni"),
            mode == "owned"
        );
    }
}

#[test]
fn the_other_agents_own_file_does_not_come_first() {
    let mut node = given(
        &["--take-over"],
        &[("10-podnet.conflist", PTP), ("02-istio-cni.conflist", WITH_ISTIO)],
    );
    let plan = node.settle();
    assert_eq!(
        (problems(&plan).as_str(), plan.effective.as_deref()),
        ("", Some("01-sluice.conflist"))
    );
    node.net.files.remove("02-istio-cni.conflist");
    assert_eq!(node.settle().primary.as_deref(), Some("10-podnet.conflist"));
}

#[test]
fn files_of_ours_from_other_settings_go_after_the_new_one_is_there() {
    let ours = ptp_and_ours();
    for mode in ["owned", "chained"] {
        let mut node = given(
            &["--mode", mode, "--owned-name", "03-sluice.conflist"],
            &[("02-sluice.conflist", &ours), ("10-podnet.conflist", PTP)],
        );
        let plan = node.plan();
        assert!(
            matches!(plan.steps.as_slice(), [Step::Write { .. }, Step::Delete { name, .. }] if name == "02-sluice.conflist"),
            "{plan:?}"
        );
        let plan = node.settle();
        assert_eq!(problems(&plan), "");
        assert!(plan.effective.is_some());
    }
}

#[test]
fn a_file_of_ours_that_was_set_aside_does_not_come_back_one_day() {
    let ours = ptp_and_ours();
    let files = [
        ("02-sluice.conflist.cilium_bak", ours.as_str()),
        ("10-podnet.conflist", PTP),
    ];
    let mut node = given(&[], &files);
    assert_eq!(problems(&node.settle()), "");
    assert_eq!(node.names(), ["02-sluice.conflist", "10-podnet.conflist"]);
    assert_eq!(removal(&files).0.names(), ["10-podnet.conflist"]);
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

#[test]
fn files_that_an_edit_could_not_keep_as_they_are_are_not_edited() {
    let mut node = given(&["--mode", "chained"], &[("10-podnet.conflist", PTP)]);
    node.net.files.get_mut("10-podnet.conflist").unwrap().link = true;
    let plan = node.plan();
    assert!(plan.steps.is_empty() && problems(&plan).contains("symbolic link"));
    let file = node.net.files.get_mut("10-podnet.conflist").unwrap();
    (file.link, file.uid) = (false, 1000);
    let plan = node.plan();
    assert!(plan.steps.is_empty() && problems(&plan).contains("belongs to uid 1000"));
}

fn removal(files: &[(&str, &str)]) -> (Given, Plan) {
    let mut node = given(&[], files);
    let plan = plan_removal(&node.net, &node.bins, &Kubeconfig::Present(Vec::new(), 0o600));
    for step in plan.steps.iter().filter(|step| step.is_config()) {
        node.perform(step.clone());
    }
    (node, plan)
}

#[test]
fn a_removal_cleans_every_file_then_the_credentials_then_the_plugin() {
    let ours = ptp_and_ours();
    let alone = format!(r#"{{"name":"n","plugins":[{OURS}]}}"#);
    let files = [
        ("02-sluice.conflist", ours.as_str()),
        ("05-edited.conflist", ours.as_str()),
        ("06-alone.conflist", alone.as_str()),
        ("10-podnet.conflist", PTP),
        ("podnet/10-ptp.conf", r#"{"type":"ptp"}"#),
        ("podnet/zz-sluice-cni.conf", OURS),
        ("99-list.conf", ours.as_str()),
    ];
    let (node, plan) = removal(&files);
    assert_eq!(problems(&plan), "");
    assert_eq!(
        node.names(),
        ["05-edited.conflist", "10-podnet.conflist", "99-list.conf"]
    );
    assert_eq!(node.text("05-edited.conflist"), PTP);
    assert_eq!(node.text("99-list.conf"), PTP);
    assert_eq!(node.net.drop_ins["podnet"].len(), 1);
    let last: Vec<&Step> = plan.steps.iter().skip_while(|step| step.is_config()).collect();
    assert_eq!(last, [&Step::DeleteKubeconfig, &Step::RetireBinary(0)]);
}

#[test]
fn the_plugin_stays_while_a_file_names_it_that_cannot_be_cleaned() {
    let (_, plan) = removal(&[(
        "10-podnet.conflist",
        r#"{"name":"n","plugins":[{"type":"sluice-cni"}"#,
    )]);
    assert!(problems(&plan).contains("10-podnet.conflist names our plugin"));
    assert_eq!(plan.steps, [Step::DeleteKubeconfig]);
}

#[test]
fn a_removal_of_nothing_does_nothing_to_the_configurations() {
    let (node, plan) = removal(&[
        ("10-podnet.conflist", PTP),
        ("x.conf", r#"{"type":"ptp","note":"sluice-cni"}"#),
    ]);
    assert_eq!(plan.steps, [Step::DeleteKubeconfig, Step::RetireBinary(0)]);
    assert_eq!(node.text("10-podnet.conflist"), PTP);
}

//! What happens on the node while the installer runs, and what it makes of it.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::support::{Node, OWNED, PODNET, Reader, SOON, effective, wait_for};

const FAST: Duration = Duration::from_secs(1);

fn list(mtu: u32, version: &str, extra: &str) -> String {
    format!(
        r#"{{"cniVersion":"{version}","name":"podnet","plugins":[{{"type":"ptp","mtu":{mtu}}},{{"type":"portmap"}}{extra}]}}"#
    )
}

#[test]
fn our_copy_follows_its_primary_within_a_second_and_is_whole_at_every_instant() {
    let node = Node::new();
    let broker = node.broker();
    let _installer = node.start_ready();
    let reader = Reader::start(&node.net);
    for (text, sign) in [
        (list(1400, "0.4.0", ""), "\"mtu\":1400"),
        (list(1400, "0.4.0", r#",{"type":"bridge"}"#), "bridge"),
        (list(1400, "1.0.0", ""), "1.0.0"),
    ] {
        node.primary("10-podnet.conflist", &text);
        wait_for(sign, FAST, || node.read(OWNED).filter(|text| text.contains(sign)));
        assert_eq!(node.chain().last().unwrap(), "sluice-cni");
    }
    // A primary that writes into its file instead of replacing it.
    fs::write(node.net.join("10-podnet.conflist"), list(1300, "1.0.0", "")).unwrap();
    wait_for("1300", FAST, || {
        node.read(OWNED).filter(|text| text.contains("1300"))
    });
    reader.assert_always_ours();
    node.wait_ready();
    // Following is no repair of somebody else's damage, but ours to do: readiness never went.
    assert!(broker.report().unwrap().ready);
}

#[test]
fn a_primary_that_comes_later_is_waited_for() {
    let node = Node::new();
    fs::remove_file(node.net.join("10-podnet.conflist")).unwrap();
    let broker = node.broker();
    let mut installer = node.start();
    node.wait_health("no-primary: /etc/cni/net.d", SOON);
    node.primary("10-podnet.conflist", PODNET);
    wait_for("our file", FAST, || node.read(OWNED));
    node.wait_ready();
    installer.terminate();
    installer.kill();

    fs::remove_file(node.net.join("10-podnet.conflist")).unwrap();
    fs::remove_file(node.net.join(OWNED)).unwrap();
    let mut installer = node.start();
    node.wait_health("no-primary", SOON);
    installer.terminate();
    // No broker's last word comes; waiting for a primary must not hold anything up.
    drop(broker);
    assert!(installer.wait(Duration::from_secs(8)).success());
}

#[test]
fn a_copy_goes_when_its_primary_stays_away() {
    let node = Node::new().args(&["--primary-grace-seconds", "2"]);
    let _broker = node.broker();
    let _installer = node.start_ready();
    let away = node.net.join("10-podnet.conflist.away");
    let primary = node.net.join("10-podnet.conflist");
    // Replaced in two steps, as some do.
    fs::rename(&primary, &away).unwrap();
    node.wait_health("no-primary", FAST);
    assert!(node.read(OWNED).is_some());
    fs::rename(&away, &primary).unwrap();
    node.wait_ready();
    fs::rename(&primary, &away).unwrap();
    wait_for("our copy is gone", Duration::from_secs(5), || {
        node.read(OWNED).is_none().then_some(())
    });
    node.wait_health("no-primary", FAST);
    fs::rename(&away, &primary).unwrap();
    wait_for("our copy is back", FAST, || node.read(OWNED));
}

#[test]
fn what_somebody_damages_is_put_right() {
    let node = Node::new();
    let broker = node.broker();
    let _installer = node.start_ready();
    let plugin = fs::read(node.image().join("sluice-cni")).unwrap();
    let kubeconfig = fs::read(node.run.kubeconfig()).unwrap();
    let two = Duration::from_secs(2);

    fs::remove_file(node.net.join(OWNED)).unwrap();
    wait_for("our file", two, || node.read(OWNED));
    fs::write(node.net.join(OWNED), "{}").unwrap();
    wait_for("our file", two, || {
        node.read(OWNED).filter(|text| text.contains("sluice-cni"))
    });
    fs::set_permissions(node.net.join(OWNED), fs::Permissions::from_mode(0o666)).unwrap();
    let mode = |path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    wait_for("mode of our file", two, || {
        (mode(node.net.join(OWNED)) == 0o600).then_some(())
    });

    fs::remove_file(node.installed()).unwrap();
    wait_for("the plugin", two, || {
        fs::read(node.installed()).ok().filter(|bytes| *bytes == plugin)
    });
    // Another program under its name, and the same length.
    let other = vec![b'#'; plugin.len()];
    fs::write(node.bin.join("new"), &other).unwrap();
    fs::rename(node.bin.join("new"), node.installed()).unwrap();
    wait_for("the plugin", two, || {
        fs::read(node.installed()).ok().filter(|bytes| *bytes == plugin)
    });
    fs::set_permissions(node.installed(), fs::Permissions::from_mode(0o644)).unwrap();
    wait_for("mode of the plugin", two, || {
        (mode(node.installed()) == 0o755).then_some(())
    });

    fs::write(node.run.kubeconfig(), "x").unwrap();
    wait_for("the kubeconfig", two, || {
        fs::read(node.run.kubeconfig())
            .ok()
            .filter(|bytes| *bytes == kubeconfig)
    });
    node.wait_ready();
    let report = wait_for("repairs", SOON, || {
        broker
            .report()
            .filter(|report| report.ready && report.repairs >= 6)
    });
    assert_eq!(report.problem, "");
}

#[test]
fn noise_in_the_directory_changes_nothing() {
    let node = Node::new();
    let _broker = node.broker();
    let _installer = node.start_ready();
    let before = fs::metadata(node.net.join(OWNED)).unwrap().modified().unwrap();
    for number in 0..30 {
        fs::write(node.net.join(format!("noise-{number}.txt")), "x").unwrap();
        fs::write(
            node.net.join("zz-unrelated.conf"),
            format!(r#"{{"type":"x{number}"}}"#),
        )
        .unwrap();
        assert_eq!(node.health(), "ready");
    }
    assert_eq!(
        fs::metadata(node.net.join(OWNED)).unwrap().modified().unwrap(),
        before
    );
}

#[test]
fn a_newcomer_that_sorts_first_is_told_within_two_seconds_and_not_fought() {
    let node = Node::new();
    let broker = node.broker();
    let _installer = node.start_ready();
    let before = fs::metadata(node.net.join(OWNED)).unwrap().modified().unwrap();
    let newcomer = r#"{"cniVersion":"1.0.0","name":"other","plugins":[{"type":"bridge"}]}"#;
    node.primary("000-other.conflist", newcomer);
    let report = wait_for("a report", Duration::from_secs(2), || {
        broker.report().filter(|report| !report.ready)
    });
    assert!(
        report
            .problem
            .starts_with("not-first-in-cni-dir: 000-other.conflist"),
        "{}",
        report.problem
    );
    assert_eq!(report.effective_file, "");
    assert!(node.health().contains("not-first-in-cni-dir: 000-other.conflist"));
    assert_eq!(node.read("000-other.conflist").unwrap(), newcomer);
    assert_eq!(
        fs::metadata(node.net.join(OWNED)).unwrap().modified().unwrap(),
        before
    );
    fs::remove_file(node.net.join("000-other.conflist")).unwrap();
    node.wait_ready();
}

#[test]
fn a_newcomer_takes_our_entry_where_that_is_asked_for() {
    let node = Node::new().args(&["--when-preempted", "chain"]);
    let _broker = node.broker();
    let _installer = node.start_ready();
    node.primary(
        "000-other.conf",
        r#"{"cniVersion":"1.0.0","name":"other","type":"bridge"}"#,
    );
    wait_for("our entry", Duration::from_secs(2), || {
        effective(&node.net)
            .ok()
            .filter(|(name, _)| name == "000-other.conflist")
    });
    assert_eq!(node.chain(), ["bridge", "sluice-cni"]);
    assert!(!node.names().contains(&"000-other.conf".to_owned()));
    node.wait_ready();
}

#[test]
fn an_edited_file_gets_its_entry_back_and_keeps_mode_and_neighbours() {
    let node = Node::new().args(&["--mode", "chained"]);
    let _broker = node.broker();
    let mut installer = node.start_ready();
    assert_eq!(node.names(), ["10-podnet.conflist"]);
    node.primary("10-podnet.conflist", PODNET);
    wait_for("our entry", Duration::from_secs(2), || {
        node.read("10-podnet.conflist")
            .filter(|text| text.contains("sluice-cni"))
    });
    assert_eq!(node.chain(), ["ptp", "portmap", "sluice-cni"]);
    let mode = fs::metadata(node.net.join("10-podnet.conflist"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o7777, 0o644);
    // The first one always counts: a newcomer gets the entry, too.
    node.primary("05-new.conflist", PODNET);
    wait_for("our entry", Duration::from_secs(2), || {
        node.read("05-new.conflist")
            .filter(|text| text.contains("sluice-cni"))
    });
    node.wait_ready();
    let output = node.once("uninstall", &[]);
    let refused = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && refused.contains("an installer runs on this node"),
        "{refused}"
    );
    installer.kill();
    assert!(node.once("uninstall", &[]).status.success());
    assert_eq!(node.read("05-new.conflist").unwrap(), PODNET);
    assert_eq!(node.read("10-podnet.conflist").unwrap(), PODNET);
}

#[test]
fn a_conf_that_is_made_anew_is_converted_without_a_bad_instant() {
    let node = Node::new().args(&["--mode", "chained"]);
    fs::remove_file(node.net.join("10-podnet.conflist")).unwrap();
    let single = r#"{"cniVersion":"1.0.0","name":"edge","type":"macvlan","master":"eth0"}"#;
    node.primary("05-edge.conf", single);
    let _broker = node.broker();
    let _installer = node.start_ready();
    let reader = Reader::start(&node.net);
    for _ in 0..5 {
        node.primary("05-edge.conf", single);
        wait_for("converted", Duration::from_secs(2), || {
            (node.names() == ["05-edge.conflist"]).then_some(())
        });
        // One write a second once five were made at once.
        node.wait_ready();
    }
    reader.assert_always_valid();
    assert_eq!(node.chain(), ["macvlan", "sluice-cni"]);
}

#[test]
fn a_plugin_directory_that_is_exchanged_gets_the_plugin_again() {
    let node = Node::new();
    let (one, other) = (node.root().join("one"), node.root().join("other"));
    fs::rename(&node.bin, &one).unwrap();
    symlink(&one, &node.bin).unwrap();
    fs::create_dir(&other).unwrap();
    for name in ["ptp", "portmap"] {
        fs::copy(one.join(name), other.join(name)).unwrap();
    }
    let _broker = node.broker();
    let _installer = node.start_ready();
    assert!(one.join("sluice-cni").exists());
    symlink(&other, node.root().join("link")).unwrap();
    fs::rename(node.root().join("link"), &node.bin).unwrap();
    wait_for("the plugin", Duration::from_secs(5), || {
        other.join("sluice-cni").exists().then_some(())
    });
    node.wait_ready();
}

#[test]
fn symlinked_directories_work() {
    let node = Node::new();
    for directory in [&node.net, &node.bin] {
        let real = directory.with_extension("real");
        fs::rename(directory, &real).unwrap();
        symlink(&real, directory).unwrap();
    }
    let _broker = node.broker();
    let _installer = node.start_ready();
    node.primary("10-podnet.conflist", &list(1234, "1.0.0", ""));
    wait_for("followed", FAST, || {
        node.read(OWNED).filter(|text| text.contains("1234"))
    });
}

#[test]
fn without_inotify_changes_are_found_by_looking() {
    let node = Node::new();
    let _broker = node.broker();
    // A new user namespace has limits of its own.
    let _installer = node.start_without_inotify();
    node.wait_ready();
    assert!(
        node.log_text()
            .contains("cannot watch; looking regularly instead"),
        "{}",
        node.log_text()
    );
    let mut stream = UnixStream::connect(node.run.kubeconfig().with_file_name("installer.sock")).unwrap();
    let mut status = String::new();
    stream.read_to_string(&mut status).unwrap();
    assert!(status.contains("\"watching\":false"), "{status}");
    let before = Instant::now();
    node.primary("10-podnet.conflist", &list(1234, "1.0.0", ""));
    wait_for("followed", Duration::from_secs(4), || {
        node.read(OWNED).filter(|text| text.contains("1234"))
    });
    assert!(before.elapsed() < Duration::from_secs(3));
}

#[test]
fn a_changed_selection_waits_for_a_restart_and_says_so() {
    let node = Node::new();
    let selection = node.root().join("selection.yaml");
    fs::write(&selection, "excludedNamespaces: [kube-system]\n").unwrap();
    let node = node.args(&["--selection", selection.to_str().unwrap()]);
    let broker = node.broker();
    let mut installer = node.start_ready();
    let before = node.read(OWNED).unwrap();
    assert!(before.contains("kube-system"));
    // The broker is told of what the plugin has, not of what is in the file by now.
    let hash = |text: &str| {
        let parsed = sluice_selection::parse_selection_file(&selection, Ok(text.to_owned()));
        parsed.unwrap().hash()
    };
    let told = |hash: String| {
        wait_for("the selection's hash", SOON, || {
            broker.report().filter(|report| report.selection_hash == hash)
        })
    };
    told(hash("excludedNamespaces: [kube-system]\n"));
    fs::write(&selection, "excludedNamespaces: [other]\n").unwrap();
    wait_for("a note", Duration::from_secs(4), || {
        node.log_text()
            .contains("has another excludedNamespaces since the start")
            .then_some(())
    });
    assert_eq!(node.health(), "ready");
    assert_eq!(node.read(OWNED).unwrap(), before);
    told(hash("excludedNamespaces: [kube-system]\n"));
    installer.kill();
    let _installer = node.start();
    wait_for("the new selection", SOON, || {
        node.read(OWNED).filter(|text| text.contains("\"other\""))
    });
    told(hash("excludedNamespaces: [other]\n"));
}

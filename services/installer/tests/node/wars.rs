//! Neighbours that undo whatever is written, and deaths at any moment: the configuration that a runtime would use is
//! valid at every instant.

use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::support::{Node, OWNED, PODNET, Reader, SOON, cpu_time, wait_for};

/// Does `undo` within 20 ms of whatever happens, for as long as `during` runs.
fn with_peer<T>(undo: impl Fn() + Send + Sync, during: impl FnOnce() -> T) -> T {
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                undo();
                std::thread::sleep(Duration::from_millis(15));
            }
        });
        let _stop = Stop(&stop);
        during()
    })
}

/// Lets time pass; what is asserted of it is asserted at its end.
fn pass(time: Duration) {
    std::thread::sleep(time);
}

#[test]
fn a_peer_that_rewrites_its_own_file_for_a_minute_does_not_touch_our_copy() {
    let node = Node::new();
    fs::rename(
        node.net.join("10-podnet.conflist"),
        node.net.join("05-cilium.conflist"),
    )
    .unwrap();
    let _broker = node.broker();
    let installer = node.start_ready();
    let reader = Reader::start(&node.net);
    let before = cpu_time(installer.pid());
    let written = fs::metadata(node.net.join(OWNED)).unwrap().modified().unwrap();
    with_peer(
        || node.primary("05-cilium.conflist", PODNET),
        || pass(Duration::from_mins(1)),
    );
    let used = cpu_time(installer.pid()).saturating_sub(before);
    assert!(used < Duration::from_secs(3), "5 % of a core at most: {used:?}");
    assert_eq!(
        fs::metadata(node.net.join(OWNED)).unwrap().modified().unwrap(),
        written
    );
    assert_eq!(node.health(), "ready");
    reader.assert_always_ours();
}

#[test]
fn a_peer_that_undoes_our_edits_for_a_minute_is_told_of_and_not_fought_with() {
    let node = Node::new().args(&["--mode", "chained"]);
    fs::rename(
        node.net.join("10-podnet.conflist"),
        node.net.join("05-cilium.conflist"),
    )
    .unwrap();
    let broker = node.broker();
    let installer = node.start_ready();
    let reader = Reader::start(&node.net);
    let undone = AtomicU32::new(0);
    // What is undone first is the installation, which the peer did not cause.
    let rewrites = || undone.load(Ordering::Relaxed) - 1;
    let before = cpu_time(installer.pid());
    let undo = || {
        if node
            .read("05-cilium.conflist")
            .is_some_and(|text| text.contains("sluice-cni"))
        {
            undone.fetch_add(1, Ordering::Relaxed);
            node.primary("05-cilium.conflist", PODNET);
        }
    };
    let start = Instant::now();
    with_peer(undo, || {
        pass(Duration::from_secs(20));
        let twenty = rewrites();
        assert!((10..=25).contains(&twenty), "{twenty} rewrites in 20 s");
        let report = broker.report().unwrap();
        assert!(
            !report.ready && report.problem.starts_with("conflict: 05-cilium.conflist"),
            "{report:?}"
        );
        assert!(report.problem.contains("cni.exclusive"), "{report:?}");
        pass(Duration::from_mins(1).saturating_sub(start.elapsed()));
    });
    let minute = rewrites();
    assert!(minute <= 65, "{minute} rewrites in a minute");
    let used = cpu_time(installer.pid()).saturating_sub(before);
    assert!(used < Duration::from_secs(3), "5 % of a core at most: {used:?}");
    reader.assert_always_valid();
    // Peace.
    wait_for("ready", SOON, || (node.health() == "ready").then_some(()));
    assert_eq!(node.chain().last().unwrap(), "sluice-cni");
}

#[test]
fn a_peer_that_removes_our_file_is_told_of() {
    let node = Node::new();
    let broker = node.broker();
    let _installer = node.start_ready();
    let removed = AtomicU32::new(0);
    let undo = || {
        // As Cilium does with files of others, if it is told to be exclusive.
        let away = node.net.join(format!("{OWNED}.cilium_bak"));
        removed.fetch_add(
            u32::from(fs::rename(node.net.join(OWNED), away).is_ok()),
            Ordering::Relaxed,
        );
    };
    with_peer(undo, || {
        wait_for("a conflict", SOON, || {
            broker
                .report()
                .filter(|report| report.problem.starts_with("conflict: "))
        });
        pass(Duration::from_secs(5));
    });
    let removed = removed.load(Ordering::Relaxed);
    assert!(removed <= 20, "{removed}");
    wait_for("ready", SOON, || (node.health() == "ready").then_some(()));
}

/// A sequence of waits that no one chose.
fn waits(seed: u64) -> impl Iterator<Item = Duration> {
    let mut state = seed;
    std::iter::repeat_with(move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        Duration::from_micros((state >> 33) % 120_000)
    })
}

/// Kills it fifty times, each time after having changed what it has to react to.
fn die_often(node: &Node, seed: u64) {
    let _broker = node.broker();
    let mut installer = node.start_ready();
    let reader = Reader::start(&node.net);
    for (number, wait) in waits(seed).take(50).enumerate() {
        let text = PODNET.replace("1450.0", &format!("{}", 1000 + number));
        node.primary("10-podnet.conflist", &text);
        if number % 3 == 0 {
            let _ = fs::remove_file(node.run.kubeconfig());
        }
        if number % 5 == 0 {
            fs::write(node.bin.join("other"), "x").unwrap();
            fs::rename(node.bin.join("other"), node.installed()).unwrap();
        }
        pass(wait);
        installer.kill();
        installer = node.start();
    }
    node.wait_ready();
    reader.assert_always_valid();
    let (name, list) = crate::support::effective(&node.net).unwrap();
    assert!(list.to_string().contains("1049"), "{name}: {list}");
    assert_eq!(node.chain(), ["ptp", "portmap", "sluice-cni"]);
    assert_eq!(
        fs::read(node.installed()).unwrap(),
        fs::read(node.image().join("sluice-cni")).unwrap()
    );
    for directory in [&node.net, &node.bin] {
        let left: Vec<_> = fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.contains("sluice-tmp"))
            .collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn a_death_at_any_moment_leaves_a_valid_configuration() {
    die_often(&Node::new(), 1);
}

#[test]
fn a_death_at_any_moment_leaves_a_valid_configuration_where_files_of_others_are_edited() {
    die_often(&Node::new().args(&["--mode", "chained"]), 2);
}

#[test]
fn a_death_during_a_removal_leaves_what_a_second_removal_finishes() {
    let node = Node::new();
    let _broker = node.broker();
    for wait in waits(3).take(25) {
        let mut installer = node.start_ready();
        installer.kill();
        let reader = Reader::start(&node.net);
        let mut removal = node
            .command("uninstall")
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        pass(wait / 8);
        let _ = removal.kill();
        removal.wait().unwrap();
        // While a configuration names it, the plugin is there.
        assert!(node.installed().exists());
        assert!(node.once("uninstall", &[]).status.success());
        assert_eq!(node.names(), ["10-podnet.conflist"]);
        assert!(!node.run.kubeconfig().exists());
        reader.assert_always_valid();
    }
}

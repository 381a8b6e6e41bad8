//! What the running installer may do, from the kernel's own account.

use std::collections::BTreeMap;
use std::fs;

use crate::support::Node;

/// Fields of `/proc/PID/status` of every thread.
fn threads(pid: u32) -> Vec<BTreeMap<String, String>> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let status = tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("status")).ok());
    let fields = |status: String| {
        let fields = status.lines().filter_map(|line| line.split_once(":\t"));
        fields
            .map(|(key, value)| (key.to_owned(), value.trim().to_owned()))
            .collect()
    };
    status.map(fields).collect()
}

#[test]
fn it_has_no_capability_and_gets_none_and_runs_behind_a_filter() {
    let node = Node::new();
    let _broker = node.broker();
    let installer = node.start_ready();
    let threads = threads(installer.pid());
    assert!(threads.len() > 1, "the thread of the watch is there, too");
    for thread in threads {
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(thread[set], "0000000000000000", "{set}");
        }
        assert_eq!(thread["NoNewPrivs"], "1");
        assert_eq!(thread["Seccomp"], "2");
    }
}

#[test]
fn its_only_sockets_are_unix_sockets_and_nothing_leaks() {
    let node = Node::new();
    let broker = node.broker();
    let installer = node.start_ready();
    let descriptors = || {
        let entries = fs::read_dir(format!("/proc/{}/fd", installer.pid())).unwrap();
        let links = entries.filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
        links
            .map(|link| link.to_string_lossy().into_owned())
            .collect::<Vec<_>>()
    };
    let unix = fs::read_to_string("/proc/net/unix").unwrap();
    let known: Vec<&str> = unix
        .lines()
        .filter_map(|line| line.split_whitespace().nth(6))
        .collect();
    let found = descriptors();
    for socket in found.iter().filter_map(|link| link.strip_prefix("socket:[")) {
        let inode = socket.trim_end_matches(']');
        assert!(known.contains(&inode), "{inode} is no Unix socket");
    }
    for number in 0..30 {
        node.primary(
            "10-podnet.conflist",
            &crate::support::PODNET.replace("1450.0", &number.to_string()),
        );
        fs::remove_file(node.run.kubeconfig()).unwrap();
        crate::support::wait_for("the kubeconfig", crate::support::SOON, || {
            node.run.kubeconfig().exists().then_some(())
        });
        assert!(node.health() == "ready" || number > 0);
    }
    node.wait_ready();
    // The connection of the last probe may still be open on the installer's side.
    crate::support::wait_for(&format!("no more than {found:?}"), crate::support::SOON, || {
        (descriptors().len() <= found.len()).then_some(())
    });
    drop(broker);
}

#[test]
fn it_is_small() {
    let node = Node::new();
    for number in 0..20 {
        let text = crate::support::PODNET.replace("podnet", &format!("other-{number}"));
        node.primary(&format!("{}-other.conflist", 10 + number), &text);
    }
    let _broker = node.broker();
    let installer = node.start_ready();
    let status = &threads(installer.pid())[0];
    // Pages of a binary with debug information say nothing of the shipped one.
    let shipped = std::env::var_os("SLUICE_BIN_DIR").is_some();
    let field = if shipped { "VmHWM" } else { "RssAnon" };
    let kib: u32 = status[field].strip_suffix(" kB").unwrap().trim().parse().unwrap();
    assert!(kib <= 8 * 1024, "{field} {kib} KiB");
}

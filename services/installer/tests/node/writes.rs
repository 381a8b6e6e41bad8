//! How files get where they are, as others see it: the runtime that watches, auditors that look at modes, and a runtime
//! that starts pods while nothing of ours runs.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::mpsc;

use notify::event::{ModifyKind, RenameMode};
use notify::{EventKind, RecursiveMode, Watcher};

use crate::support::{Node, OWNED, PODNET, Reader, SOON, wait_for};

/// Names that were renamed away, and names that something was renamed to, in order.
#[derive(Debug, PartialEq, Eq)]
enum Renamed {
    From(String),
    To(String),
}

fn renames(events: &mpsc::Receiver<notify::Result<notify::Event>>) -> Vec<Renamed> {
    let events = events.try_iter().map(Result::unwrap);
    let renames = events.filter_map(|event| {
        let name = event.paths.first()?.file_name()?.to_str()?.to_owned();
        match event.kind {
            EventKind::Modify(ModifyKind::Name(RenameMode::From)) => Some(Renamed::From(name)),
            EventKind::Modify(ModifyKind::Name(RenameMode::To)) => Some(Renamed::To(name)),
            _ => None,
        }
    });
    renames.collect()
}

#[test]
fn a_file_comes_by_a_rename_from_a_name_in_its_directory_that_runtimes_ignore() {
    let node = Node::new();
    let _broker = node.broker();
    let _installer = node.start_ready();
    let (sender, events) = mpsc::channel();
    let mut watcher = notify::recommended_watcher(sender).unwrap();
    watcher.watch(&node.net, RecursiveMode::NonRecursive).unwrap();
    fs::remove_file(node.net.join(OWNED)).unwrap();
    // containerd loads its configuration again on the first of the two, and on nothing else that a write does.
    let mut seen = Vec::new();
    wait_for("our file came", SOON, || {
        seen.extend(renames(&events));
        seen.contains(&Renamed::To(OWNED.to_owned())).then_some(())
    });
    let Some(Renamed::From(temporary)) = seen.first() else {
        panic!("{seen:?}")
    };
    let extension = Path::new(temporary).extension().unwrap().to_str().unwrap();
    assert!(!["conf", "conflist", "json"].contains(&extension), "{temporary}");
}

#[test]
fn modes_are_what_they_should_be_whatever_the_umask() {
    for umask in ["0000", "0077"] {
        let node = Node::new();
        let _broker = node.broker();
        let script = format!("umask {umask} && exec \"$0\" \"$@\"");
        let _installer = node.start_through("sh", &["-c", &script]);
        node.wait_ready();
        let mode = |path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode(node.net.join(OWNED)), 0o600, "{umask}");
        assert_eq!(mode(node.run.kubeconfig()), 0o600, "{umask}");
        assert_eq!(mode(node.installed()), 0o755, "{umask}");
    }
}

#[test]
fn while_nothing_of_ours_runs_the_primarys_agent_cannot_take_our_entry_out() {
    let node = Node::new();
    let broker = node.broker();
    let mut installer = node.start_ready();
    installer.kill();
    broker.stop();
    let reader = Reader::start(&node.net);
    for number in 0..20 {
        let text = PODNET.replace("1450.0", &format!("{}", 1400 + number));
        node.primary("10-podnet.conflist", &text);
        assert_eq!(node.chain(), ["ptp", "portmap", "sluice-cni"]);
    }
    reader.assert_always_ours();
}

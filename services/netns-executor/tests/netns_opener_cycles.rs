//! The opener enters namespaces thousands of times while they come and go. Needs root.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on ends")]

#[path = "support/opener.rs"]
#[expect(dead_code, reason = "each test binary uses its part")]
mod opener;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};
use sluice_proto::opener::OpenerRequest;
use sluice_testkit::netns::Netns;
use sluice_testkit::process::status::ProcStatus;
use sluice_testkit::wait::poll_true;

use opener::{Fixture, SOON, assert_sockets_in, mount_at};

const CYCLES: usize = 10_000;
const PATHS: usize = 16;

/// Until `stop`: at one path after the other the namespace goes and another one comes, which nobody else holds.
fn come_and_go(paths: &[String], stop: &AtomicBool) -> usize {
    let mut changes = 0;
    while !stop.load(Ordering::Relaxed) {
        let path = &paths[changes % PATHS];
        // None is there the first time.
        let _ = umount2(path.as_str(), MntFlags::MNT_DETACH);
        mount_at(&Netns::new().unwrap(), path);
        changes += 1;
    }
    for path in paths {
        let _ = umount2(path.as_str(), MntFlags::MNT_DETACH);
    }
    changes
}

/// Of a process: each thread's namespace, and what it has open.
type Holds = (BTreeMap<u32, u64>, BTreeMap<u32, PathBuf>);

/// What the opener and the process that enters for it hold, by process id.
fn of_both(fixture: &Fixture) -> BTreeMap<u32, Holds> {
    let pid = fixture.opener.pid();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    let pids = children.split_whitespace().map(|child| child.parse().unwrap());
    pids.chain([pid])
        .map(|pid| {
            let status = ProcStatus::read(pid).unwrap();
            (
                pid,
                (status.thread_netns().unwrap(), status.descriptors().unwrap()),
            )
        })
        .collect()
}

#[test]
fn entering_namespaces_that_come_and_go_mixes_none_up_and_leaves_nothing() {
    let fixture = Fixture::start();
    let paths: Vec<_> = (0..PATHS)
        .map(|n| fixture.in_netns_dir(&format!("cni-{n}")))
        .collect();
    let before = of_both(&fixture);
    let stop = Arc::<AtomicBool>::default();
    let changing = std::thread::spawn({
        let (paths, stop) = (paths.clone(), Arc::clone(&stop));
        move || come_and_go(&paths, &stop)
    });
    let (mut entered, mut absent) = (0, 0);
    for cycle in 0..CYCLES {
        let (reply, descriptors) = fixture.ask(&OpenerRequest::Path(paths[cycle % PATHS].clone()));
        if reply.errno == 0 {
            let netns = Netns::from_fd(descriptors[0].try_clone().unwrap());
            assert_sockets_in(&netns, reply, &descriptors);
            entered += 1;
        } else {
            // Not there yet, an empty file between two mounts, or unmounted while it was opened: Landlock finds no way
            // from there to a directory that is allowed.
            let errno = Errno::from_raw(reply.errno);
            let gone = matches!(errno, Errno::ENOENT | Errno::EINVAL | Errno::EACCES);
            assert!(gone, "{errno}");
            absent += 1;
        }
    }
    stop.store(true, Ordering::Relaxed);
    let changes = changing.join().unwrap();
    println!("{entered} times entered, {absent} times nothing there, {changes} namespaces came and went");
    assert!(entered > CYCLES / 10 && changes > PATHS, "nothing was shown");
    // The last reply's descriptors are closed after it is sent.
    poll_true("nothing is left", SOON, || of_both(&fixture) == before).unwrap();
}

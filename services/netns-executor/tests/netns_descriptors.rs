//! Handed-over descriptors of real namespaces, beside what `mount` and `umount` say. Needs root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first surprise"
)]

#[path = "support/netns.rs"]
mod netns;

use std::fs::File;
use std::os::fd::OwnedFd;

use netns::Netns;
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::stat::fstat;
use sluice_netns_executor::descriptors::{NetnsInode, sort};
use sluice_netns_executor::netlink::PodSockets;

/// Runs `inside` on a thread with mounts of its own.
fn with_own_mounts(inside: impl FnOnce() + Send + 'static) {
    let thread = std::thread::spawn(move || {
        #[expect(clippy::disallowed_methods, reason = "the thread ends with this closure")]
        unshare(CloneFlags::CLONE_NEWNS).expect("these tests need root");
        inside();
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Descriptors as the plugin hands them over: the namespace opened by its path, sockets made inside.
fn hand_over(netns: &Netns, path: &str) -> Vec<OwnedFd> {
    let PodSockets { netfilter, route } = netns.sockets();
    let by_path = File::open(path).unwrap().into();
    vec![by_path, netfilter.into_fd(), route.into_fd()]
}

#[test]
fn a_held_namespace_does_not_keep_its_mount() {
    with_own_mounts(|| {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("netns");
        File::create(&path).unwrap();
        let path = path.to_str().unwrap();
        let netns = Netns::new();
        netns.sh("mount --make-rprivate /");
        netns.sh(&format!("mount --bind /proc/self/ns/net {path}"));
        let descriptors = hand_over(&netns, path);
        let unmount = || netns.try_sh(&format!("umount {path}"), "").status.success();
        assert!(!unmount(), "an open file on a mount keeps it");
        let held = sort(descriptors, None, "boot").unwrap();
        assert!(unmount(), "what is kept must not keep the mount");
        // And it is still the namespace, which can be entered.
        let inode = netns.sh("stat -L -c %i /proc/self/ns/net");
        assert_eq!(held.identity.inode.to_string(), inode.trim());
        let kept = NetnsInode::of(&held.netns).unwrap();
        assert_eq!(
            (kept.device, kept.inode),
            (held.identity.device, held.identity.inode)
        );
        let entered = std::thread::spawn(move || {
            #[expect(clippy::disallowed_methods, reason = "the thread ends with this closure")]
            setns(&held.netns, CloneFlags::CLONE_NEWNET).unwrap();
            fstat(File::open("/proc/thread-self/ns/net").unwrap())
                .unwrap()
                .st_ino
        });
        assert_eq!(entered.join().unwrap().to_string(), inode.trim());
    });
}

//! Disks that are full, directories that cannot be written, neighbours that are no configurations. Needs root: file
//! systems of a test's own are mounted in a mount namespace of its own.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::CloneFlags;

use crate::support::{Node, OWNED, PODNET, Reader, SOON, effective, wait_for};

/// Runs `test` on a thread with a mount namespace of its own.
fn in_own_mount_namespace(test: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            enter_new_mount_namespace();
            test();
        });
        if let Err(panic) = thread.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

#[expect(
    clippy::disallowed_methods,
    reason = "a namespace of a test's own, on a thread that ends"
)]
fn enter_new_mount_namespace() {
    nix::sched::unshare(CloneFlags::CLONE_NEWNS).expect("root is needed");
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
}

/// A file system over a directory, until dropped: a directory under one cannot be removed with its node.
#[must_use]
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

/// Puts a small file system over a directory, and what was in the directory into it.
fn mount_small(directory: &Path, size: &str) -> Mounted {
    let files: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name(), fs::read(entry.path()).unwrap()))
        .collect();
    let options = format!("size={size},mode=0755");
    mount(
        Some("tmpfs"),
        directory,
        Some("tmpfs"),
        MsFlags::empty(),
        Some(options.as_str()),
    )
    .unwrap();
    for (name, bytes) in files {
        fs::write(directory.join(name), bytes).unwrap();
    }
    Mounted(directory.to_owned())
}

fn remount(directory: &Path, flags: MsFlags) {
    let none: Option<&str> = None;
    mount(none, directory, none, MsFlags::MS_REMOUNT | flags, none).unwrap();
}

/// Writes until there is no room at all.
fn fill(directory: &Path) {
    let mut size = 1 << 16;
    while size > 0 {
        let path = directory.join(format!("ballast-{size}"));
        if fs::write(&path, vec![0; size]).is_err() {
            size /= 2;
        } else {
            let _ = fs::rename(
                &path,
                directory.join(format!(
                    "ballast-{size}-{}",
                    fs::read_dir(directory).unwrap().count()
                )),
            );
        }
    }
}

fn make_room(directory: &Path) {
    for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
        if entry.file_name().to_string_lossy().starts_with("ballast") {
            fs::remove_file(entry.path()).unwrap();
        }
    }
}

#[test]
fn a_full_disk_keeps_what_is_there_and_is_overcome() {
    in_own_mount_namespace(|| {
        let node = Node::new();
        let _net = mount_small(&node.net, "64k");
        let _broker = node.broker();
        let _installer = node.start_ready();
        let reader = Reader::start(&node.net);
        fill(&node.net);
        // The same length, so that the primary's own file finds room: its block is there.
        let text = PODNET.replace("1450.0", "1399.0");
        let file = fs::File::options()
            .write(true)
            .open(node.net.join("10-podnet.conflist"))
            .unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, text.as_bytes(), 0).unwrap();
        let health = node.wait_health("ENOSPC", SOON);
        assert!(health.contains("02-sluice.conflist"), "{health}");
        assert_eq!(node.chain(), ["ptp", "portmap", "sluice-cni"]);
        assert!(node.read(OWNED).unwrap().contains("1450.0"));
        assert!(
            !node.names().iter().any(|name| name.contains("sluice-tmp")),
            "{:?}",
            node.names()
        );
        make_room(&node.net);
        wait_for("followed", Duration::from_secs(20), || {
            node.read(OWNED).filter(|text| text.contains("1399.0"))
        });
        node.wait_ready();
        reader.assert_always_ours();
    });
}

#[test]
fn without_room_for_the_plugin_nothing_names_it() {
    in_own_mount_namespace(|| {
        let node = Node::new();
        let _bin = mount_small(&node.bin, "256k");
        let _broker = node.broker();
        let _installer = node.start();
        let health = node.wait_health("ENOSPC", SOON);
        assert!(health.contains("sluice-cni"), "{health}");
        assert_eq!(node.names(), ["10-podnet.conflist"]);
        let mut names: Vec<_> = fs::read_dir(&node.bin)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        names.sort();
        assert_eq!(names, ["bridge", "host-local", "macvlan", "portmap", "ptp"]);
    });
}

#[test]
fn a_read_only_directory_is_named_with_what_to_do() {
    in_own_mount_namespace(|| {
        let node = Node::new();
        let _bin = mount_small(&node.bin, "16m");
        remount(&node.bin, MsFlags::MS_RDONLY);
        let _broker = node.broker();
        let _installer = node.start();
        let health = node.wait_health("EROFS", SOON);
        assert!(
            health.contains("set the platform") && health.contains("/bin/sluice-cni"),
            "{health}"
        );
        assert_eq!(node.names(), ["10-podnet.conflist"]);
        remount(&node.bin, MsFlags::empty());
        let _net = mount_small(&node.net, "1m");
        remount(&node.net, MsFlags::MS_RDONLY);
        node.wait_health("net.d/02-sluice.conflist", Duration::from_secs(20));
        assert_eq!(effective(&node.net).unwrap().0, "10-podnet.conflist");
    });
}

#[test]
fn a_directory_of_another_owner_is_named_with_owner_and_mode() {
    let node = Node::new();
    chown(&node.net, Some(1000), Some(1000)).expect("root is needed");
    let _broker = node.broker();
    let mut installer = node.start();
    let health = node.wait_health("EACCES", SOON);
    assert!(
        health.contains("belongs to uid 1000, mode 0755; we are uid 0 without CAP_DAC_OVERRIDE"),
        "{health}"
    );
    assert_eq!(node.names(), ["10-podnet.conflist"]);
    // Nor is it ours to leave.
    chown(&node.net, Some(0), Some(0)).unwrap();
    node.wait_ready();
    chown(&node.net, Some(1000), Some(1000)).unwrap();
    installer.kill();
    let output = node.once("uninstall", &[]);
    assert!(!output.status.success());
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        log.contains("not everything could be removed") && log.contains("uid 1000"),
        "{log}"
    );
    // A configuration still names it, so the plugin itself is still there.
    assert_eq!(
        fs::read(node.installed()).unwrap(),
        fs::read(node.image().join("sluice-cni")).unwrap()
    );
    assert!(!node.run.kubeconfig().exists());
}

#[test]
fn a_directory_of_another_owner_is_written_with_the_capability_that_was_given_for_it() {
    let node = Node::new().args(&["--dac-override"]);
    for directory in [&node.net, &node.bin] {
        chown(directory, Some(1000), Some(1000)).expect("root is needed");
    }
    let _broker = node.broker();
    let mut installer = node.start_ready();
    assert_eq!(node.chain(), ["ptp", "portmap", "sluice-cni"]);
    let status = fs::read_to_string(format!("/proc/{}/status", installer.pid())).unwrap();
    // Bit 1 is CAP_DAC_OVERRIDE (linux/capability.h).
    for set in ["CapPrm", "CapEff", "CapBnd"] {
        assert!(
            status.contains(&format!("{set}:\t0000000000000002\n")),
            "{status}"
        );
    }
    installer.kill();
    assert!(node.once("uninstall", &["--purge"]).status.success());
    assert_eq!(node.names(), ["10-podnet.conflist"]);
    assert!(!node.installed().exists());
}

const CNI_GROUP: u32 = 1000;

/// A node whose primary's file is for a group to read.
fn with_a_group(name: &str, text: &str) -> Node {
    let node = Node::new().args(&["--mode", "chained"]);
    fs::remove_file(node.net.join("10-podnet.conflist")).unwrap();
    node.primary(name, text);
    let path = node.net.join(name);
    chown(&path, None, Some(CNI_GROUP)).expect("root is needed");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    node
}

fn group_and_mode(path: &Path) -> (u32, u32) {
    let metadata = fs::metadata(path).unwrap();
    (metadata.gid(), metadata.mode() & 0o7777)
}

#[test]
fn a_file_whose_group_an_edit_could_not_keep_is_left_as_it_is() {
    let node = with_a_group("10-podnet.conflist", PODNET);
    let path = node.net.join("10-podnet.conflist");
    let before = fs::metadata(&path).unwrap().ino();
    let _broker = node.broker();
    let _installer = node.start();
    let health = node.wait_health("10-podnet.conflist belongs to group 1000", SOON);
    assert!(health.contains("use owned mode"), "{health}");
    assert_eq!(node.read("10-podnet.conflist").unwrap(), PODNET);
    assert_eq!(group_and_mode(&path), (CNI_GROUP, 0o640));
    assert_eq!(fs::metadata(&path).unwrap().ino(), before);
    // A directory that gives its group to every new file makes it possible.
    chown(&node.net, None, Some(CNI_GROUP)).unwrap();
    fs::set_permissions(&node.net, fs::Permissions::from_mode(0o2755)).unwrap();
    node.wait_ready();
    assert_eq!(group_and_mode(&path), (CNI_GROUP, 0o640));
}

#[test]
fn a_file_of_a_group_that_we_are_in_keeps_it() {
    let in_the_group = ["--groups", "1000"];
    let single = r#"{"cniVersion":"1.0.0","name":"edge","type":"macvlan"}"#;
    for (name, text) in [("10-podnet.conflist", PODNET), ("10-podnet.conf", single)] {
        let node = with_a_group(name, text);
        let _broker = node.broker();
        let mut installer = node.start_through("setpriv", &in_the_group);
        node.wait_ready();
        assert_eq!(node.names(), ["10-podnet.conflist"]);
        let path = node.net.join("10-podnet.conflist");
        assert_eq!(group_and_mode(&path), (CNI_GROUP, 0o640), "{name}");
        installer.kill();
        let mut removal = node.through("setpriv", &in_the_group, "uninstall");
        assert!(removal.output().unwrap().status.success());
        assert!(!node.read("10-podnet.conflist").unwrap().contains("sluice-cni"));
        assert_eq!(group_and_mode(&path), (CNI_GROUP, 0o640), "{name}");
    }
}

#[test]
fn a_removal_takes_our_entry_out_even_if_the_group_cannot_be_kept() {
    let node = with_a_group("10-podnet.conflist", PODNET);
    let _broker = node.broker();
    let mut installer = node.start_through("setpriv", &["--groups", "1000"]);
    node.wait_ready();
    installer.kill();
    let output = node.once("uninstall", &[]);
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{log}");
    assert!(
        log.contains("group") && log.contains("10-podnet.conflist"),
        "{log}"
    );
    assert_eq!(node.read("10-podnet.conflist").unwrap(), PODNET);
    assert_eq!(group_and_mode(&node.net.join("10-podnet.conflist")), (0, 0o640));
}

#[test]
fn neighbours_that_are_no_configurations_do_no_harm() {
    let node = Node::new();
    fs::write(node.net.join("50-text.conf"), "hello").unwrap();
    fs::write(node.net.join("51-cut.conflist"), &PODNET[..60]).unwrap();
    fs::write(node.net.join("52-empty.conf"), "").unwrap();
    fs::write(node.net.join("53-deep.conflist"), "[".repeat(100_000)).unwrap();
    fs::write(node.net.join("54-bytes.conflist"), [0xff, 0xfe, 0x00]).unwrap();
    fs::File::create(node.net.join("55-long.conflist"))
        .unwrap()
        .set_len(1 << 40)
        .unwrap();
    fs::create_dir(node.net.join("56-directory.conflist")).unwrap();
    symlink("/nowhere", node.net.join("57-dangling.conflist")).unwrap();
    symlink("58-loop.conflist", node.net.join("58-loop.conflist")).unwrap();
    nix::unistd::mkfifo(&node.net.join("05-pipe.conflist"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    fs::write(node.net.join("59-secret.conflist"), PODNET).unwrap();
    fs::set_permissions(
        node.net.join("59-secret.conflist"),
        fs::Permissions::from_mode(0o000),
    )
    .unwrap();
    let _broker = node.broker();
    let mut installer = node.start_ready();
    assert_eq!(node.chain(), ["ptp", "portmap", "sluice-cni"]);
    installer.kill();
    let output = node.once("uninstall", &[]);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(!node.names().contains(&OWNED.to_owned()));
}

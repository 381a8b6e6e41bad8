//! What each capability is for, by what the kernel refuses without it. A namespace of a running process is opened by who has
//! SYS_PTRACE and entered by who has SYS_ADMIN, whatever the uid; a descriptor can be had by anybody. That is why the opener is two
//! processes with one capability each, and why neither broker nor executor enters a namespace. Needs `setpriv` and `nsenter` (util-linux).

use std::path::Path;

use sluice_integration::mesh::{Mesh, MeshOptions};
use sluice_proto::paths::BROKER_UID;
use sluice_testkit::netns::{Netns, Place};
use sluice_testkit::node::Node;
use sluice_testkit::process::{Capability, Identity, Process, Spawn, binary, output, text};
use sluice_testkit::wait::poll_true;

/// What came of opening a namespace and entering it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    NotOpened,
    NotEntered,
    Entered,
}
use Outcome::{Entered, NotEntered, NotOpened};

/// Tries it with these privileges.
fn enter(place: &Place, privileges: &[&str], path: &str) -> Outcome {
    let netns = format!("--net={path}");
    let command = [privileges, &["nsenter", &netns, "true"]].concat();
    let ran = output(place, "setpriv", &command, b"").unwrap();
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    match (ran.status.success(), said.as_str()) {
        (true, _) => Entered,
        (false, said) if said.contains("cannot open") && said.contains("Permission denied") => NotOpened,
        (false, said) if said.contains("reassociate") && said.contains("Operation not permitted") => {
            NotEntered
        }
        _ => panic!("{command:?}: {said}"),
    }
}

/// uid 0 with exactly these capabilities, as a container has them.
fn root(bounding: &str) -> [&str; 3] {
    ["--inh-caps=-all", "--bounding-set", bounding]
}

/// A process of a pod: in its namespace, as root with everything or as another user.
fn process(netns: &Netns, uid: u32) -> Process {
    let sleep = Spawn::program("sleep", "/bin/sleep")
        .arg("infinity")
        .place(Place::from(netns));
    let sleep = if uid == 0 {
        sleep
    } else {
        sleep.identity(Identity::user(uid))
    };
    sleep.start().unwrap()
}

#[test]
fn a_namespace_is_opened_with_ptrace_and_entered_with_admin() {
    let node = Node::new().unwrap();
    let pod = node.pod("web").create().unwrap();
    let both = "-all,+sys_ptrace,+sys_admin";
    let ambient = [
        "--reuid=1337",
        "--regid=1337",
        "--clear-groups",
        "--inh-caps=-all,+sys_ptrace,+sys_admin",
        "--ambient-caps=-all,+sys_ptrace,+sys_admin",
    ];
    for uid in [0, 1000] {
        let process = process(pod.netns(), uid);
        let path = format!("/proc/{}/ns/net", process.pid());
        let enter = |privileges: &[&str]| enter(node.place(), privileges, &path);
        assert_eq!(enter(&root("-all")), NotOpened, "of uid {uid}, with nothing");
        assert_eq!(
            enter(&root("-all,+sys_admin")),
            NotOpened,
            "of uid {uid}, SYS_ADMIN"
        );
        // DAC_OVERRIDE is about files; this is a ptrace check.
        assert_eq!(
            enter(&root("-all,+sys_admin,+dac_override")),
            NotOpened,
            "of uid {uid}, DAC_OVERRIDE"
        );
        assert_eq!(
            enter(&root("-all,+sys_ptrace")),
            NotEntered,
            "of uid {uid}, SYS_PTRACE"
        );
        assert_eq!(enter(&root(both)), Entered, "of uid {uid}, both");
        assert_eq!(enter(&ambient), Entered, "of uid {uid}, both, not root");
        let confined = [["--no-new-privs"].as_slice(), &root(both)].concat();
        assert_eq!(enter(&confined), Entered, "of uid {uid}, both, no_new_privs");
    }
}

#[test]
fn a_mounted_namespace_is_opened_by_anybody_and_entered_with_admin() {
    let node = Node::new().unwrap();
    let pod = node.pod("web").create().unwrap();
    let path = pod.netns_path().to_str().unwrap();
    let user = ["--reuid=1000", "--regid=1000", "--clear-groups"];
    assert_eq!(enter(node.place(), &root("-all,+sys_admin"), path), Entered);
    // As the executor has it.
    assert_eq!(enter(node.place(), &root("-all,+net_admin"), path), NotEntered);
    assert_eq!(enter(node.place(), &user, path), NotEntered);
}

#[test]
fn a_descriptor_needs_nothing_to_be_held_and_admin_to_be_entered() {
    let node = Node::new().unwrap();
    let pod = node.pod("web").create().unwrap();
    let path = pod.netns_path().to_str().unwrap();
    // Opened by root, inherited by a user without capabilities, as the broker gets it over a socket.
    let held = |program: &str| {
        let line = format!("exec setpriv --reuid=1000 --regid=1000 --clear-groups {program} 9<\"$0\"");
        output(node.place(), "sh", &["-c", &line, path], b"").unwrap()
    };
    let seen = held("readlink /proc/self/fd/9");
    assert!(seen.status.success(), "{seen:?}");
    let refused = held("nsenter --net=/proc/self/fd/9 true");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && said.contains("Operation not permitted"),
        "{said}"
    );
    // That it can be passed on: the broker does so for every pod that is enrolled, see `zds`.
}

#[test]
fn a_proxy_of_ztunnels_group_needs_no_capability_for_the_socket() {
    let node = Node::new().unwrap();
    let zds = node.dir().join("ztunnel");
    let (run, zds_dir) = (node.dir().join("prepared"), zds.to_str().unwrap());
    // As the kubelet makes it; group and mode come from the installer.
    std::fs::create_dir(&zds).unwrap();
    let prepare = [
        "prepare",
        "--allow-disk",
        "--run-dir",
        run.to_str().unwrap(),
        "--ztunnel-dir",
        zds_dir,
    ];
    let installer = binary("installer").unwrap().display().to_string();
    text(node.place(), &installer, &prepare, b"").unwrap();
    let socket = zds.join("ztunnel.sock");
    let options = MeshOptions {
        broker: vec!["--zds-socket".to_owned(), socket.display().to_string()],
        without_proxy: true,
        ..MeshOptions::default()
    };
    let mesh = Mesh::start_on(node, options).unwrap();
    poll_true("the socket is there", sluice_integration::mesh::SOON, || {
        socket.exists()
    })
    .unwrap();
    let stat = |path: &Path| {
        let path = path.to_str().unwrap();
        text(mesh.node().place(), "stat", &["--format=%u %g %a", path], b"").unwrap()
    };
    assert_eq!(stat(&zds).trim(), "0 1337 2770");
    assert_eq!(stat(&socket).trim(), format!("{BROKER_UID} 1337 660"));

    // As ztunnel's chart has it: uid 0, gid 1337, no DAC_OVERRIDE.
    let as_ztunnel = [
        "--regid=1337",
        "--clear-groups",
        "--inh-caps=-all",
        "--bounding-set",
    ];
    let control = mesh.control();
    let proxy = Spawn::program("standin-proxy", "/usr/bin/setpriv")
        .args(as_ztunnel)
        .arg("-all,+net_admin,+sys_admin,+net_raw")
        .arg(binary("standin-proxy").unwrap())
        .arg("--zds")
        .arg(&socket)
        .arg("--control")
        .arg(mesh.node().dir().join("proxy-control.sock"))
        .place(mesh.node().place_with(&Netns::new().unwrap()))
        .log(mesh.node().dir().join("standin-proxy.log"))
        .start()
        .unwrap();
    proxy
        .wait_ready(sluice_integration::mesh::SOON, || {
            control.counts().is_ok_and(|report| report.ready)
        })
        .unwrap();

    // Of another group root needs DAC_OVERRIDE, which shows that it was the group.
    let may_write = |group: &str, bounding: &str| {
        let path = socket.to_str().unwrap();
        let command = [
            group,
            "--clear-groups",
            "--inh-caps=-all",
            "--bounding-set",
            bounding,
            "test",
            "-w",
            path,
        ];
        output(mesh.node().place(), "setpriv", &command, b"")
            .unwrap()
            .status
            .success()
    };
    assert!(may_write("--regid=1337", "-all"));
    assert!(!may_write("--regid=0", "-all"));
    assert!(may_write("--regid=0", "-all,+dac_override"));
}

#[test]
fn an_executor_of_the_brokers_group_makes_its_directories_without_further_capability() {
    let node = Node::new().unwrap();
    let run = node.run_dir();
    // As the kubelet makes them.
    for name in ["cni", "executor", "opener", "state"] {
        std::fs::create_dir_all(run.root().join(name)).unwrap();
    }
    let executor = Spawn::binary("netns-executor")
        .unwrap()
        .arg("--run-dir")
        .arg(run.root())
        .place(node.place_with(&Netns::new().unwrap()))
        .identity(Identity::root_with(&[Capability::CAP_NET_ADMIN]).in_groups(&[BROKER_UID]))
        .log(node.dir().join("netns-executor.log"))
        .start()
        .unwrap();
    let serves = || run.executor_socket().exists();
    executor
        .wait_ready(sluice_integration::mesh::SOON, serves)
        .unwrap();
    for (name, wanted) in [
        ("cni", "0 0 700".to_owned()),
        ("executor", format!("0 {BROKER_UID} 2750")),
        ("executor/executor.sock", format!("0 {BROKER_UID} 660")),
        ("opener", "0 0 700".to_owned()),
        ("state", "0 0 700".to_owned()),
    ] {
        let path = run.root().join(name).display().to_string();
        let found = text(node.place(), "stat", &["--format=%u %g %a", &path], b"").unwrap();
        assert_eq!(found.trim(), wanted, "{name}");
    }
}

//! The fixtures make what they promise and leave nothing behind. Needs root.
#![expect(clippy::unwrap_used, reason = "a step that fails is the test's failure")]

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use sluice_testkit::node::Node;
use sluice_testkit::process::{self, Capability, Identity, Spawn};
use sluice_testkit::wait::poll_true;

fn machine_mounts() -> BTreeSet<String> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    mounts
        .lines()
        .filter(|line| line.contains("nsfs"))
        .map(str::to_owned)
        .collect()
}

fn ping(node: &Node, target: IpAddr) -> bool {
    let target = target.to_string();
    process::output(node.place(), "ping", &["-n", "-c1", "-W2", &target], b"")
        .is_ok_and(|o| o.status.success())
}

#[test]
fn pod_has_the_addresses_and_routes_it_was_made_with() {
    let node = Node::new().unwrap();
    let pod = node.pod("web-0").dual_stack().create().unwrap();
    let place = pod.netns().into();
    let addresses = process::json(&place, "ip", &["-j", "address", "show", "dev", "eth0"]).unwrap();
    let text = addresses.to_string();
    for address in pod.addresses() {
        assert!(text.contains(&address.to_string()), "{address} not in {text}");
    }
    assert!(!text.contains("tentative\":true,\"local\":\"fd00"), "{text}");
    assert!(text.contains("LOWER_UP"), "eth0 must be up: {text}");
    for family in ["-4", "-6"] {
        let routes = process::json(&place, "ip", &["-j", family, "route"]).unwrap();
        assert!(routes.to_string().contains("\"default\""), "{routes}");
    }
    assert!(node.interfaces().unwrap().contains(&pod.host_ifname().to_owned()));
}

#[test]
fn node_and_pods_reach_each_other() {
    let node = Node::new().unwrap();
    let a = node.pod("a").dual_stack().create().unwrap();
    let b = node.pod("b").dual_stack().create().unwrap();
    for ipv6 in [false, true] {
        let target = std::net::SocketAddr::new(b.address(ipv6), 9);
        for from in [node.netns(), a.netns()] {
            // Nothing listens: the answer is a reset, which only a reachable peer sends.
            let error = from
                .run(|| std::net::TcpStream::connect_timeout(&target, Duration::from_secs(2)))
                .unwrap_err();
            assert_eq!(
                error.kind(),
                std::io::ErrorKind::ConnectionRefused,
                "{target}: {error}"
            );
        }
    }
    let _ = ping(&node, a.ip());
}

#[test]
fn deleting_a_pod_removes_its_veth_and_mount() {
    let before = machine_mounts();
    let node = Node::new().unwrap();
    let pod = node.pod("gone").create().unwrap();
    let (ifname, path) = (pod.host_ifname().to_owned(), pod.netns_path().to_owned());
    let inside = node.place().run(|| nix::sys::stat::stat(&path).unwrap().st_ino);
    assert_eq!(
        inside,
        pod.netns().inode(),
        "the file in the node's mounts is the netns"
    );
    assert_eq!(machine_mounts(), before, "the machine's own mounts do not change");
    pod.delete().unwrap();
    poll_true("veth is gone", Duration::from_secs(2), || {
        !node.interfaces().unwrap().contains(&ifname)
    })
    .unwrap();
    assert!(!path.exists());
}

#[test]
fn a_panicking_test_leaves_nothing_behind() {
    let before = machine_mounts();
    let (dir, pid, cgroup) = std::thread::spawn(|| {
        let node = Node::new().unwrap();
        let pod = node.pod("p").create().unwrap();
        let pid = pod.start_process().unwrap();
        let seen = (node.dir().to_owned(), pid, pod.cgroup_path().unwrap());
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            let _owned = (node, pod);
            panic!("on purpose");
        }));
        assert!(caught.is_err());
        seen
    })
    .join()
    .unwrap();
    assert!(!dir.exists() && !cgroup.exists());
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    assert_eq!(machine_mounts(), before);
}

#[test]
fn pod_process_is_found_by_cgroup_and_netns() {
    let node = Node::new().unwrap();
    let pod = node.pod("p").create().unwrap();
    let pid = pod.start_process().unwrap();
    let cgroup = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let wanted = format!("/kubepods/burstable/pod{}/{}", pod.uid(), pod.container_id());
    assert!(cgroup.lines().any(|line| line.ends_with(&wanted)), "{cgroup}");
    let threads = process::status::ProcStatus::read(pid)
        .unwrap()
        .thread_netns()
        .unwrap();
    assert_eq!(
        threads.into_values().collect::<BTreeSet<_>>(),
        BTreeSet::from([pod.netns().inode()])
    );
}

#[test]
fn ipv6_is_off_in_a_pod_made_without_it() {
    let node = Node::new().unwrap();
    let pod = node.pod("v4only").disable_ipv6().create().unwrap();
    let value = pod
        .netns()
        .run(|| std::fs::read_to_string("/proc/sys/net/ipv6/conf/lo/disable_ipv6"))
        .unwrap();
    assert_eq!(value.trim(), "1");
    let own = std::fs::read_to_string("/proc/sys/net/ipv6/conf/lo/disable_ipv6").unwrap();
    assert_ne!(own.trim(), "1", "the machine's own setting is not ours to change");
}

#[test]
fn process_runs_under_exactly_the_identity_asked_for() {
    let node = Node::new().unwrap();
    let sleep = || {
        Spawn::program("sleep", "/bin/sleep")
            .arg("60")
            .place(node.place().clone())
    };
    let root = sleep()
        .identity(Identity::root_with(&[Capability::CAP_NET_ADMIN]))
        .start()
        .unwrap();
    let user = sleep().identity(Identity::user(64_807)).start().unwrap();
    let expected = [Capability::CAP_NET_ADMIN];
    let status = root.status().unwrap();
    assert_eq!(
        (status.effective(), status.permitted(), status.bounding()),
        (expected.into(), expected.into(), expected.into())
    );
    assert_eq!(status.uids(), [0; 4]);
    assert!(status.no_new_privs());
    let status = user.status().unwrap();
    assert_eq!(
        (status.effective(), status.permitted(), status.bounding()),
        (vec![], vec![], vec![])
    );
    assert_eq!(status.uids(), [64_807; 4]);
    let first = root.pid();
    root.restart().unwrap();
    assert_ne!(root.pid(), first);
    assert!(root.is_running());
    assert!(root.terminate(Duration::from_secs(2)).is_ok());
}

#[test]
fn making_a_pod_takes_milliseconds() {
    let node = Node::new().unwrap();
    let start = Instant::now();
    let pods: Vec<_> = (0..50)
        .map(|i| node.pod(&format!("p{i}")).dual_stack().create().unwrap())
        .collect();
    let each = start.elapsed() / 50;
    let start = Instant::now();
    drop(pods);
    eprintln!("create {each:?}, delete {:?}", start.elapsed() / 50);
    assert!(each < Duration::from_millis(20), "{each:?}");
}

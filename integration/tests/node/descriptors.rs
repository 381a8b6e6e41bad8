//! Forged descriptors, foreign peers and peers that never finish: refused by name, counted, and nobody waits for them.
//!

use std::fs::File;
use std::io::{IoSlice, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, connect, sendmsg, socket,
};
use sluice_integration::add_client::{AddClient, attachment, descriptors};
use sluice_integration::adds::{declared, mesh_with};
use sluice_integration::as_user::as_user;
use sluice_integration::kernel_state::{NetnsState, Traces, assert_netns_is};
use sluice_integration::mesh::{Mesh, MeshOptions, SOON};
use sluice_integration::scene::{PATIENCE, mesh_pod};
use sluice_integration::uds_http::get;
use sluice_proto::pb::cni::add_response::Outcome;
use sluice_proto::pb::executor::Counter;
use sluice_testkit::netns::Netns;
use sluice_testkit::pod::Pod;
use sluice_testkit::wait::poll_true;

/// A user that is nobody to us.
const STRANGER: u32 = 43_210;

fn start() -> Mesh {
    mesh_with(MeshOptions::default()).unwrap()
}

fn value(counters: &[Counter], label: &str) -> u64 {
    counters
        .iter()
        .find(|counter| counter.label == label)
        .map_or(0, |counter| counter.value)
}

fn refused_descriptors(mesh: &Mesh, label: &str) -> u64 {
    value(
        &mesh.node_status().unwrap().executor.unwrap().refused_descriptors,
        label,
    )
}

fn netns_of(pid: u32) -> Netns {
    Netns::from_fd(File::open(format!("/proc/{pid}/ns/net")).unwrap().into())
}

/// The refusal of an ADD with these descriptors: nothing of it may be left.
fn refusal(mesh: &Mesh, pod: &Pod, descriptors: Vec<OwnedFd>) -> String {
    let response = AddClient::new(&mesh.run)
        .unwrap()
        .add_with(pod, attachment(pod), descriptors)
        .unwrap();
    match response.outcome {
        Some(Outcome::Refused(failure)) => {
            assert_eq!(
                (failure.code.as_str(), failure.component.as_str()),
                ("EXE-FD", "netns-executor"),
                "{failure:?}"
            );
            failure.cause
        }
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn forged_descriptors_are_refused_by_name_and_counted() {
    let mesh = start();
    let victim = mesh_pod(&mesh, "victim").unwrap();
    let pod = declared(&mesh, "forger").unwrap();
    let states = [&victim, &pod].map(|pod| NetnsState::of(pod.netns()).unwrap());
    let traces = Traces::of(&mesh).unwrap();
    let executors = netns_of(mesh.executor.pid());
    let host = mesh.node().netns();
    let own = |count: usize| descriptors(pod.netns()).unwrap().into_iter().take(count);
    let first_of = |netns: &Netns| descriptors(netns).unwrap().swap_remove(0);
    let file = || OwnedFd::from(File::open("/etc/hostname").unwrap());
    let tcp = || OwnedFd::from(std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    let user_ns = || OwnedFd::from(File::open("/proc/self/ns/user").unwrap());
    let mixed = |of: &Netns| {
        [first_of(pod.netns())]
            .into_iter()
            .chain(descriptors(of).unwrap().into_iter().skip(1))
    };
    let cases: Vec<(&str, Vec<OwnedFd>, String)> = vec![
        ("host-netns", descriptors(host).unwrap(), host.inode().to_string()),
        (
            "own-netns",
            descriptors(&executors).unwrap(),
            executors.inode().to_string(),
        ),
        (
            "other-sandbox",
            descriptors(victim.netns()).unwrap(),
            victim.netns().inode().to_string(),
        ),
        ("mixed-netns", mixed(host).collect(), host.inode().to_string()),
        (
            "mixed-netns",
            mixed(victim.netns()).collect(),
            victim.netns().inode().to_string(),
        ),
        ("not-a-netns", vec![file()], "a regular file".to_owned()),
        (
            "not-a-netns",
            own(4).chain([file()]).collect(),
            "a regular file".to_owned(),
        ),
        ("not-a-netns", vec![user_ns()], "a regular file".to_owned()),
        (
            "not-a-netns",
            vec![File::open("/dev/null").unwrap().into()],
            "a device".to_owned(),
        ),
        (
            "unexpected-socket",
            own(4).chain([tcp()]).collect(),
            "family 2".to_owned(),
        ),
        ("none", Vec::new(), "no descriptors".to_owned()),
        ("missing", own(1).collect(), "netfilter socket".to_owned()),
        ("duplicate", own(2).chain(own(2)).collect(), "netns".to_owned()),
        (
            "too-many",
            own(4).chain(own(4)).collect(),
            "8 descriptors".to_owned(),
        ),
    ];
    for (label, forged, told) in cases {
        let before = refused_descriptors(&mesh, label);
        let cause = refusal(&mesh, &pod, forged);
        assert!(cause.contains(&told), "{label}: {told:?} in {cause}");
        assert_eq!(refused_descriptors(&mesh, label), before + 1, "{label}: {cause}");
    }
    assert!(mesh.executor.log_text().contains("descriptors refused"));
    for (pod, state) in [&victim, &pod].into_iter().zip(&states) {
        assert_netns_is(pod, state);
    }
    traces.wait_restored(&mesh, PATIENCE).unwrap();
    mesh.add(&pod).unwrap().ok().unwrap();
}

#[test]
fn more_descriptors_than_a_message_may_carry_end_the_connection() {
    let mesh = start();
    let traces = Traces::of(&mesh).unwrap();
    let stream = UnixStream::connect(mesh.run.cni_socket()).unwrap();
    let file = File::open("/dev/null").unwrap();
    let many = [file.as_raw_fd(); 17];
    let rights = [ControlMessage::ScmRights(&many)];
    sendmsg::<()>(
        stream.as_raw_fd(),
        &[IoSlice::new(&[1])],
        &rights,
        MsgFlags::empty(),
        None,
    )
    .unwrap();
    poll_true("counted", SOON, || refused_descriptors(&mesh, "too-many") == 1).unwrap();
    traces.wait_restored(&mesh, PATIENCE).unwrap();
    assert!(
        mesh.executor.log_text().contains("17 descriptors"),
        "{}",
        mesh.executor.log_text()
    );
}

fn start_with_all_sockets() -> Mesh {
    mesh_with(MeshOptions {
        broker: vec!["--istio-cni".into()],
        ..MeshOptions::default()
    })
    .unwrap()
}

/// A socket, how it is spoken to, and what counts its refused peers.
fn sockets(mesh: &Mesh) -> Vec<(PathBuf, SockType, &'static str)> {
    vec![
        (mesh.run.cni_socket(), SockType::Stream, "cni"),
        (mesh.run.executor_socket(), SockType::Stream, "executor"),
        (mesh.run.descriptor_socket(), SockType::SeqPacket, "descriptor"),
        (mesh.run.opener_socket(), SockType::SeqPacket, "opener"),
        (mesh.run.zds_socket(), SockType::SeqPacket, "zds"),
        (mesh.run.workload_socket(), SockType::Stream, "workload"),
        (mesh.run.http_socket(), SockType::Stream, "http"),
        (mesh.run.compatibility_socket(), SockType::Stream, "istio-cni"),
    ]
}

fn dial(path: &Path, kind: SockType) -> nix::Result<OwnedFd> {
    let socket = socket(AddressFamily::Unix, kind, SockFlag::SOCK_CLOEXEC, None)?;
    connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(socket)
}

/// How often a peer was refused, as the node tells it.
fn refused_peers(mesh: &Mesh, socket: &str) -> u64 {
    let node = mesh.node_status().unwrap();
    match socket {
        "zds" => u64::from(node.zds_socket.contains("1 peers refused")),
        "workload" | "http" | "istio-cni" => {
            let counted = format!("refused_peers_total{{socket=\"{socket}\"}} 1");
            let response = get(&mesh.run.http_socket(), "/metrics").unwrap();
            u64::from(response.body.contains(&counted))
        }
        label => value(&node.executor.unwrap().refused_peers, label),
    }
}

#[test]
fn strangers_are_refused_by_every_socket() {
    let mesh = start_with_all_sockets();
    let all = sockets(&mesh);
    for (path, kind, name) in &all {
        // Mode and owner of the socket or its directory are the first gate.
        let denied = as_user(STRANGER, || dial(path, *kind)).unwrap().unwrap_err();
        assert_eq!(denied, nix::errno::Errno::EACCES, "{name}");
    }
    for (path, kind, name) in &all {
        // The second gate holds without the first.
        let directory = path.parent().unwrap();
        for (path, mode) in [(directory, 0o755), (path.as_path(), 0o666)] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        }
        let before = refused_peers(&mesh, name);
        let dialled = as_user(STRANGER, || dial(path, *kind)).unwrap().unwrap();
        poll_true(&format!("{name} counts the peer"), SOON, || {
            refused_peers(&mesh, name) == before + 1
        })
        .unwrap();
        // Closed by the other side, not left hanging.
        let mut byte = [0];
        let read = nix::sys::socket::recv(dialled.as_raw_fd(), &mut byte, MsgFlags::empty());
        assert!(
            matches!(read, Ok(0) | Err(nix::errno::Errno::ECONNRESET)),
            "{name}: {read:?}"
        );
    }
    let uid = STRANGER.to_string();
    for log in [mesh.executor.log_text(), mesh.broker.log_text()] {
        assert!(log.contains(&uid), "{log}");
    }
    let pod = mesh_pod(&mesh, "web").unwrap();
    mesh.del(&pod).unwrap().ok().unwrap();
}

#[test]
fn peers_that_never_finish_delay_nobody() {
    let mesh = start_with_all_sockets();
    let mut held = Vec::new();
    for (path, kind, name) in sockets(&mesh) {
        for first in [
            &b""[..],
            b"P",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            &[0xff; 100],
            &[1],
            b"GET / HTTP/1.1\r\n",
        ] {
            for _ in 0..5 {
                let socket = dial(&path, kind).unwrap_or_else(|errno| panic!("{name}: {errno}"));
                if !first.is_empty() {
                    // A peer that was already cut off is as good.
                    let _ = nix::sys::socket::send(socket.as_raw_fd(), first, MsgFlags::MSG_NOSIGNAL);
                }
                held.push(socket);
            }
        }
    }
    // Two right bytes of a hand-over, then silence; and descriptors without a word.
    let stream = UnixStream::connect(mesh.run.cni_socket()).unwrap();
    let file = File::open("/dev/null").unwrap();
    let one = [file.as_raw_fd()];
    sendmsg::<()>(
        stream.as_fd().as_raw_fd(),
        &[IoSlice::new(&[1])],
        &[ControlMessage::ScmRights(&one)],
        MsgFlags::empty(),
        None,
    )
    .unwrap();
    (&stream).write_all(b"P").unwrap();
    for i in 0..5 {
        let pod = declared(&mesh, &format!("web-{i}")).unwrap();
        let begun = Instant::now();
        mesh.add(&pod).unwrap().ok().unwrap();
        mesh.del(&pod).unwrap().ok().unwrap();
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    }
    drop((held, stream));
    mesh.wait_serving().unwrap();
    let pod = mesh_pod(&mesh, "after").unwrap();
    mesh.del(&pod).unwrap().ok().unwrap();
}

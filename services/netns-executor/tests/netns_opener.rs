//! The opener as a real process, with the test in the executor's place. Needs root.
#![expect(unsafe_code, reason = "SO_NETNS_COOKIE has no safe wrapper")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, accept4, bind, getsockopt, listen, socket, sockopt,
};
use sluice_proto::id::PodUid;
use sluice_proto::opener::{OpenerReply, OpenerRequest, REPLY_LEN};
use sluice_proto::paths::RunDir;
use sluice_proto::transport::descriptors::{receive, send};
use sluice_testkit::cgroup::PodCgroup;
use sluice_testkit::netns::{Netns, Place};
use sluice_testkit::pod::random_uuid;
use sluice_testkit::process::status::ProcStatus;
use sluice_testkit::process::{Capability, Identity, Process, Spawn, output};
use sluice_testkit::wait::{poll_true, poll_until};

const SOON: Duration = Duration::from_secs(10);

/// A running opener, and our end of its connection.
struct Fixture {
    directory: tempfile::TempDir,
    host: Netns,
    listener: OwnedFd,
    connection: OwnedFd,
    opener: Process,
}

impl Fixture {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let run_dir = RunDir::new(directory.path());
        let path = run_dir.opener_socket();
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::create_dir(directory.path().join("netns")).unwrap();
        let listener = socket(
            AddressFamily::Unix,
            SockType::SeqPacket,
            SockFlag::SOCK_CLOEXEC,
            None,
        )
        .unwrap();
        bind(listener.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        listen(&listener, Backlog::new(4).unwrap()).unwrap();
        let host = Netns::new().unwrap();
        let opener = Spawn::program("netns-opener", env!("CARGO_BIN_EXE_netns-opener"))
            .arg("--run-dir")
            .arg(directory.path())
            .arg("--netns-dir")
            .arg(directory.path().join("netns"))
            .arg("--host-netns")
            .arg(format!(
                "/proc/{}/fd/{}",
                std::process::id(),
                host.as_fd().as_raw_fd()
            ))
            .identity(Identity::root_with(&[
                Capability::CAP_SYS_ADMIN,
                Capability::CAP_SYS_PTRACE,
            ]))
            .log(directory.path().join("log"))
            .start()
            .unwrap();
        let connection = accept(&listener);
        Self {
            directory,
            host,
            listener,
            connection,
            opener,
        }
    }

    fn ask_with(
        &self,
        request: &OpenerRequest,
        descriptors: &[BorrowedFd<'_>],
    ) -> (OpenerReply, Vec<OwnedFd>) {
        send(&self.connection, &request.encode().unwrap(), descriptors).unwrap();
        let reply = receive(&self.connection, REPLY_LEN, 5).unwrap();
        assert!(
            !reply.bytes.is_empty(),
            "the opener ended:\n{}",
            self.opener.log_text()
        );
        (OpenerReply::decode(&reply.bytes).unwrap(), reply.descriptors)
    }

    fn ask(&self, request: &OpenerRequest) -> (OpenerReply, Vec<OwnedFd>) {
        self.ask_with(request, &[])
    }

    fn errno(&self, request: &OpenerRequest) -> Errno {
        let (reply, descriptors) = self.ask(request);
        assert!(descriptors.is_empty() || reply.errno == 0);
        Errno::from_raw(reply.errno)
    }

    fn in_netns_dir(&self, name: &str) -> String {
        self.directory
            .path()
            .join("netns")
            .join(name)
            .to_str()
            .unwrap()
            .to_owned()
    }

    /// Inodes of the namespaces that the last scan suggests for a pod, in order.
    fn candidates(&self, uid: &str) -> Vec<u64> {
        (0..)
            .map_while(|index| {
                let (reply, descriptors) = self.ask(&candidate(uid, index));
                (reply.errno == 0).then(|| inode(&descriptors[0]))
            })
            .collect()
    }
}

fn candidate(uid: &str, index: u32) -> OpenerRequest {
    OpenerRequest::Candidate {
        uid: PodUid::parse(uid).unwrap(),
        index,
    }
}

fn accept(listener: &OwnedFd) -> OwnedFd {
    let mut watched = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
    let ready = poll(&mut watched, PollTimeout::try_from(SOON).unwrap()).unwrap();
    assert_eq!(ready, 1, "the opener did not connect");
    accept4(listener, SockFlag::SOCK_CLOEXEC).unwrap()
}

fn inode(fd: &OwnedFd) -> u64 {
    nix::sys::stat::fstat(fd).unwrap().st_ino
}

/// `SO_NETNS_COOKIE` of any socket.
fn cookie(socket: &OwnedFd) -> u64 {
    let (mut cookie, mut len) = (0_u64, 8);
    // SAFETY: both pointers are to this frame, and `len` is the size of `cookie`.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            71,
            (&raw mut cookie).cast(),
            &raw mut len,
        )
    };
    assert_eq!(rc, 0);
    cookie
}

fn assert_sockets_in(netns: &Netns, reply: OpenerReply, descriptors: &[OwnedFd]) {
    assert_eq!((reply.errno, descriptors.len()), (0, 3));
    assert_eq!(inode(&descriptors[0]), netns.inode());
    for socket in &descriptors[1..] {
        assert_eq!(cookie(socket), netns.cookie().unwrap());
        assert_eq!(getsockopt(socket, sockopt::SockType).unwrap(), SockType::Raw);
    }
}

fn sleeper(place: Place, cgroup: &PodCgroup) -> Process {
    let process = Spawn::program("sleep", "/bin/sleep")
        .arg("1000")
        .place(place)
        .cgroup(cgroup);
    process.start().unwrap()
}

fn mount_at(netns: &Netns, path: &str) {
    std::fs::write(path, "").unwrap();
    let source = format!("/proc/{}/fd/{}", std::process::id(), netns.as_fd().as_raw_fd());
    nix::mount::mount(
        Some(source.as_str()),
        path,
        None::<&str>,
        nix::mount::MsFlags::MS_BIND,
        None::<&str>,
    )
    .unwrap();
}

#[test]
fn every_way_to_name_a_namespace_gives_sockets_made_in_it() {
    let fixture = Fixture::start();
    let (reply, descriptors) = fixture.ask(&OpenerRequest::Host);
    assert_sockets_in(&fixture.host, reply, &descriptors);

    let pod = Netns::new().unwrap();
    let (reply, descriptors) = fixture.ask_with(&OpenerRequest::Descriptor, &[pod.as_fd()]);
    assert_sockets_in(&pod, reply, &descriptors);

    let path = fixture.in_netns_dir("cni-1");
    mount_at(&pod, &path);
    let (reply, descriptors) = fixture.ask(&OpenerRequest::Path(path.clone()));
    nix::mount::umount2(path.as_str(), nix::mount::MntFlags::MNT_DETACH).unwrap();
    assert_sockets_in(&pod, reply, &descriptors);

    let cgroup = PodCgroup::create(&random_uuid().unwrap(), "c1").unwrap();
    let process = sleeper(Place::from(&pod), &cgroup);
    let (reply, descriptors) = fixture.ask(&OpenerRequest::Path(format!("/proc/{}/ns/net", process.pid())));
    assert_sockets_in(&pod, reply, &descriptors);

    let (reply, scratch) = fixture.ask(&OpenerRequest::Scratch);
    assert_eq!((reply.errno, scratch.len()), (0, 3));
    assert_ne!(inode(&scratch[0]), inode(&descriptors[0]));
    let scratch = Netns::from_fd(scratch.into_iter().next().unwrap());
    let links = output(&Place::from(&scratch), "ip", &["-o", "link"], b"").unwrap();
    let links = String::from_utf8(links.stdout).unwrap();
    assert_eq!(links.lines().count(), 1, "{links}");
    assert!(links.contains(" lo:"), "{links}");
    assert_eq!(fixture.opener.status().unwrap().threads(), 1);
}

#[test]
fn what_is_not_an_allowed_namespace_is_refused_and_the_opener_lives_on() {
    let fixture = Fixture::start();
    let pod = Netns::new().unwrap();
    let regular = tempfile::tempfile().unwrap();
    let (reply, _) = fixture.ask_with(&OpenerRequest::Descriptor, &[regular.as_fd()]);
    assert_eq!(Errno::from_raw(reply.errno), Errno::EINVAL);
    let other_kind = std::fs::File::open("/proc/self/ns/uts").unwrap();
    let (reply, _) = fixture.ask_with(&OpenerRequest::Descriptor, &[other_kind.as_fd()]);
    assert_eq!(Errno::from_raw(reply.errno), Errno::EINVAL);
    assert_eq!(fixture.errno(&OpenerRequest::Descriptor), Errno::EBADF);

    let path = |name: &str| OpenerRequest::Path(fixture.in_netns_dir(name));
    std::fs::write(fixture.in_netns_dir("regular"), "").unwrap();
    let target = format!("/proc/{}/fd/{}", std::process::id(), pod.as_fd().as_raw_fd());
    symlink(target, fixture.in_netns_dir("link")).unwrap();
    nix::unistd::mkfifo(
        Path::new(&fixture.in_netns_dir("fifo")),
        nix::sys::stat::Mode::S_IRUSR,
    )
    .unwrap();
    assert_eq!(fixture.errno(&path("absent")), Errno::ENOENT);
    assert_eq!(fixture.errno(&path("regular")), Errno::EINVAL);
    assert_eq!(fixture.errno(&path("fifo")), Errno::EINVAL);
    assert_eq!(fixture.errno(&path("link")), Errno::ELOOP);
    assert_eq!(fixture.errno(&path("../opener/opener.sock")), Errno::EPERM);
    assert_eq!(
        fixture.errno(&OpenerRequest::Path("/etc/passwd".into())),
        Errno::EPERM
    );
    assert_eq!(
        fixture.errno(&OpenerRequest::Path("/proc/1/root/etc/shadow".into())),
        Errno::EPERM
    );
    assert_eq!(
        fixture.errno(&OpenerRequest::Path("/proc/0/ns/net".into())),
        Errno::ENOENT
    );
    assert_eq!(fixture.errno(&candidate("no-such-pod", 0)), Errno::ENOENT);

    let (reply, descriptors) = fixture.ask(&OpenerRequest::Host);
    assert_sockets_in(&fixture.host, reply, &descriptors);
}

#[test]
fn legacy_tables_bring_plain_sockets_and_looking_makes_none() {
    let fixture = Fixture::start();
    let names = |pod: &Netns, file: &str| {
        let path = format!("/proc/thread-self/net/{file}");
        pod.run(move || std::fs::read_to_string(path).unwrap())
    };
    let pod = Netns::new().unwrap();
    let (reply, descriptors) = fixture.ask_with(&OpenerRequest::Descriptor, &[pod.as_fd()]);
    assert_sockets_in(&pod, reply, &descriptors);
    assert_eq!(
        names(&pod, "ip_tables_names") + &names(&pod, "ip6_tables_names"),
        ""
    );

    output(
        &Place::from(&pod),
        "ip6tables-legacy",
        &["-t", "nat", "-N", "ISTIO_OUTPUT"],
        b"",
    )
    .unwrap();
    let (reply, descriptors) = fixture.ask_with(&OpenerRequest::Descriptor, &[pod.as_fd()]);
    assert_eq!((reply.errno, descriptors.len()), (0, 4));
    assert!(reply.legacy.ipv6 && !reply.legacy.ipv4);
    assert_eq!(cookie(&descriptors[3]), pod.cookie().unwrap());
    assert_eq!(
        getsockopt(&descriptors[3], sockopt::SockType).unwrap(),
        SockType::Datagram
    );

    output(
        &Place::from(&pod),
        "iptables-legacy",
        &["-t", "nat", "-N", "ISTIO_OUTPUT"],
        b"",
    )
    .unwrap();
    let (reply, descriptors) = fixture.ask_with(&OpenerRequest::Descriptor, &[pod.as_fd()]);
    assert!(reply.legacy.ipv4 && reply.legacy.ipv6);
    assert_eq!(descriptors.len(), 5);
}

#[test]
fn a_scan_suggests_the_oldest_process_first_and_never_the_host() {
    let fixture = Fixture::start();
    let (a, b) = (random_uuid().unwrap(), random_uuid().unwrap());
    let (netns_a, netns_b) = (Netns::new().unwrap(), Netns::new().unwrap());
    let (cgroup_a, cgroup_b) = (
        PodCgroup::create(&a, "a1").unwrap(),
        PodCgroup::create(&b, "b1").unwrap(),
    );
    let pause_a = sleeper(Place::from(&netns_a), &cgroup_a);
    // Start times are counted in clock ticks of 10 ms: the later ones must be later by that clock.
    let next_tick = || {
        let ticks = || -> u64 {
            let now = std::fs::read_to_string("/proc/uptime").unwrap();
            now.split(' ').next().unwrap().replace('.', "").parse().unwrap()
        };
        let before = ticks();
        poll_true("the next clock tick", SOON, || ticks() > before + 1).unwrap();
    };
    next_tick();
    // A process of A that entered B's namespace, one with a new namespace of its own, one in the host's.
    let strayed = sleeper(Place::from(&netns_b), &cgroup_a);
    next_tick();
    let nested = Netns::new().unwrap();
    let child = sleeper(Place::from(&nested), &cgroup_a);
    let monitor = sleeper(Place::from(&fixture.host), &cgroup_a);
    let pause_b = sleeper(Place::from(&netns_b), &cgroup_b);

    let (reply, _) = fixture.ask(&OpenerRequest::Scan);
    assert_eq!(reply.errno, 0);
    assert!(reply.scanned >= 5);
    assert_eq!(
        fixture.candidates(&a),
        [netns_a.inode(), netns_b.inode(), nested.inode()]
    );
    assert_eq!(fixture.candidates(&b), [netns_b.inode()]);
    let (reply, descriptors) = fixture.ask(&candidate(&a, 0));
    assert_sockets_in(&netns_a, reply, &descriptors);

    // The process is gone, and with it what the scan said about it.
    pause_a.kill().unwrap();
    let gone = fixture.errno(&candidate(&a, 0));
    assert!([Errno::ENOENT, Errno::ESRCH].contains(&gone), "{gone}");
    fixture.ask(&OpenerRequest::Scan);
    assert_eq!(fixture.candidates(&a), [netns_b.inode(), nested.inode()]);
    drop((strayed, child, monitor, pause_b));
}

#[test]
fn a_scan_of_many_processes_is_cheap() {
    let fixture = Fixture::start();
    let (uid, pod) = (random_uuid().unwrap(), Netns::new().unwrap());
    let cgroup = PodCgroup::create(&uid, "c1").unwrap();
    // As on a full node, about a fifth of all processes are pods'.
    let _processes: Vec<_> = (0..30).map(|_| sleeper(Place::from(&pod), &cgroup)).collect();
    let processes: Vec<u32> = std::iter::once(fixture.opener.pid())
        .chain(children(fixture.opener.pid()))
        .collect();
    let cpu = || -> u64 { processes.iter().map(|pid| cpu_ticks(*pid)).sum() };
    // The best of several, since clock ticks are coarse and other work disturbs caches.
    let measure = |_| {
        let before = cpu();
        let scanned: u32 = (0..20).map(|_| fixture.ask(&OpenerRequest::Scan).0.scanned).sum();
        Duration::from_millis((cpu() - before) * 10) * 5000 / scanned
    };
    let per_5000 = (0..5).map(measure).min().unwrap();
    assert_eq!(fixture.candidates(&uid), [pod.inode()]);
    assert!(
        per_5000 <= Duration::from_millis(200),
        "{per_5000:?} CPU for 5,000 processes"
    );
}

#[test]
fn two_processes_hold_one_capability_each_under_seccomp() {
    let fixture = Fixture::start();
    let helper = children(fixture.opener.pid());
    assert_eq!(helper.len(), 1);
    for (pid, only) in [
        (fixture.opener.pid(), Capability::CAP_SYS_ADMIN),
        (helper[0], Capability::CAP_SYS_PTRACE),
    ] {
        let status = poll_until("filter is installed", SOON, || {
            ProcStatus::read(pid).ok().filter(ProcStatus::has_seccomp_filter)
        })
        .unwrap();
        assert_eq!((status.effective(), status.permitted()), (vec![only], vec![only]));
        assert!(status.no_new_privs());
        assert_eq!(status.bounding().len(), 2);
    }
    let probe = output(
        &Place::default(),
        env!("CARGO_BIN_EXE_netns-opener"),
        &["healthcheck"],
        b"",
    )
    .unwrap();
    assert!(probe.status.success());
}

#[test]
fn the_opener_dials_again_and_ends_when_asked() {
    let mut fixture = Fixture::start();
    for _ in 0..3 {
        fixture.connection = accept_after_closing(&fixture.listener, fixture.connection);
        assert_eq!(fixture.ask(&OpenerRequest::Host).0.errno, 0);
    }
    // Garbage costs the sender its connection, no more.
    send(&fixture.connection, b"garbage", &[]).unwrap();
    fixture.connection = accept(&fixture.listener);
    assert_eq!(fixture.ask(&OpenerRequest::Host).0.errno, 0);

    let helper = children(fixture.opener.pid())[0];
    fixture.opener.signal(Signal::SIGTERM).unwrap();
    assert!(fixture.opener.wait(SOON).unwrap().success());
    poll_true("the helper ends too", SOON, || {
        !Path::new(&format!("/proc/{helper}")).exists()
    })
    .unwrap();
}

#[test]
fn without_its_helper_the_opener_gives_up_loudly() {
    let fixture = Fixture::start();
    assert_eq!(fixture.ask(&OpenerRequest::Host).0.errno, 0);
    let helper = nix::unistd::Pid::from_raw(i32::try_from(children(fixture.opener.pid())[0]).unwrap());
    nix::sys::signal::kill(helper, Signal::SIGKILL).unwrap();
    assert!(!fixture.opener.wait(SOON).unwrap().success());
    assert!(fixture.opener.log_text().contains("helper process is gone"));
}

fn accept_after_closing(listener: &OwnedFd, connection: OwnedFd) -> OwnedFd {
    drop(connection);
    accept(listener)
}

fn children(pid: u32) -> Vec<u32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    text.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

/// User and system time in clock ticks of 10 ms (proc_pid_stat(5)).
fn cpu_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

//! An opener as a real process, with the test in the executor's place.
#![expect(unsafe_code, reason = "SO_NETNS_COOKIE has no safe wrapper")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, accept4, bind, getsockopt, listen, socket, sockopt,
};
use sluice_proto::id::PodUid;
use sluice_proto::opener::{OpenerReply, OpenerRequest, REPLY_LEN};
use sluice_proto::paths::RunDir;
use sluice_proto::transport::descriptors::{receive, send};
use sluice_testkit::cgroup::PodCgroup;
use sluice_testkit::netns::{Netns, Place};
use sluice_testkit::process::{Capability, Identity, Process, Spawn};

pub(crate) const SOON: Duration = Duration::from_secs(10);

/// A running opener, and our end of its connection.
pub(crate) struct Fixture {
    pub(crate) directory: tempfile::TempDir,
    pub(crate) host: Netns,
    pub(crate) listener: OwnedFd,
    pub(crate) connection: OwnedFd,
    pub(crate) opener: Process,
}

impl Fixture {
    pub(crate) fn start() -> Self {
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
        let opener = Spawn::binary("netns-opener")
            .unwrap()
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

    pub(crate) fn ask_with(
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

    pub(crate) fn ask(&self, request: &OpenerRequest) -> (OpenerReply, Vec<OwnedFd>) {
        self.ask_with(request, &[])
    }

    pub(crate) fn errno(&self, request: &OpenerRequest) -> Errno {
        let (reply, descriptors) = self.ask(request);
        assert!(descriptors.is_empty() || reply.errno == 0);
        Errno::from_raw(reply.errno)
    }

    pub(crate) fn in_netns_dir(&self, name: &str) -> String {
        self.directory
            .path()
            .join("netns")
            .join(name)
            .to_str()
            .unwrap()
            .to_owned()
    }

    /// Inodes of the namespaces that the last scan suggests for a pod, in order.
    pub(crate) fn candidates(&self, uid: &str) -> Vec<u64> {
        (0..)
            .map_while(|index| {
                let (reply, descriptors) = self.ask(&candidate(uid, index));
                (reply.errno == 0).then(|| inode(&descriptors[0]))
            })
            .collect()
    }
}

pub(crate) fn candidate(uid: &str, index: u32) -> OpenerRequest {
    OpenerRequest::Candidate {
        uid: PodUid::parse(uid).unwrap(),
        index,
    }
}

pub(crate) fn accept(listener: &OwnedFd) -> OwnedFd {
    let mut watched = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
    let ready = poll(&mut watched, PollTimeout::try_from(SOON).unwrap()).unwrap();
    assert_eq!(ready, 1, "the opener did not connect");
    accept4(listener, SockFlag::SOCK_CLOEXEC).unwrap()
}

pub(crate) fn inode(fd: &OwnedFd) -> u64 {
    nix::sys::stat::fstat(fd).unwrap().st_ino
}

/// `SO_NETNS_COOKIE` of any socket.
pub(crate) fn cookie(socket: &OwnedFd) -> u64 {
    u64::from_ne_bytes(option(socket, 71))
}

/// `SO_PROTOCOL` of any socket.
pub(crate) fn protocol(socket: &OwnedFd) -> i32 {
    i32::from_ne_bytes(option(socket, libc::SO_PROTOCOL))
}

fn option<const N: usize>(socket: &OwnedFd, option: libc::c_int) -> [u8; N] {
    let (mut value, mut len) = ([0; N], libc::socklen_t::try_from(N).unwrap());
    // SAFETY: both pointers are to this frame, and `len` is the size of `value`.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            value.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    assert_eq!((rc, usize::try_from(len).unwrap()), (0, N));
    value
}

pub(crate) fn assert_sockets_in(netns: &Netns, reply: OpenerReply, descriptors: &[OwnedFd]) {
    assert_eq!((reply.errno, descriptors.len()), (0, 3));
    assert_eq!(inode(&descriptors[0]), netns.inode());
    for socket in &descriptors[1..] {
        assert_eq!(cookie(socket), netns.cookie().unwrap());
        assert_eq!(getsockopt(socket, sockopt::SockType).unwrap(), SockType::Raw);
    }
}

pub(crate) fn sleeper(place: Place, cgroup: &PodCgroup) -> Process {
    let process = Spawn::program("sleep", "/bin/sleep")
        .arg("1000")
        .place(place)
        .cgroup(cgroup);
    process.start().unwrap()
}

pub(crate) fn mount_at(netns: &Netns, path: &str) {
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

//! Somebody runs code of their own inside the opener's cages. Needs root.
//!
//! Capabilities, Landlock and seccomp are per thread: each attempt runs on a thread that confines itself exactly as
//! the process does, and ends.
#![expect(unsafe_code, reason = "the attempts are raw system calls")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on ends")]
#![expect(
    clippy::disallowed_methods,
    reason = "the attempts enter namespaces and start programs"
)]

use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::path::Path;

use nix::errno::Errno;
use nix::sched::{CloneFlags, setns, unshare};
use sluice_netns_executor::opener::cage;

fn in_opener_cage<T: Send + 'static>(attempt: impl FnOnce() -> T + Send + 'static) -> T {
    let caged = std::thread::spawn(move || {
        cage::confine_opener(Path::new("/proc"), &["/run/netns".into(), "/nonexistent".into()]).unwrap();
        attempt()
    });
    caged.join().unwrap()
}

fn in_keyhole_cage<T: Send + 'static>(attempt: impl FnOnce() -> T + Send + 'static) -> T {
    let caged = std::thread::spawn(move || {
        cage::confine_keyhole().unwrap();
        attempt()
    });
    caged.join().unwrap()
}

/// A raw system call, since libc would refuse some attempts before the kernel does.
fn call(number: libc::c_long, arguments: [libc::c_long; 5]) -> Errno {
    let [first, second, third, fourth, fifth] = arguments;
    // SAFETY: the tests pass null pointers or numbers only; the kernel checks both.
    let rc = unsafe { libc::syscall(number, first, second, third, fourth, fifth) };
    if rc < 0 { Errno::last() } else { Errno::from_raw(0) }
}

fn forbidden() -> Vec<(&'static str, libc::c_long, [libc::c_long; 5])> {
    let clone_process = libc::c_long::from(libc::SIGCHLD);
    vec![
        ("mount", libc::SYS_mount, [0; 5]),
        ("umount2", libc::SYS_umount2, [0; 5]),
        ("move_mount", libc::SYS_move_mount, [0; 5]),
        ("open_tree", libc::SYS_open_tree, [0; 5]),
        ("fsopen", libc::SYS_fsopen, [0; 5]),
        ("pivot_root", libc::SYS_pivot_root, [0; 5]),
        ("chroot", libc::SYS_chroot, [0; 5]),
        (
            "ptrace",
            libc::SYS_ptrace,
            [libc::c_long::from(libc::PTRACE_ATTACH), 1, 0, 0, 0],
        ),
        ("process_vm_readv", libc::SYS_process_vm_readv, [1, 0, 0, 0, 0]),
        ("process_vm_writev", libc::SYS_process_vm_writev, [1, 0, 0, 0, 0]),
        ("pidfd_open", libc::SYS_pidfd_open, [1, 0, 0, 0, 0]),
        ("pidfd_getfd", libc::SYS_pidfd_getfd, [0; 5]),
        ("execve", libc::SYS_execve, [0; 5]),
        ("execveat", libc::SYS_execveat, [0; 5]),
        (
            "clone without CLONE_THREAD",
            libc::SYS_clone,
            [clone_process, 0, 0, 0, 0],
        ),
        ("clone3", libc::SYS_clone3, [0; 5]),
        ("bpf", libc::SYS_bpf, [0; 5]),
        ("perf_event_open", libc::SYS_perf_event_open, [0; 5]),
        ("init_module", libc::SYS_init_module, [0; 5]),
        ("finit_module", libc::SYS_finit_module, [0; 5]),
        ("kexec_load", libc::SYS_kexec_load, [0; 5]),
        ("keyctl", libc::SYS_keyctl, [0; 5]),
        ("io_uring_setup", libc::SYS_io_uring_setup, [0; 5]),
        ("userfaultfd", libc::SYS_userfaultfd, [0; 5]),
        ("openat2", libc::SYS_openat2, [0; 5]),
        ("open_by_handle_at", libc::SYS_open_by_handle_at, [0; 5]),
        ("name_to_handle_at", libc::SYS_name_to_handle_at, [0; 5]),
        ("unlinkat", libc::SYS_unlinkat, [0; 5]),
        ("renameat2", libc::SYS_renameat2, [0; 5]),
        ("mkdirat", libc::SYS_mkdirat, [0; 5]),
        ("mknodat", libc::SYS_mknodat, [0; 5]),
        ("fchmodat", libc::SYS_fchmodat, [0; 5]),
        ("fchownat", libc::SYS_fchownat, [0; 5]),
        ("setuid", libc::SYS_setuid, [0; 5]),
        ("capset", libc::SYS_capset, [0; 5]),
        ("sethostname", libc::SYS_sethostname, [0; 5]),
        ("swapon", libc::SYS_swapon, [0; 5]),
        ("quotactl", libc::SYS_quotactl, [0; 5]),
        ("bind", libc::SYS_bind, [0; 5]),
        ("listen", libc::SYS_listen, [0; 5]),
        ("setsockopt", libc::SYS_setsockopt, [0; 5]),
        ("sendto", libc::SYS_sendto, [0; 5]),
        ("kill", libc::SYS_kill, [1, 0, 0, 0, 0]),
    ]
}

#[test]
fn no_system_call_beyond_the_job_gets_through() {
    let opener = in_opener_cage(|| forbidden().map_errno());
    let keyhole = in_keyhole_cage(|| forbidden().map_errno());
    for (name, errno) in opener.into_iter().chain(keyhole) {
        assert_eq!(errno, Errno::ENOSYS, "{name}");
    }
}

trait MapErrno {
    fn map_errno(self) -> Vec<(&'static str, Errno)>;
}

impl MapErrno for Vec<(&'static str, libc::c_long, [libc::c_long; 5])> {
    fn map_errno(self) -> Vec<(&'static str, Errno)> {
        self.into_iter()
            .map(|(name, number, arguments)| (name, call(number, arguments)))
            .collect()
    }
}

#[test]
fn nothing_can_be_opened_for_writing() {
    let attempt = || {
        [
            "/proc/1/root/etc/shadow",
            "/proc/sys/kernel/core_pattern",
            "/proc/self/mem",
            "/proc/sysrq-trigger",
        ]
        .map(|path| {
            (
                path,
                File::options()
                    .write(true)
                    .open(path)
                    .map(drop)
                    .map_err(|e| e.raw_os_error()),
            )
        })
    };
    for (path, outcome) in in_opener_cage(attempt)
        .into_iter()
        .chain(in_keyhole_cage(attempt))
    {
        assert_eq!(outcome, Err(Some(libc::ENOSYS)), "{path}");
    }
}

#[test]
fn the_opener_reads_below_proc_and_nowhere_else() {
    let (inside, outside) = in_opener_cage(|| {
        let open = |path: &'static str| (path, File::open(path).map(drop).map_err(|e| e.raw_os_error()));
        (
            ["/proc/1/cgroup", "/proc/1/stat", "/proc/thread-self/net/unix"].map(open),
            [
                "/etc/shadow",
                "/proc/1/root/etc/shadow",
                "/proc/1/root",
                "/proc/1/cwd",
                "/proc/1/ns/net",
                "/proc/1/ns/mnt",
                "/proc/1/environ",
                "/proc/1/mem",
                "/proc/1/fd/0",
                "/proc/self/root/etc/shadow",
                "/",
                "/run",
            ]
            .map(open),
        )
    });
    for (path, outcome) in inside {
        assert_eq!(outcome, Ok(()), "{path}");
    }
    for (path, outcome) in outside {
        assert!(
            matches!(outcome, Err(Some(libc::EACCES | libc::EPERM))),
            "{path}: {outcome:?}"
        );
    }
}

#[test]
fn the_opener_enters_and_makes_network_namespaces_only() {
    let mount = File::open("/proc/self/ns/mnt").unwrap();
    let user = File::open("/proc/self/ns/user").unwrap();
    let refused = in_opener_cage(move || {
        [
            setns(&mount, CloneFlags::CLONE_NEWNS),
            setns(&user, CloneFlags::empty()),
            unshare(CloneFlags::CLONE_NEWNS),
            unshare(CloneFlags::CLONE_NEWUSER),
            unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS),
            unshare(CloneFlags::CLONE_NEWPID),
        ]
    });
    assert_eq!(refused, [Err(Errno::ENOSYS); 6]);
    assert_eq!(in_opener_cage(|| unshare(CloneFlags::CLONE_NEWNET)), Ok(()));
    let kept = in_keyhole_cage(|| unshare(CloneFlags::CLONE_NEWNET));
    assert_eq!(kept, Err(Errno::ENOSYS));
}

#[test]
fn only_netlink_unix_and_datagram_sockets_can_be_made() {
    let kinds = || {
        let socket = |domain, kind| {
            call(
                libc::SYS_socket,
                [libc::c_long::from(domain), libc::c_long::from(kind), 0, 0, 0],
            )
        };
        [
            socket(libc::AF_INET, libc::SOCK_STREAM),
            socket(libc::AF_INET6, libc::SOCK_STREAM),
            socket(libc::AF_INET, libc::SOCK_RAW),
            socket(libc::AF_PACKET, libc::SOCK_RAW),
            socket(libc::AF_VSOCK, libc::SOCK_STREAM),
            socket(libc::AF_ALG, libc::SOCK_SEQPACKET),
        ]
    };
    assert_eq!(in_opener_cage(kinds), [Errno::ENOSYS; 6]);
    assert_eq!(in_keyhole_cage(kinds), [Errno::ENOSYS; 6]);
    let protocols = || {
        [
            libc::NETLINK_ROUTE,
            libc::NETLINK_SOCK_DIAG,
            libc::NETLINK_NETFILTER,
            libc::NETLINK_XFRM,
            libc::NETLINK_AUDIT,
            libc::NETLINK_KOBJECT_UEVENT,
            libc::NETLINK_GENERIC,
        ]
        .map(|protocol| {
            let (domain, kind) = (libc::AF_NETLINK.into(), libc::SOCK_RAW.into());
            call(libc::SYS_socket, [domain, kind, protocol.into(), 0, 0])
        })
    };
    let (made, refused) = (Errno::from_raw(0), Errno::ENOSYS);
    assert_eq!(
        in_opener_cage(protocols),
        [made, made, made, refused, refused, refused, refused]
    );
}

#[test]
fn the_opener_cannot_change_the_network_it_enters() {
    let refused = in_opener_cage(|| {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        assert!(status.contains("CapEff:\t0000000000200000"), "{status}");
        std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").map_err(|e| e.raw_os_error())
    });
    assert_eq!(refused, Err(Some(libc::ENOSYS)));
}

#[test]
fn the_helper_cannot_read_what_it_opens() {
    let secret = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(secret.path(), "secret").unwrap();
    let path = secret.path().to_owned();
    let (read, mapped) = in_keyhole_cage(move || {
        let mut file = File::open(path).unwrap();
        let fd = libc::c_long::from(file.as_raw_fd());
        let read = file.read(&mut [0; 8]).map_err(|e| e.raw_os_error());
        let (read_only, private) = (
            libc::c_long::from(libc::PROT_READ),
            libc::c_long::from(libc::MAP_PRIVATE),
        );
        (read, call(libc::SYS_mmap, [0, 4096, read_only, private, fd]))
    });
    assert_eq!((read, mapped), (Err(Some(libc::ENOSYS)), Errno::ENOSYS));
}

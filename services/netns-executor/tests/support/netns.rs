//! A network namespace for one test: entered by threads that end, gone with its last descriptor.
#![allow(dead_code, reason = "each test binary uses what it needs")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first surprise"
)]

use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Output, Stdio};

use sluice_netns_executor::netlink::PodSockets;

pub(crate) struct Netns {
    fd: OwnedFd,
}

impl Netns {
    /// A new namespace with lo up. Fails without root.
    pub(crate) fn new() -> Self {
        let fd = std::thread::spawn(|| {
            #[expect(clippy::disallowed_methods, reason = "the thread ends with this closure")]
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("these tests need root");
            File::open("/proc/thread-self/ns/net").unwrap().into()
        })
        .join()
        .unwrap();
        let netns = Self { fd };
        netns.sh("ip link set lo up");
        netns
    }

    /// Runs a closure inside, on a thread of its own.
    pub(crate) fn run<T: Send>(&self, inside: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                #[expect(clippy::disallowed_methods, reason = "the thread ends with this closure")]
                nix::sched::setns(self.fd.as_fd(), nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
                inside()
            });
            thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    pub(crate) fn sockets(&self) -> PodSockets {
        self.run(|| PodSockets::open().unwrap())
    }

    /// Runs a shell line inside and returns what it printed; panics if it fails.
    pub(crate) fn sh(&self, line: &str) -> String {
        self.sh_with(line, "")
    }

    /// As `sh`, with input.
    pub(crate) fn sh_with(&self, line: &str, input: &str) -> String {
        let output = self.try_sh(line, input);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{line}\n{input}\n{stderr}");
        String::from_utf8(output.stdout).unwrap()
    }

    pub(crate) fn try_sh(&self, line: &str, input: &str) -> Output {
        self.run(|| {
            #[expect(
                clippy::disallowed_methods,
                reason = "kernel state is asserted with independent tools"
            )]
            let mut command = Command::new("sh");
            let mut child = command
                .args(["-c", line])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
            child.wait_with_output().unwrap()
        })
    }

    /// Moves a new veth's other end into `other`, both named and up.
    pub(crate) fn veth(&self, name: &str, other: &Self, other_name: &str) {
        let target = format!(
            "/proc/{}/fd/{}",
            std::process::id(),
            std::os::fd::AsRawFd::as_raw_fd(&other.fd)
        );
        self.sh(&format!(
            "ip link add {name} type veth peer name {other_name} netns {target}"
        ));
        self.sh(&format!("ip link set {name} up"));
        other.sh(&format!("ip link set {other_name} up"));
    }

    /// Rules, routing rules and the routes of all tables, as independent tools print them.
    pub(crate) fn state(&self) -> String {
        self.sh("nft list ruleset; ip -4 rule; ip -6 rule; ip -4 route show table all; ip -6 route show table all")
    }
}

/// A running shell line whose output is collected.
pub(crate) struct Running {
    child: std::process::Child,
    output: std::sync::mpsc::Receiver<String>,
    seen: String,
}

impl Running {
    /// Repeats `poke` until a line of the output holds `text`; panics after ten seconds.
    pub(crate) fn wait_for(&mut self, poke: impl Fn() -> String, text: &str) {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while std::time::Instant::now() < deadline {
            poke();
            while let Ok(line) = self.output.recv_timeout(std::time::Duration::from_millis(50)) {
                let found = line.contains(text);
                self.seen.push_str(&line);
                self.seen.push('\n');
                if found {
                    return;
                }
            }
        }
        panic!("{text} did not appear in\n{}", self.seen);
    }

    /// Closes its input, waits for its end and returns all it printed.
    pub(crate) fn finish(mut self) -> String {
        drop(self.child.stdin.take());
        self.child.wait().unwrap();
        self.seen.extend(self.output.iter().map(|line| line + "\n"));
        self.seen
    }
}

impl Netns {
    /// Starts a shell line inside.
    pub(crate) fn spawn(&self, line: &str) -> Running {
        let mut child = self.run(|| {
            #[expect(
                clippy::disallowed_methods,
                reason = "kernel state is asserted with independent tools"
            )]
            let mut command = Command::new("sh");
            command
                .args(["-c", line])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap()
        });
        let stdout = std::io::BufReader::new(child.stdout.take().unwrap());
        let (sender, output) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            use std::io::BufRead as _;
            stdout
                .lines()
                .map_while(Result::ok)
                .try_for_each(|line| sender.send(line))
        });
        Running {
            child,
            output,
            seen: String::new(),
        }
    }
}

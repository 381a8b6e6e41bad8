//! Process 1 of a PID namespace, with a real service under it. Needs root.
#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]
#![expect(clippy::disallowed_methods, reason = "a test starts the program under test")]

use std::io::{BufRead as _, BufReader, Lines};
use std::process::{Child, ChildStdout, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

struct Container {
    unshare: Child,
    output: Lines<BufReader<ChildStdout>>,
}

impl Container {
    fn start(arguments: &[&str]) -> Self {
        let tests = std::env::current_exe().unwrap();
        let target = tests.parent().unwrap().parent().unwrap();
        let mut unshare = Command::new("unshare")
            .args(["--pid", "--fork", "--kill-child"])
            .arg(target.join("examples/first_process"))
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(unshare.stdout.take().unwrap()).lines();
        Self { unshare, output }
    }

    fn says(&mut self, what: &str) {
        assert_eq!(self.output.next().unwrap().unwrap(), what);
    }

    fn init(&self) -> Pid {
        only_child(Pid::from_raw(self.unshare.id().cast_signed()))
    }

    fn kill_service(&self) {
        kill(only_child(self.init()), Signal::SIGKILL).unwrap();
    }

    /// The exit status, once everything is over and said.
    fn ended(mut self) -> Option<i32> {
        assert!(self.output.next().is_none());
        self.unshare.wait().unwrap().code()
    }
}

/// The one child of a process, by `/proc/PID/task/PID/children` (proc(5)).
fn only_child(parent: Pid) -> Pid {
    let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap();
    Pid::from_raw(children.trim().parse().unwrap())
}

#[test]
fn a_service_that_is_killed_is_started_again_by_the_same_process_1() {
    let mut container = Container::start(&[]);
    container.says("serving");
    let init = container.init();
    for _ in 0..3 {
        container.kill_service();
        container.says("serving");
        assert_eq!(container.init(), init);
    }
    kill(init, Signal::SIGTERM).unwrap();
    container.says("stopping");
    assert_eq!(container.ended(), Some(0));
}

/// As one that stands by: nothing went wrong.
#[test]
fn a_service_that_is_asked_to_stop_before_it_handles_that_has_not_failed() {
    let mut container = Container::start(&["unready"]);
    container.says("serving");
    kill(container.init(), Signal::SIGTERM).unwrap();
    assert_eq!(container.ended(), Some(0));
}

#[test]
fn a_service_that_dies_too_often_ends_the_container_with_its_signal() {
    let mut container = Container::start(&[]);
    container.says("serving");
    for _ in 0..5 {
        container.kill_service();
        container.says("serving");
    }
    container.kill_service();
    assert_eq!(container.ended(), Some(128 + Signal::SIGKILL as i32));
}

#[test]
fn a_service_that_gives_up_at_once_is_not_tried_again() {
    let mut container = Container::start(&["7"]);
    container.says("serving");
    assert_eq!(container.ended(), Some(7));
}

#[test]
fn outside_a_namespace_of_its_own_there_is_nobody_above_the_service() {
    let tests = std::env::current_exe().unwrap();
    let example = tests
        .parent()
        .unwrap()
        .parent()
        .unwrap()
        .join("examples/first_process");
    let output = Command::new(example).arg("7").output().unwrap();
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(output.stdout, b"serving\n");
}

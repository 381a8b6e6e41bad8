//! What a service does besides serving when it is process 1 of its container: it starts the service as a child and
//! another one when that dies.
//!
//! The kubelet restarts a container that ends, but makes it wait 10 s from the second time on and up to minutes after
//! that (`CrashLoopBackOff`). A node agent cannot be away for so long because of two crashes in an hour.
#![expect(unsafe_code, reason = "fork has no safe form")]

use std::collections::VecDeque;
use std::io;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};

/// So many deaths within [`WINDOW`] are made good at once; one more ends the container, and the kubelet slows the
/// loop down and shows it.
const DEATHS: usize = 5;
const WINDOW: Duration = Duration::from_mins(1);
/// A service that gives up by itself so soon would do so again: its settings are wrong, or the node is.
const FIRST_MOMENTS: Duration = Duration::from_secs(1);

/// Runs `service` in this process, or, if this is process 1 of a PID namespace, in a child: in one after the other, until the
/// service has ended for good. The exit status is the service's own, or 128 and the signal that ended it, or 0 if that is the signal
/// by which it was asked to stop.
///
/// Process 1 hands SIGTERM and SIGINT on to the service, waits for whatever processes are left to it
/// (pid_namespaces(7)), and does nothing else.
///
/// Call it before another thread exists.
pub fn run(service: impl FnOnce() -> ExitCode) -> ExitCode {
    match begin() {
        Ok(Role::Service) => service(),
        Ok(Role::Init(code)) => code,
        Err(error) => {
            tracing::error!(error = %error, "cannot look after the service");
            ExitCode::FAILURE
        }
    }
}

/// Which process goes on.
enum Role {
    /// The one that serves.
    Service,
    /// Process 1, when all is over.
    Init(ExitCode),
}

fn begin() -> io::Result<Role> {
    if Pid::this().as_raw() != 1 {
        return Ok(Role::Service);
    }
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT] {
        signals.add(signal);
    }
    let before = signals.thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_BLOCK)?;
    let mut deaths = VecDeque::new();
    loop {
        let started = Instant::now();
        // SAFETY: no other thread exists yet (documented precondition), so the child may go on as usual.
        let service = match unsafe { fork() }? {
            ForkResult::Child => {
                before.thread_set_mask()?;
                return Ok(Role::Service);
            }
            ForkResult::Parent { child } => child,
        };
        let end = wait_for(service, &signals)?;
        if end.asked || !end.is_worth_another(started.elapsed()) || too_many(&mut deaths) {
            return Ok(Role::Init(end.exit_code()));
        }
        tracing::error!(end = %end.words(), "the service died; starting it again");
    }
}

/// How a service ended.
#[derive(Debug, Clone, Copy)]
struct End {
    status: WaitStatus,
    /// It was asked to stop.
    asked: bool,
}

impl End {
    fn is_worth_another(self, after: Duration) -> bool {
        match self.status {
            WaitStatus::Exited(_, code) => code != 0 && after >= FIRST_MOMENTS,
            _ => true,
        }
    }

    fn exit_code(self) -> ExitCode {
        let code = match self.status {
            WaitStatus::Exited(_, code) => code,
            // One that only stood by has nothing to finish, and does not handle the signal. A pod with it has not failed.
            WaitStatus::Signaled(_, Signal::SIGTERM | Signal::SIGINT, _) if self.asked => 0,
            WaitStatus::Signaled(_, signal, _) => 128 + signal as i32,
            _ => 1,
        };
        ExitCode::from(u8::try_from(code).unwrap_or(1))
    }

    fn words(self) -> String {
        match self.status {
            WaitStatus::Exited(_, code) => format!("exit status {code}"),
            WaitStatus::Signaled(_, signal, _) => signal.to_string(),
            other => format!("{other:?}"),
        }
    }
}

/// Until the service has ended; others that end meanwhile are not ours and only waited for.
fn wait_for(service: Pid, signals: &SigSet) -> io::Result<End> {
    let mut asked = false;
    loop {
        match signals.wait()? {
            Signal::SIGCHLD => {
                if let Some(status) = reap(service)? {
                    return Ok(End { status, asked });
                }
            }
            signal => {
                asked = true;
                match kill(service, signal) {
                    // It has just ended, which SIGCHLD is about to say.
                    Ok(()) | Err(Errno::ESRCH) => {}
                    Err(errno) => return Err(errno.into()),
                }
            }
        }
    }
}

/// Waits for every process that has ended; several may have for one SIGCHLD.
fn reap(service: Pid) -> io::Result<Option<WaitStatus>> {
    let mut end = None;
    loop {
        match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => return Ok(end),
            Ok(status) if status.pid() == Some(service) => end = Some(status),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Notes a death; whether there were too many lately.
fn too_many(deaths: &mut VecDeque<Instant>) -> bool {
    let now = Instant::now();
    deaths.retain(|death| now.duration_since(*death) < WINDOW);
    deaths.push_back(now);
    deaths.len() > DEATHS
}

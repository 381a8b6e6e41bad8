//! Dialling the executor and answering it, one request at a time.

use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use nix::sys::time::TimeSpec;
use sluice_proto::opener::{OpenerReply, OpenerRequest, REQUEST_LEN};
use sluice_proto::transport::descriptors::{Received, TransportError, receive, send};
use sluice_runtime::lease::{Candidate, Lease, LeaseError, Turn};
use sluice_runtime::redial::Redial;
use sluice_runtime::telemetry::chain;

use super::enter::{self, Opened};
use super::keyhole::{Keyhole, KeyholeError};
use super::path::{self, Allowed};
use super::scan::{self, Scan};

/// The longest pause between attempts: every ADD of a mesh pod waits for the host's namespace, and a restarted executor for
/// all others.
const LONGEST_PAUSE: Duration = Duration::from_millis(250);
/// Between two looks whether the opener that serves this node has ended.
const STANDING_BY: Duration = Duration::from_millis(20);
/// Requests come in bursts; after this long without one the next may be far away.
const IDLE: Duration = Duration::from_millis(100);

/// What the opener was started with.
#[derive(Debug, Clone)]
pub struct Options {
    /// The executor's opener socket.
    pub socket: PathBuf,
    /// The host's proc file system.
    pub host_proc: PathBuf,
    /// The host's network namespace, where it is not that of the host's process 1.
    pub host_netns: Option<PathBuf>,
    /// Directories whose files may be named by path.
    pub netns_directories: Vec<PathBuf>,
    /// Wait for the end of an opener that serves this node.
    pub stand_by: bool,
}

/// The opener cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum OpenerError {
    /// Without the host's namespace no pod could be told from it.
    #[error("cannot open the host's network namespace at {}", path.display())]
    HostNetns {
        /// Where it was looked for.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Signals or the wait for them.
    #[error("{call} failed")]
    Call {
        /// Which call.
        call: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The helper process.
    #[error(transparent)]
    Keyhole(#[from] KeyholeError),
    /// Another opener serves this node, or that cannot be known.
    #[error(transparent)]
    Lease(#[from] LeaseError),
}

impl OpenerError {
    fn call(call: &'static str) -> impl FnOnce(Errno) -> Self {
        move |errno| Self::Call {
            call,
            source: errno.into(),
        }
    }
}

/// The opener's state.
#[derive(Debug)]
pub struct Opener {
    options: Options,
    keyhole: Keyhole,
    host: OwnedFd,
    host_id: scan::NetnsId,
    scan: Scan,
    signals: SignalFd,
}

/// How a wait ended.
enum Wake {
    Readable,
    Elapsed,
    Terminate,
}

impl Opener {
    /// Opens the host's namespace and takes over SIGTERM and SIGINT.
    pub fn new(options: Options, keyhole: Keyhole) -> Result<Self, OpenerError> {
        let path = options
            .host_netns
            .clone()
            .unwrap_or_else(|| options.host_proc.join("1/ns/net"));
        let opened = match &options.host_netns {
            Some(path) => path::open_trusted(path),
            None => keyhole.netns_of(1)?,
        };
        let (host, host_id) = opened
            .and_then(|netns| scan::id_of(&netns).map(|id| (netns, id)))
            .map_err(|errno| OpenerError::HostNetns {
                path,
                source: errno.into(),
            })?;
        // As process 1 of a container, a signal without a handler would be ignored.
        let mut set = SigSet::empty();
        set.add(Signal::SIGTERM);
        set.add(Signal::SIGINT);
        set.thread_block().map_err(OpenerError::call("sigprocmask"))?;
        let signals =
            SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC).map_err(OpenerError::call("signalfd"))?;
        Ok(Self {
            options,
            keyhole,
            host,
            host_id,
            scan: Scan::default(),
            signals,
        })
    }

    /// Serves, once `candidate` has the lease, until a signal asks to stop; dials again whenever there is no connection, after a
    /// while ever more slowly.
    pub fn run(&mut self, candidate: Candidate) -> Result<(), OpenerError> {
        let Some(_lease) = self.take_lease(candidate)? else {
            return Ok(());
        };
        let (mut redial, mut told) = (Redial::new(LONGEST_PAUSE), false);
        loop {
            match dial(&self.options.socket) {
                Ok(connection) => {
                    tracing::info!(socket = %self.options.socket.display(), "connected to the executor");
                    if self.serve(&connection)? {
                        return Ok(());
                    }
                    redial.reset();
                    told = false;
                }
                Err(errno) if !told => {
                    told = true;
                    tracing::warn!(socket = %self.options.socket.display(), error = %errno, "executor not reachable, dialling on");
                }
                Err(_) => {}
            }
            let pause = redial.failed(Instant::now());
            if matches!(self.wait(None, Some(pause))?, Wake::Terminate) {
                return Ok(());
            }
        }
    }

    /// The lease; `None`: asked to stop. The executor listens to one opener, and two would take it from each other.
    fn take_lease(&self, candidate: Candidate) -> Result<Option<Lease>, OpenerError> {
        if !self.options.stand_by {
            return Ok(Some(candidate.take_now()?));
        }
        let mut turn = candidate.try_take()?;
        if let Turn::Theirs(candidate) = &turn {
            candidate.tell_waiting();
        }
        loop {
            turn = match turn {
                Turn::Ours(lease) => return Ok(Some(lease)),
                Turn::Theirs(candidate) => {
                    if matches!(self.wait(None, Some(STANDING_BY))?, Wake::Terminate) {
                        return Ok(None);
                    }
                    candidate.try_take()?
                }
            };
        }
    }

    /// Answers one connection; true: asked to stop.
    fn serve(&mut self, connection: &OwnedFd) -> Result<bool, OpenerError> {
        loop {
            let woken = match self.wait(Some(connection), Some(IDLE))? {
                Wake::Elapsed => {
                    crate::sys::give_back_code();
                    self.wait(Some(connection), None)?
                }
                woken => woken,
            };
            if matches!(woken, Wake::Terminate) {
                return Ok(true);
            }
            match self.answer(connection) {
                Ok(outcome) => outcome?,
                Err(TransportError::Closed) => {
                    tracing::info!("the executor closed the connection");
                    return Ok(false);
                }
                Err(error) => {
                    tracing::warn!(
                        error = chain(&error),
                        "connection to the executor is unusable, closing it"
                    );
                    return Ok(false);
                }
            }
        }
    }

    /// Outer error: the connection; inner error: ourselves.
    fn answer(&mut self, connection: &OwnedFd) -> Result<Result<(), OpenerError>, TransportError> {
        let mut received = receive(connection, REQUEST_LEN, 1)?;
        if received.bytes.is_empty() {
            return Err(TransportError::Closed);
        }
        let request = OpenerRequest::decode(&received.bytes)?;
        let (reply, descriptors) = match self.perform(&request, &mut received) {
            Ok(done) => done,
            Err(error) => return Ok(Err(error.into())),
        };
        tracing::info!(target: "audit", request = ?request, errno = reply.errno, scanned = reply.scanned, "answered");
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        send(connection, &reply.encode(), &descriptors)?;
        Ok(Ok(()))
    }

    fn perform(
        &mut self,
        request: &OpenerRequest,
        received: &mut Received,
    ) -> Result<(OpenerReply, Vec<OwnedFd>), KeyholeError> {
        let proc = &self.options.host_proc;
        let netns = match request {
            OpenerRequest::Host => self.host.try_clone().map_err(|error| enter::errno_of(&error)),
            OpenerRequest::Descriptor => received.descriptors.pop().ok_or(Errno::EBADF),
            OpenerRequest::Path(path) => match path::check(path, &self.options.netns_directories) {
                Some(Allowed::Process(pid)) => self.keyhole.netns_of(pid)?,
                Some(Allowed::File { directory, name }) => path::open_netns(directory, name),
                None => Err(Errno::EPERM),
            },
            OpenerRequest::Candidate { uid, index } => self.scan.open(&self.keyhole, uid, *index)?,
            OpenerRequest::Scan => {
                let scan = Scan::run(proc, &self.keyhole, self.host_id)?;
                let errno = scan.as_ref().err().map_or(0, |errno| *errno as i32);
                self.scan = scan.unwrap_or_default();
                let mut reply = failed(errno);
                reply.scanned = self.scan.scanned;
                return Ok((reply, Vec::new()));
            }
            OpenerRequest::Scratch => return Ok(outcome(enter::open_scratch(proc))),
            OpenerRequest::Diagnostics => {
                let netns = received.descriptors.pop().ok_or(Errno::EBADF);
                return Ok(match netns.and_then(|netns| self.diagnostics(netns)) {
                    Ok(socket) => (failed(0), vec![socket]),
                    Err(errno) => (failed(errno as i32), Vec::new()),
                });
            }
        };
        Ok(outcome(netns.and_then(|netns| enter::open_in(netns, proc))))
    }

    /// Only pods are enrolled; with CAP_NET_ADMIN such a socket can also end connections, and the host's are nobody's
    /// business.
    fn diagnostics(&self, netns: OwnedFd) -> Result<OwnedFd, Errno> {
        if scan::id_of(&netns)? == self.host_id {
            return Err(Errno::EPERM);
        }
        enter::open_diagnostics(netns, &self.options.host_proc)
    }

    /// Waits until `connection` is readable, `limit` has passed, or a signal asks to stop.
    fn wait(&self, connection: Option<&OwnedFd>, limit: Option<Duration>) -> Result<Wake, OpenerError> {
        let readable = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut watched = vec![readable(self.signals.as_fd()), readable(self.keyhole.as_fd())];
        watched.extend(connection.map(|connection| readable(connection.as_fd())));
        loop {
            match ppoll(&mut watched, limit.map(TimeSpec::from_duration), None) {
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(OpenerError::call("ppoll")(errno)),
                Ok(0) => return Ok(Wake::Elapsed),
                Ok(_) if watched[0].any() == Some(true) => return Ok(Wake::Terminate),
                Ok(_) if watched[1].any() == Some(true) => {
                    return Err(KeyholeError::Gone(TransportError::Closed).into());
                }
                Ok(_) => return Ok(Wake::Readable),
            }
        }
    }
}

fn outcome(opened: Result<Opened, Errno>) -> (OpenerReply, Vec<OwnedFd>) {
    match opened {
        Ok(opened) => {
            let mut reply = failed(0);
            reply.legacy = opened.legacy();
            (reply, opened.into_descriptors())
        }
        Err(errno) => (failed(errno as i32), Vec::new()),
    }
}

fn failed(errno: i32) -> OpenerReply {
    OpenerReply {
        errno,
        legacy: sluice_proto::opener::LegacyTables::default(),
        scanned: 0,
    }
}

fn dial(path: &Path) -> Result<OwnedFd, Errno> {
    let socket = socket(
        AddressFamily::Unix,
        SockType::SeqPacket,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(socket)
}

//! Starting the processes under test as a node would: user, capabilities, NoNewPrivs, namespaces, cgroup; and ending
//! them. The one module of the testkit that executes programs.
#![expect(unsafe_code, reason = "Command::pre_exec")]
#![expect(clippy::disallowed_methods, reason = "the one process module of the testkit")]

mod identity;
pub mod status;
mod tool;

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::Duration;

use anyhow::Context;
pub use caps::Capability;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use self::identity::Descent;
pub use self::identity::Identity;
use self::status::ProcStatus;
pub(crate) use self::tool::start_captured;
pub use self::tool::{json, output, text};
use crate::cgroup::PodCgroup;
use crate::netns::Place;
use crate::pod::lock;
use crate::wait::poll_until;

/// A process to be started, any number of times.
#[derive(Debug)]
pub struct Spawn {
    name: String,
    program: PathBuf,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    place: Place,
    identity: Option<Identity>,
    log: Option<PathBuf>,
    cgroup: Option<File>,
    nofile: Option<u64>,
}

impl Spawn {
    /// One of this workspace's binaries; see [`binary`].
    pub fn binary(name: &str) -> anyhow::Result<Self> {
        Ok(Self::program(name, binary(name)?))
    }

    /// Any program; `name` is for messages.
    pub fn program(name: &str, program: impl Into<PathBuf>) -> Self {
        Self {
            name: name.to_owned(),
            program: program.into(),
            args: Vec::new(),
            env: Vec::new(),
            place: Place::default(),
            identity: None,
            log: None,
            cgroup: None,
            nofile: None,
        }
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<A: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args
            .extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Sets an environment variable; of the caller's only `PATH`, `RUST_LOG` and `RUST_BACKTRACE` are passed on.
    #[must_use]
    pub fn env(mut self, key: &str, value: impl AsRef<OsStr>) -> Self {
        self.env.push((key.into(), value.as_ref().to_owned()));
        self
    }

    /// The namespaces it runs in; default the caller's.
    #[must_use]
    pub fn place(mut self, place: Place) -> Self {
        self.place = place;
        self
    }

    /// Drops to an identity, with NoNewPrivs; default: stays root with everything.
    #[must_use]
    pub fn identity(mut self, identity: Identity) -> Self {
        self.identity = Some(identity);
        self
    }

    /// Appends stderr and stdout to this file; default: `/dev/null`.
    #[must_use]
    pub fn log(mut self, path: impl Into<PathBuf>) -> Self {
        self.log = Some(path.into());
        self
    }

    /// Soft and hard limit of open files.
    #[must_use]
    pub fn nofile(mut self, limit: u64) -> Self {
        self.nofile = Some(limit);
        self
    }

    /// Starts it inside a cgroup.
    #[must_use]
    pub fn cgroup(mut self, cgroup: &PodCgroup) -> Self {
        self.cgroup = cgroup.procs().ok();
        self
    }

    /// Starts it.
    pub fn start(self) -> anyhow::Result<Process> {
        let child = self.launch()?;
        Ok(Process {
            spawn: Arc::new(self),
            child: Mutex::new(child),
        })
    }

    fn command(&self) -> anyhow::Result<Command> {
        let mut command = Command::new(&self.program);
        command.args(&self.args).env_clear().stdin(Stdio::null());
        for key in ["PATH", "RUST_LOG", "RUST_BACKTRACE"] {
            if let Some(value) = std::env::var_os(key) {
                command.env(key, value);
            }
        }
        command.envs(self.env.iter().map(|(k, v)| (k, v)));
        match &self.log {
            Some(path) => {
                let file = File::options().append(true).create(true).open(path);
                let file = file.with_context(|| format!("opening {}", path.display()))?;
                command.stdout(file.try_clone()?).stderr(file);
            }
            None => {
                command.stdout(Stdio::null()).stderr(Stdio::null());
            }
        }
        let place = self.place.clone();
        let cgroup = self.cgroup.as_ref().map(File::try_clone).transpose()?;
        let nofile = self.nofile;
        let identity = self.identity.as_ref().map(Descent::plan);
        // SAFETY: the closure makes system calls on values prepared before the fork; it neither allocates nor locks.
        unsafe {
            command.pre_exec(move || {
                place.enter()?;
                if let Some(mut procs) = cgroup.as_ref() {
                    procs.write_all(b"0")?;
                }
                if let Some(limit) = nofile {
                    use nix::sys::resource::{Resource, setrlimit};
                    setrlimit(Resource::RLIMIT_NOFILE, limit, limit)?;
                }
                if let Some(identity) = &identity {
                    identity.descend()?;
                }
                // After the change of user, which clears it (prctl(2)).
                nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
                Ok(())
            });
        }
        Ok(command)
    }

    fn launch(&self) -> anyhow::Result<Child> {
        let mut command = self.command()?;
        on_spawner(move || command.spawn())?
            .with_context(|| format!("starting {} ({})", self.name, self.program.display()))
    }
}

/// A running process; killed and reaped when dropped.
#[derive(Debug)]
pub struct Process {
    spawn: Arc<Spawn>,
    child: Mutex<Child>,
}

impl Process {
    /// Process id.
    pub fn pid(&self) -> u32 {
        lock(&self.child).id()
    }

    /// Name given at the start.
    pub fn name(&self) -> &str {
        &self.spawn.name
    }

    /// What it wrote to its log file so far, all lives of it.
    pub fn log_text(&self) -> String {
        let bytes = self
            .spawn
            .log
            .as_ref()
            .and_then(|path| std::fs::read(path).ok())
            .unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Whether it still runs.
    pub fn is_running(&self) -> bool {
        matches!(lock(&self.child).try_wait(), Ok(None))
    }

    /// Its state as the kernel tells it.
    pub fn status(&self) -> anyhow::Result<ProcStatus> {
        ProcStatus::read(self.pid())
    }

    /// Waits until `ready` holds; fails at once if the process ends, with the end of its log.
    pub fn wait_ready(&self, within: Duration, mut ready: impl FnMut() -> bool) -> anyhow::Result<()> {
        let outcome = poll_until(&format!("{} is ready", self.name()), within, || {
            if ready() {
                return Some(true);
            }
            (!self.is_running()).then_some(false)
        });
        let tail = || {
            let log = self.log_text();
            let lines: Vec<&str> = log.lines().rev().take(20).collect();
            lines.into_iter().rev().collect::<Vec<_>>().join("\n")
        };
        match outcome {
            Ok(true) => Ok(()),
            Ok(false) => anyhow::bail!("{} ended; its log:\n{}", self.name(), tail()),
            Err(late) => {
                Err(anyhow::Error::new(late).context(format!("log of {}:\n{}", self.name(), tail())))
            }
        }
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let pid = Pid::from_raw(i32::try_from(self.pid())?);
        kill(pid, signal).with_context(|| format!("{signal} to {}", self.name()))
    }

    /// SIGKILL, and waits for the end.
    pub fn kill(&self) -> anyhow::Result<()> {
        let mut child = lock(&self.child);
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// SIGTERM, and waits for the end at most `within`.
    pub fn terminate(&self, within: Duration) -> anyhow::Result<ExitStatus> {
        self.signal(Signal::SIGTERM)?;
        self.wait(within)
    }

    /// Waits for the end at most `within`.
    pub fn wait(&self, within: Duration) -> anyhow::Result<ExitStatus> {
        let what = format!("{} ends", self.name());
        Ok(poll_until(&what, within, || {
            lock(&self.child).try_wait().ok().flatten()
        })?)
    }

    /// Kills it if it runs, and starts it again with the same arguments.
    pub fn restart(&self) -> anyhow::Result<()> {
        self.kill()?;
        self.start_again()
    }

    /// Starts the same once more beside it, and waits until that one has ended.
    pub fn rival(&self, within: Duration) -> anyhow::Result<ExitStatus> {
        let mut rival = self.spawn.launch()?;
        let what = format!("a second {} ends", self.name());
        let ended = poll_until(&what, within, || rival.try_wait().ok().flatten());
        if ended.is_err() {
            rival.kill()?;
            rival.wait()?;
        }
        Ok(ended?)
    }

    /// Starts the same once more beside it.
    pub fn beside(&self) -> anyhow::Result<Self> {
        Ok(Self {
            spawn: Arc::clone(&self.spawn),
            child: Mutex::new(self.spawn.launch()?),
        })
    }

    /// From now on `next` is this process; the one that was is killed if it still runs.
    pub fn hand_over(&self, next: Self) {
        std::mem::swap(&mut *lock(&self.child), &mut *lock(&next.child));
        drop(next);
    }

    /// Starts it again after it ended.
    pub fn start_again(&self) -> anyhow::Result<()> {
        anyhow::ensure!(!self.is_running(), "{} still runs", self.name());
        *lock(&self.child) = self.spawn.launch()?;
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// Path of one of this workspace's binaries: in `SLUICE_BIN_DIR` if set, else where cargo put them for the running test.
pub fn binary(name: &str) -> anyhow::Result<PathBuf> {
    let dir = if let Some(dir) = std::env::var_os("SLUICE_BIN_DIR") {
        PathBuf::from(dir)
    } else {
        let exe = std::env::current_exe()?;
        let dir = exe.parent().context("the running program has no directory")?;
        // Tests are in target/<profile>/deps, binaries one up.
        if dir.ends_with("deps") {
            dir.parent().unwrap_or(dir).to_owned()
        } else {
            dir.to_owned()
        }
    };
    let path = dir.join(name);
    anyhow::ensure!(
        path.is_file(),
        "{} is not built (cargo build --workspace --bins)",
        path.display()
    );
    Ok(path)
}

type Job = Box<dyn FnOnce() + Send>;

/// Runs `f` on a thread that lives as long as this program: PR_SET_PDEATHSIG fires when the *thread* that forked ends.
fn on_spawner<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> anyhow::Result<T> {
    static SPAWNER: OnceLock<mpsc::Sender<Job>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (sender, jobs) = mpsc::channel::<Job>();
        std::thread::spawn(move || jobs.into_iter().for_each(|job| job()));
        sender
    });
    let (sender, result) = mpsc::channel();
    let job: Job = Box::new(move || drop(sender.send(f())));
    spawner
        .send(job)
        .map_err(|_| anyhow::anyhow!("the spawner thread is gone"))?;
    Ok(result.recv()?)
}

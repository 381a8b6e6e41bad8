//! A node in a directory: what the installer keeps right, a broker that says what a test wants, the container runtime's
//! way of choosing a configuration, and the installer itself as a process.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;
use sluice_proto::paths::RunDir;
use sluice_proto::pb::node::node_lifecycle_server::{NodeLifecycle, NodeLifecycleServer};
use sluice_proto::pb::node::{
    InstallerReport, Lifecycle, NodeState, PluginCredentials, ReportResponse, WatchRequest,
};
use sluice_proto::transport::preamble::PreambleStream;
use sluice_proto::transport::uds::bind_stream;
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};

pub(crate) const SOON: Duration = Duration::from_secs(10);
pub(crate) const OWNED: &str = "02-sluice.conflist";
pub(crate) const PODNET: &str = r#"{"cniVersion":"0.4.0","name":"podnet","plugins":[
  {"type":"ptp","mtu":1450.0,"ipam":{"type":"host-local","subnet":"10.20.0.0/24"}},
  {"type":"portmap","capabilities":{"portMappings":true}}]}
"#;

/// Polls until `get` gives something.
pub(crate) fn wait_for<T>(what: &str, within: Duration, mut get: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + within;
    loop {
        if let Some(found) = get() {
            return found;
        }
        assert!(Instant::now() < end, "not within {within:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// One of our binaries: as shipped, in `SLUICE_BIN_DIR`, if that is set, else as cargo built it for the tests.
pub(crate) fn binary(name: &str) -> PathBuf {
    let built = match name {
        "installer" => env!("CARGO_BIN_EXE_installer"),
        _ => env!("CARGO_BIN_EXE_sluice-cni-removed"),
    };
    match std::env::var_os("SLUICE_BIN_DIR") {
        Some(directory) => Path::new(&directory).join(name),
        None => built.into(),
    }
}

/// A broker that says what a test wants.
#[derive(Debug)]
pub(crate) struct FakeBroker {
    pub(crate) state: watch::Sender<NodeState>,
    reports: Arc<Mutex<Vec<InstallerReport>>>,
    runtime: tokio::runtime::Runtime,
    socket: PathBuf,
}

#[derive(Debug, Clone)]
struct Service {
    state: watch::Receiver<NodeState>,
    reports: Arc<Mutex<Vec<InstallerReport>>>,
}

#[tonic::async_trait]
impl NodeLifecycle for Service {
    type WatchStream = std::pin::Pin<Box<dyn Stream<Item = Result<NodeState, Status>> + Send>>;

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let mut ended = false;
        let states = WatchStream::new(self.state.clone()).take_while(move |state| {
            let before = ended;
            ended = state.r#final;
            !before
        });
        Ok(Response::new(Box::pin(states.map(Ok))))
    }

    async fn report(&self, report: Request<InstallerReport>) -> Result<Response<ReportResponse>, Status> {
        self.reports.lock().unwrap().push(report.into_inner());
        Ok(Response::new(ReportResponse {}))
    }
}

pub(crate) fn serving() -> NodeState {
    NodeState {
        can_serve: true,
        lifecycle: Lifecycle::Keep.into(),
        lifecycle_reason: "the DaemonSet wants this node".into(),
        credentials: Some(credentials("eyJhbGciOiJSUzI1NiJ9.first-token.signature")),
        ..NodeState::default()
    }
}

pub(crate) fn credentials(token: &str) -> PluginCredentials {
    PluginCredentials {
        server: "https://10.96.0.1:443".into(),
        ca_pem: "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n".into(),
        token: token.into(),
        expires_unix: 4_000_000_000,
    }
}

impl FakeBroker {
    fn start(run: &RunDir, state: NodeState) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let (state, receiver) = watch::channel(state);
        let reports = Arc::default();
        let service = Service {
            state: receiver,
            reports: Arc::clone(&reports),
        };
        let socket = run.node_socket();
        let context = runtime.enter();
        let listener = bind_stream(&socket, 0o660, None).unwrap();
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let Ok(stream) = PreambleStream::accept(stream).await else {
                    continue;
                };
                let server = tonic::transport::Server::builder()
                    .add_service(NodeLifecycleServer::new(service.clone()))
                    .serve_with_incoming(tokio_stream::once(Ok::<_, std::io::Error>(stream)));
                tokio::spawn(server);
            }
        });
        drop(context);
        Self {
            state,
            reports,
            runtime,
            socket,
        }
    }

    pub(crate) fn say(&self, change: impl FnOnce(&mut NodeState)) {
        self.state.send_modify(change);
    }

    pub(crate) fn report(&self) -> Option<InstallerReport> {
        self.reports.lock().unwrap().last().cloned()
    }

    /// Ends without a last word.
    pub(crate) fn stop(self) {
        fs::remove_file(&self.socket).unwrap();
        self.runtime.shutdown_background();
    }
}

/// A node in a directory of its own.
#[derive(Debug)]
pub(crate) struct Node {
    root: tempfile::TempDir,
    pub(crate) net: PathBuf,
    pub(crate) bin: PathBuf,
    pub(crate) run: RunDir,
    pub(crate) args: Vec<String>,
}

impl Node {
    /// With a primary network, its plugins, and an image that holds ours.
    pub(crate) fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let run = RunDir::new(root.path().join("run"));
        let node = Self {
            net: root.path().join("net.d"),
            bin: root.path().join("bin"),
            run,
            root,
            args: Vec::new(),
        };
        for directory in [&node.net, &node.bin, &node.image()] {
            fs::create_dir(directory).unwrap();
        }
        for socket in [node.run.node_socket(), node.run.kubeconfig()] {
            let directory = socket.parent().unwrap().to_owned();
            fs::create_dir_all(&directory).unwrap();
            fs::set_permissions(&directory, fs::Permissions::from_mode(0o700)).unwrap();
        }
        for plugin in ["ptp", "portmap", "bridge", "macvlan", "host-local"] {
            fs::write(node.bin.join(plugin), "#!/bin/true\n").unwrap();
        }
        // It answers VERSION as any plugin does; what makes ours ours is tried with the real one elsewhere.
        let stand_in = fs::read(binary("sluice-cni-removed")).unwrap();
        let plugin = [stand_in.as_slice(), b"not the stand-in"].concat();
        for (name, bytes) in [("sluice-cni", &plugin), ("sluice-cni-removed", &stand_in)] {
            let path = node.image().join(name);
            fs::write(&path, bytes).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        node.primary("10-podnet.conflist", PODNET);
        node
    }

    pub(crate) fn root(&self) -> &Path {
        self.root.path()
    }

    pub(crate) fn image(&self) -> PathBuf {
        self.root.path().join("image")
    }

    pub(crate) fn args(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(ToString::to_string));
        self
    }

    /// Writes a file into the network configuration directory as another component does: in one step.
    pub(crate) fn primary(&self, name: &str, text: &str) {
        let temporary = self.net.join(format!(".{name}.new"));
        fs::write(&temporary, text).unwrap();
        fs::set_permissions(&temporary, fs::Permissions::from_mode(0o644)).unwrap();
        fs::rename(temporary, self.net.join(name)).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.net.join(name)).ok()
    }

    pub(crate) fn installed(&self) -> PathBuf {
        self.bin.join("sluice-cni")
    }

    pub(crate) fn broker(&self) -> FakeBroker {
        FakeBroker::start(&self.run, serving())
    }

    pub(crate) fn broker_saying(&self, state: NodeState) -> FakeBroker {
        FakeBroker::start(&self.run, state)
    }

    #[expect(clippy::disallowed_methods, reason = "the test runs the command")]
    pub(crate) fn command(&self, command: &str) -> Command {
        let mut installer = Command::new(binary("installer"));
        installer.arg(command).arg("--allow-disk");
        for (flag, path) in [
            ("--run-dir", self.run.root()),
            ("--cni-net-dir", &self.net),
            ("--cni-bin-dir", &self.bin),
            ("--host-cni-net-dir", Path::new("/etc/cni/net.d")),
            ("--host-cni-bin-dir", Path::new("/opt/cni/bin")),
            ("--source-dir", &self.image()),
        ] {
            installer.arg(flag).arg(path);
        }
        installer.args(&self.args);
        installer
    }

    /// Runs a command to its end.
    pub(crate) fn once(&self, command: &str, args: &[&str]) -> Output {
        self.command(command).args(args).output().unwrap()
    }

    pub(crate) fn start(&self) -> Installer {
        self.spawn(self.command("run"))
    }

    fn spawn(&self, mut command: Command) -> Installer {
        let log = fs::File::options()
            .append(true)
            .create(true)
            .open(self.log())
            .unwrap();
        let child = command.stdout(Stdio::null()).stderr(log).spawn().unwrap();
        Installer {
            child,
            log: self.log(),
        }
    }

    /// Starts it through a program that changes what it may do and then executes it.
    #[expect(clippy::disallowed_methods, reason = "the test runs the command")]
    pub(crate) fn through(&self, program: &str, args: &[&str], command: &str) -> Command {
        let inner = self.command(command);
        let mut outer = Command::new(program);
        outer.args(args).arg(inner.get_program()).args(inner.get_args());
        outer
    }

    /// Starts it in a user namespace whose own limit of inotify instances is 0.
    pub(crate) fn start_without_inotify(&self) -> Installer {
        let script = "echo 0 >/proc/sys/user/max_inotify_instances && exec \"$0\" \"$@\"";
        self.spawn(self.through(
            "unshare",
            &["--user", "--map-root-user", "sh", "-c", script],
            "run",
        ))
    }

    /// Starts it and waits until everything is in place.
    pub(crate) fn start_ready(&self) -> Installer {
        let installer = self.start();
        self.wait_ready();
        installer
    }

    pub(crate) fn wait_ready(&self) {
        let end = Instant::now() + SOON;
        let mut health = self.health();
        while health != "ready" {
            assert!(Instant::now() < end, "not ready: {health}\n{}", self.log_text());
            std::thread::sleep(Duration::from_millis(5));
            health = self.health();
        }
    }

    fn log(&self) -> PathBuf {
        self.root.path().join("log")
    }

    pub(crate) fn log_text(&self) -> String {
        fs::read_to_string(self.log()).unwrap_or_default()
    }

    /// What a probe is told.
    pub(crate) fn health(&self) -> String {
        let output = self.once("healthcheck", &[]);
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.success(), text.trim() == "ready", "{text}");
        text.trim().to_owned()
    }

    /// Waits until a probe is told something with `part` in it.
    pub(crate) fn wait_health(&self, part: &str, within: Duration) -> String {
        let end = Instant::now() + within;
        loop {
            let health = self.health();
            if health.contains(part) {
                return health;
            }
            assert!(
                Instant::now() < end,
                "not {part:?} but {health:?}\n{}",
                self.log_text()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Plugins of the network that the runtime would use, in order.
    pub(crate) fn chain(&self) -> Vec<String> {
        kinds(&effective(&self.net).unwrap().1)
    }

    /// The names of everything in the network configuration directory.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(&self.net)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

/// The configuration that a container runtime uses, as containerd chooses it: the first by name, and an error if that one
/// cannot be loaded.
pub(crate) fn effective(net: &Path) -> Result<(String, Value), String> {
    let mut names: Vec<String> = fs::read_dir(net)
        .map_err(|error| error.to_string())?
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| {
            let extension = name.rsplit_once('.').map(|(_, extension)| extension);
            matches!(extension, Some("conf" | "conflist" | "json"))
        })
        .collect();
    names.sort();
    let name = names.into_iter().next().ok_or("no configuration")?;
    let text = fs::read_to_string(net.join(&name)).map_err(|error| format!("{name}: {error}"))?;
    let value: Value = serde_json::from_str(&text).map_err(|error| format!("{name}: {error}: {text:?}"))?;
    let list = value["plugins"].as_array().is_some_and(|plugins| {
        !plugins.is_empty()
            && plugins
                .iter()
                .all(|plugin| plugin["type"].as_str().is_some_and(|kind| !kind.is_empty()))
    });
    let valid = if name.ends_with(".conflist") {
        list && value["name"].is_string()
    } else {
        value["type"].is_string()
    };
    if valid {
        Ok((name, value))
    } else {
        Err(format!("{name} is not valid: {text}"))
    }
}

pub(crate) fn kinds(list: &Value) -> Vec<String> {
    let plugins = list["plugins"]
        .as_array()
        .cloned()
        .unwrap_or_else(|| vec![list.clone()]);
    plugins
        .iter()
        .map(|plugin| plugin["type"].as_str().unwrap().to_owned())
        .collect()
}

/// The installer as a process; killed when dropped.
#[derive(Debug)]
pub(crate) struct Installer {
    child: Child,
    log: PathBuf,
}

impl Installer {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn terminate(&self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    }

    pub(crate) fn wait(&mut self, within: Duration) -> ExitStatus {
        let log = self.log.clone();
        wait_for(
            &format!("end\n{}", fs::read_to_string(log).unwrap_or_default()),
            within,
            || self.child.try_wait().unwrap(),
        )
    }
}

impl Drop for Installer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A runtime that looks at its configuration every millisecond.
#[derive(Debug)]
pub(crate) struct Reader {
    stop: Arc<std::sync::atomic::AtomicBool>,
    thread: Option<std::thread::JoinHandle<Seen>>,
}

/// What it saw.
#[derive(Debug, Default)]
struct Seen {
    looks: u64,
    without_ours: u64,
    two_meshes: u64,
    invalid: Vec<String>,
}

impl Reader {
    pub(crate) fn start(net: &Path) -> Self {
        let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let (net, stopped) = (net.to_owned(), stop.clone());
        let thread = std::thread::spawn(move || {
            let mut seen = Seen::default();
            while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
                seen.looks += 1;
                match look(&net) {
                    Ok(list) => {
                        let has = |wanted| kinds(&list).iter().any(|kind| kind == wanted);
                        seen.without_ours += u64::from(!has("sluice-cni"));
                        seen.two_meshes += u64::from(has("sluice-cni") && has("istio-cni"));
                    }
                    Err(error) => seen.invalid.push(error),
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            seen
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }

    fn seen(mut self) -> Seen {
        self.stop.store(true, std::sync::atomic::Ordering::Relaxed);
        let seen = self.thread.take().unwrap().join().unwrap();
        assert!(seen.looks > 0);
        assert!(
            seen.invalid.is_empty(),
            "{} of {} looks: {}",
            seen.invalid.len(),
            seen.looks,
            seen.invalid[0]
        );
        seen
    }

    pub(crate) fn assert_always_valid(self) {
        let seen = self.seen();
        assert_eq!(seen.two_meshes, 0, "of {} looks", seen.looks);
    }

    pub(crate) fn assert_always_ours(self) {
        let seen = self.seen();
        assert_eq!(seen.without_ours, 0, "of {} looks", seen.looks);
    }
}

/// A name that is gone when it is opened was replaced between the two; a runtime looks again because it is told.
fn look(net: &Path) -> Result<Value, String> {
    let mut last = String::new();
    for _ in 0..3 {
        match effective(net) {
            Ok((_, list)) => return Ok(list),
            Err(error) if error.contains("No such file") => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

/// Processor time that a process has used (proc(5), fields 14 and 15 of stat).
pub(crate) fn cpu_time(pid: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    let per_second = rustix::param::clock_ticks_per_second();
    Duration::from_millis(ticks * 1000 / per_second)
}

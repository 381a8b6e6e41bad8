//! A node in a directory: what the installer keeps right, a broker that says what a test wants, the container runtime's
//! way of choosing a configuration, and the installer itself as a process.

mod broker;
mod process;
mod runtime;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use sluice_proto::paths::RunDir;
use sluice_proto::pb::node::NodeState;

pub(crate) use broker::{FakeBroker, credentials, serving};
pub(crate) use process::{Installer, cpu_time};
pub(crate) use runtime::{Reader, effective, kinds};

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

    /// Runs a command to its end in a PID namespace of its own, as in another container.
    #[expect(clippy::disallowed_methods, reason = "the program under test, by another")]
    pub(crate) fn once_elsewhere(&self, command: &str, args: &[&str]) -> Output {
        let inner = self.command(command);
        Command::new("unshare")
            .args(["--pid", "--fork"])
            .arg(inner.get_program())
            .args(inner.get_args())
            .args(args)
            .output()
            .unwrap()
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

    /// Starts it through a program that executes it in the end.
    pub(crate) fn start_through(&self, program: &str, args: &[&str]) -> Installer {
        self.spawn(self.through(program, args, "run"))
    }

    /// Starts it in a user namespace whose own limit of inotify instances is 0.
    pub(crate) fn start_without_inotify(&self) -> Installer {
        let script = "echo 0 >/proc/sys/user/max_inotify_instances && exec \"$0\" \"$@\"";
        self.start_through("unshare", &["--user", "--map-root-user", "sh", "-c", script])
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

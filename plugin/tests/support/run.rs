//! Runs the plugin's binary as a runtime does.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// A network namespace that is not the one the plugin runs in; it goes with this process.
static POD: LazyLock<String> = LazyLock::new(|| {
    let (path, made) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        enter_new_netns();
        let thread = std::fs::read_link("/proc/thread-self").unwrap();
        path.send(format!("/proc/{}/ns/net", thread.display())).unwrap();
        loop {
            std::thread::park();
        }
    });
    made.recv().expect("root is needed")
});

#[expect(clippy::disallowed_methods, reason = "a namespace of a test's own")]
fn enter_new_netns() {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
}

/// One execution to be.
#[derive(Debug, Clone)]
pub(crate) struct Run {
    pub(crate) env: Vec<(String, String)>,
    pub(crate) stdin: Vec<u8>,
    /// File descriptors that are closed before the plugin starts, as in a shell: `2>&-`.
    pub(crate) closed: &'static [u8],
}

/// What came out.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) status: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) elapsed: Duration,
}

impl Run {
    /// `command` for pod team-a/web-0, interface eth0.
    pub(crate) fn new(command: &str, config: &Value) -> Self {
        Self {
            env: Vec::new(),
            stdin: config.to_string().into_bytes(),
            closed: &[],
        }
        .env("CNI_COMMAND", command)
        .env("CNI_CONTAINERID", "c0ffee")
        .env("CNI_IFNAME", "eth0")
        .env("CNI_NETNS", &POD)
        .env("CNI_PATH", "/opt/cni/bin")
        .pod("team-a", "web-0")
    }

    pub(crate) fn env(mut self, key: &str, value: &str) -> Self {
        self.env.retain(|(known, _)| known != key);
        self.env.push((key.to_owned(), value.to_owned()));
        self
    }

    pub(crate) fn without(mut self, key: &str) -> Self {
        self.env.retain(|(known, _)| known != key);
        self
    }

    pub(crate) fn pod(self, namespace: &str, name: &str) -> Self {
        let args = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name};\
             K8S_POD_INFRA_CONTAINER_ID=c0ffee;K8S_POD_UID=11111111-2222-3333-4444-555555555555"
        );
        self.env("CNI_ARGS", &args)
    }

    pub(crate) fn stdin(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.stdin = bytes.into();
        self
    }

    pub(crate) fn closed(mut self, descriptors: &'static [u8]) -> Self {
        self.closed = descriptors;
        self
    }

    /// Executes the plugin with this environment and no other, and waits for it.
    #[expect(
        clippy::disallowed_methods,
        reason = "a test executes the plugin as a runtime does"
    )]
    pub(crate) fn go(&self) -> Done {
        let closed: Vec<_> = self
            .closed
            .iter()
            .map(|descriptor| format!("{descriptor}>&-"))
            .collect();
        let script = format!("exec \"$0\" {}", closed.join(" "));
        let started = Instant::now();
        let mut child = if self.closed.is_empty() {
            Command::new(env!("CARGO_BIN_EXE_sluice-cni"))
        } else {
            let mut shell = Command::new("/bin/sh");
            shell.args(["-c", &script, env!("CARGO_BIN_EXE_sluice-cni")]);
            shell
        }
        .env_clear()
        .envs(self.env.iter().map(|(key, value)| (key, value)))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
        // The plugin may end without having read everything.
        let _ = child.stdin.take().unwrap().write_all(&self.stdin);
        let output = child.wait_with_output().unwrap();
        Done {
            status: output.status.code().expect("ended by itself"),
            stdout: String::from_utf8(output.stdout).expect("stdout is text"),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
            elapsed: started.elapsed(),
        }
    }
}

impl Done {
    /// stdout as exactly one JSON document.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The CNI error document, checked for its form.
    pub(crate) fn error(&self) -> Value {
        let json = self.json();
        assert_eq!(self.status, 1, "{self:?}");
        let msg = json["msg"].as_str().unwrap();
        assert!(msg.chars().count() <= 256 && msg.starts_with("sluice: "), "{msg}");
        assert!(json["code"].is_u64() && json["cniVersion"].is_string(), "{json}");
        let code = json["details"].as_str().unwrap().split(": ").next().unwrap();
        assert!(
            sluice_proto::code::ErrorCode::all().any(|(known, _)| known == code),
            "{code}"
        );
        json
    }

    pub(crate) fn succeeded_silently(&self) {
        assert!(self.status == 0 && self.stdout.is_empty(), "{self:?}");
    }
}

/// A result of the plugins before ours, with things in it that no version of the specification knows.
pub(crate) fn prev_result(version: &str) -> Value {
    json!({
        "zzz-unknown": { "b": 1, "a": [1.50, null] },
        "ips": [
            { "address": "10.1.2.3/24", "interface": 1, "gateway": "10.1.2.1" },
            { "interface": 1, "address": "fd00::3/64" },
        ],
        "routes": [{ "dst": "0.0.0.0/0", "mtu": 1400, "advmss": 1, "priority": 5, "table": 7, "scope": 0 }],
        "interfaces": [
            { "name": "veth1", "mac": "0a:58:0a:01:02:03" },
            { "name": "eth0", "sandbox": "/var/run/netns/x", "mtu": 1400, "socketPath": "/s", "pciID": "0000:00:01.0" },
        ],
        "cniVersion": version,
        "dns": {},
    })
}

/// A configuration as the runtime gives it on stdin.
pub(crate) fn config(version: &str, run_dir: &Path) -> Value {
    json!({
        "cniVersion": version,
        "name": "k8s-pod-network",
        "type": "sluice-cni",
        "runDir": run_dir,
        "selection": {
            "excludedNamespaces": ["kube-system"],
            "ownPods": { "namespace": "sluice-system", "daemonSet": "sluice" },
        },
        "prevResult": prev_result(version),
    })
}

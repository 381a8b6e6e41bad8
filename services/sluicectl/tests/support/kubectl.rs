//! A stand-in for kubectl and the cluster behind it: one node with the agent's pod, in which this machine's `sluicectl`
//! runs, and the logs of its containers.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;
use tempfile::TempDir;

use crate::fake::Done;

const SCRIPT: &str = r#"#!/bin/sh
echo "$@" >> "$FAKE/calls"
while :; do case "$1" in --*) shift ;; *) break ;; esac; done
case "$1 $2" in
"get pods") cat "$FAKE/pods.json" ;;
"get pod") cat "$FAKE/pod.json" ;;
"get node") cat "$FAKE/node.yaml" ;;
"logs "*) case "$*" in *--previous*) exit 1 ;; *) cat "$FAKE/log" ;; esac ;;
"exec "*)
    while [ "$1" != -- ]; do shift; done
    [ "$2" = /opt/sluice/bin/sluicectl ] || exit 126
    shift 2
    SLUICE_RUN_DIR="$FAKE/run" exec "$FAKE/sluicectl" "$@" ;;
*) echo "error: the server does not know $1 $2" >&2; exit 1 ;;
esac
"#;

/// The stand-in; its files may be changed.
#[derive(Debug)]
pub(crate) struct Cluster {
    pub(crate) fake: TempDir,
}

impl Cluster {
    /// A cluster whose agent has the sockets below `run_dir`.
    pub(crate) fn new(run_dir: &Path) -> Self {
        let fake = tempfile::tempdir().unwrap();
        let at = |name: &str| fake.path().join(name);
        std::fs::write(at("kubectl"), SCRIPT).unwrap();
        std::fs::set_permissions(at("kubectl"), PermissionsExt::from_mode(0o755)).unwrap();
        symlink(run_dir, at("run")).unwrap();
        symlink(env!("CARGO_BIN_EXE_sluicectl"), at("sluicectl")).unwrap();
        symlink(env!("CARGO_BIN_EXE_sluicectl"), at("kubectl-sluice")).unwrap();
        let agent = json!({
            "metadata": { "name": "sluice-node-abc12", "namespace": "sluice-system", "creationTimestamp": "2026-01-01T00:00:00Z" },
            "spec": { "nodeName": "node-1", "initContainers": [{ "name": "first" }], "containers":
                [{ "name": "netns-executor" }, { "name": "ambient-broker" }, { "name": "installer" }] },
        });
        std::fs::write(at("pods.json"), json!({ "items": [agent] }).to_string()).unwrap();
        let pod = json!({ "metadata": { "name": "web-0", "namespace": "team-a" }, "spec": { "nodeName": "node-1" } });
        std::fs::write(at("pod.json"), pod.to_string()).unwrap();
        std::fs::write(at("node.yaml"), "kind: Node\n").unwrap();
        std::fs::write(at("log"), "a line\n").unwrap();
        Self { fake }
    }

    /// Runs `kubectl-sluice` where no agent is.
    #[expect(clippy::disallowed_methods, reason = "the test runs the command")]
    pub(crate) fn run(&self, arguments: &[&str]) -> Done {
        let path = format!("{}:/usr/bin:/bin", self.fake.path().display());
        let output = Command::new(self.fake.path().join("kubectl-sluice"))
            .args(arguments)
            .env("PATH", path)
            .env("FAKE", self.fake.path())
            .env("SLUICE_RUN_DIR", "/nonexistent")
            .current_dir(self.fake.path())
            .output()
            .unwrap();
        Done {
            status: output.status.code().unwrap(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// What kubectl was called with.
    pub(crate) fn calls(&self) -> Vec<String> {
        let calls = std::fs::read_to_string(self.fake.path().join("calls")).unwrap_or_default();
        calls.lines().map(str::to_owned).collect()
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.fake.path().join(name)
    }
}

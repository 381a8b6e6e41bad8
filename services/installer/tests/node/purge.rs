//! After an uninstall, on a host whose root directory is mounted below ours, as `kubectl debug node/NODE` does it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Output;

use crate::support::{Node, PODNET, binary, wait_for};

/// A host that keeps plugins and results behind links to its own root.
struct Host {
    directory: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let host = Self { directory };
        for path in [
            "opt/cni",
            "usr/libexec/cni",
            "etc/cni/net.d",
            "var/lib/sluice",
            "data/cni/results",
            "run/sluice/state/sandboxes",
            "run/sluice/state/probe-set",
            "run/sluice/cni/tombstones",
            "run/sluice/plugin",
        ] {
            fs::create_dir_all(host.root().join(path)).unwrap();
        }
        symlink("/usr/libexec/cni", host.root().join("opt/cni/bin")).unwrap();
        symlink("/data/cni", host.root().join("var/lib/cni")).unwrap();
        symlink("/run", host.root().join("var/run")).unwrap();
        fs::write(host.root().join("etc/cni/net.d/10-podnet.conflist"), PODNET).unwrap();
        fs::write(host.plugin(), "the stand-in").unwrap();
        host
    }

    fn root(&self) -> &Path {
        self.directory.path()
    }

    fn plugin(&self) -> PathBuf {
        self.root().join("usr/libexec/cni/sluice-cni")
    }

    /// As the chart's page has it.
    #[expect(clippy::disallowed_methods, reason = "the test runs the command")]
    fn installer(&self, args: &[&str]) -> Output {
        let mut command = std::process::Command::new(binary("installer"));
        command.args(args).arg("--host-root").arg(self.root());
        for (flag, path) in [
            ("--cni-bin-dir", "opt/cni/bin"),
            ("--cni-net-dir", "etc/cni/net.d"),
            ("--cni-cache-dir", "var/lib/cni"),
            ("--run-dir", "var/run/sluice"),
            ("--kubeconfig", "var/lib/sluice/kubeconfig"),
        ] {
            command.arg(flag).arg(self.root().join(path));
        }
        command.output().unwrap()
    }

    fn refusal(&self, args: &[&str]) -> String {
        let output = self.installer(args);
        assert!(!output.status.success(), "{args:?}");
        String::from_utf8(output.stderr).unwrap()
    }
}

#[test]
fn links_of_the_host_are_followed_on_the_host() {
    let host = Host::new();
    let result = host.root().join("data/cni/results/podnet-c0ffee-eth0");
    fs::write(&result, PODNET.replace("portmap", "sluice-cni")).unwrap();
    // A look at a directory that only seems to be empty would miss the pod that is still there.
    let text = host.refusal(&["purge"]);
    assert!(text.contains("whose DEL is still to come"), "{text}");
    assert!(host.plugin().exists());

    fs::remove_file(result).unwrap();
    let output = host.installer(&["purge"]);
    assert!(output.status.success(), "{output:?}");
    assert!(!host.plugin().exists());
    for gone in ["run/sluice", "var/lib/sluice"] {
        assert!(!host.root().join(gone).exists(), "{gone}");
    }
    for kept in [
        "usr/libexec/cni",
        "data/cni/results",
        "etc/cni/net.d",
        "var/lib",
        "run",
    ] {
        assert!(host.root().join(kept).is_dir(), "{kept}");
    }
    // Of nothing: done already.
    assert!(host.installer(&["purge"]).status.success());
}

#[test]
fn directories_with_something_in_them_stay() {
    let host = Host::new();
    let foreign = ["run/sluice/state/sandboxes/x", "var/lib/sluice/x"].map(|path| host.root().join(path));
    for path in &foreign {
        fs::write(path, "").unwrap();
    }
    assert!(host.installer(&["purge"]).status.success());
    assert!(!host.plugin().exists());
    assert!(foreign.iter().all(|path| path.exists()));
    assert!(!host.root().join("run/sluice/cni").exists());
}

#[test]
fn a_directory_that_is_not_there_is_no_success() {
    let host = Host::new();
    fs::rename(host.root().join("usr/libexec"), host.root().join("usr/lib")).unwrap();
    let text = host.refusal(&["purge"]);
    assert!(text.contains("opt/cni/bin is no directory"), "{text}");

    let host = Host::new();
    fs::remove_dir_all(host.root().join("data")).unwrap();
    let text = host.refusal(&["purge"]);
    assert!(text.contains("cannot look for results below"), "{text}");
    assert!(host.plugin().exists());
    assert!(host.installer(&["purge", "--force"]).status.success());
    assert!(!host.plugin().exists());
}

#[test]
fn a_node_that_was_away_when_the_release_was_uninstalled_is_cleaned_later() {
    let host = Host::new();
    let ours = PODNET.replace("portmap", "sluice-cni");
    let net = host.root().join("etc/cni/net.d");
    fs::create_dir(net.join("podnet")).unwrap();
    fs::write(net.join("02-sluice.conflist"), &ours).unwrap();
    fs::write(net.join("podnet/zz-sluice-cni.conf"), r#"{"type":"sluice-cni"}"#).unwrap();
    fs::write(host.root().join("var/lib/sluice/kubeconfig"), "{}").unwrap();
    let text = host.refusal(&["purge"]);
    assert!(
        text.contains("02-sluice.conflist still names the plugin"),
        "{text}"
    );
    fs::rename(net.join("02-sluice.conflist"), host.root().join("aside")).unwrap();
    let text = host.refusal(&["purge"]);
    assert!(
        text.contains("podnet/zz-sluice-cni.conf still names the plugin"),
        "{text}"
    );
    fs::rename(host.root().join("aside"), net.join("02-sluice.conflist")).unwrap();

    let output = host.installer(&["uninstall", "--purge"]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(
        fs::read(net.join("10-podnet.conflist")).unwrap(),
        PODNET.as_bytes()
    );
    assert!(!net.join("02-sluice.conflist").exists() && !net.join("podnet/zz-sluice-cni.conf").exists());
    assert!(!host.plugin().exists() && !host.root().join("var/lib/sluice").exists());
}

#[test]
fn a_node_with_an_agent_is_not_purged() {
    let node = Node::new();
    let _installer = node.start();
    wait_for("alive", crate::support::SOON, || {
        node.once("healthcheck", &["--alive"])
            .status
            .success()
            .then_some(())
    });
    let output = node.once("purge", &[]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(
        !output.status.success() && text.contains("an installer runs on this node"),
        "{text}"
    );
}

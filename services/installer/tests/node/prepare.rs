//! The run directories. Needs root, and `setpriv` (util-linux) to take capabilities away.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output};

const BROKER: u32 = 64_807;

const ZTUNNEL: u32 = 1337;

/// Runs the installer as uid 0 of these further groups, with exactly these capabilities.
#[expect(clippy::disallowed_methods, reason = "the test runs the command")]
fn command(groups: &str, capabilities: &str, command: &str, run: &Path, args: &[&str]) -> Output {
    Command::new("setpriv")
        .args([
            "--no-new-privs",
            "--inh-caps=-all",
            "--bounding-set",
            capabilities,
        ])
        .arg(format!("--groups={groups}"))
        .arg(crate::support::binary("installer"))
        .args([command, "--run-dir"])
        .arg(run)
        .args(args)
        .output()
        .unwrap()
}

fn prepare(run: &Path, args: &[&str]) -> Output {
    command(&format!("{BROKER},{ZTUNNEL}"), "-all", "prepare", run, args)
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn found(path: &Path) -> (u32, u32, u32) {
    let metadata = fs::symlink_metadata(path).unwrap();
    assert!(metadata.is_dir(), "{}", path.display());
    (metadata.uid(), metadata.gid(), metadata.mode() & 0o7777)
}

/// On a tmpfs, as a node's `/run`.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

/// As the kubelet makes it for a hostPath.
fn made_by_the_kubelet(path: &Path) {
    fs::create_dir_all(path).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn every_directory_gets_group_and_mode_without_any_capability() {
    let root = directory();
    let (run, ztunnel, istio) = (
        root.path().join("run"),
        root.path().join("ztunnel"),
        root.path().join("istio-cni"),
    );
    made_by_the_kubelet(&ztunnel);
    made_by_the_kubelet(&run.join("node"));
    let args = [
        "--ztunnel-dir",
        ztunnel.to_str().unwrap(),
        "--istio-run-dir",
        istio.to_str().unwrap(),
    ];
    let check = || {
        assert_eq!(found(&run), (0, 0, 0o755));
        assert_eq!(found(&run.join("plugin")), (0, 0, 0o700));
        for name in ["broker", "node"] {
            assert_eq!(found(&run.join(name)), (0, BROKER, 0o2770), "{name}");
        }
        assert_eq!(found(&ztunnel), (0, ZTUNNEL, 0o2770));
        assert_eq!(found(&istio), (0, BROKER, 0o770));
    };
    let output = prepare(&run, &args);
    assert!(output.status.success(), "{}", text(&output));
    check();
    // Again: nothing to do, so no membership is needed.
    fs::write(run.join("plugin/kubeconfig"), "kept").unwrap();
    let output = command("0", "-all", "prepare", &run, &args);
    assert!(
        output.status.success() && !text(&output).contains("prepared"),
        "{}",
        text(&output)
    );
    check();
    assert_eq!(fs::read_to_string(run.join("plugin/kubeconfig")).unwrap(), "kept");
    // Damaged by somebody.
    fs::set_permissions(run.join("broker"), fs::Permissions::from_mode(0o777)).unwrap();
    std::os::unix::fs::chown(run.join("node"), None, Some(1000)).unwrap();
    let output = prepare(&run, &args);
    assert!(output.status.success(), "{}", text(&output));
    check();
}

/// On a host, say: root of no such group, which may give away what is its own.
#[test]
fn with_the_capability_no_membership_is_needed() {
    let root = directory();
    let run = root.path().join("run");
    let output = command("0", "-all,+chown", "prepare", &run, &[]);
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(found(&run.join("broker")), (0, BROKER, 0o2770));
}

/// Before it looks for anything else.
#[test]
fn run_makes_them_first_when_it_knows_the_brokers_group() {
    let root = directory();
    let run = root.path().join("run");
    let group = BROKER.to_string();
    let none = root.path().display().to_string();
    let args = ["--source-dir", &none];
    let output = command(&group, "-all", "run", &run, &args);
    assert!(!run.exists(), "{}", text(&output));
    let output = command(
        &group,
        "-all",
        "run",
        &run,
        &[&args[..], &["--broker-gid", &group]].concat(),
    );
    assert!(
        text(&output).contains("nothing is installed"),
        "{}",
        text(&output)
    );
    assert_eq!(found(&run.join("broker")), (0, BROKER, 0o2770));
}

#[test]
fn without_membership_it_is_named() {
    let root = directory();
    let output = command("0", "-all", "prepare", &root.path().join("run"), &[]);
    assert!(!output.status.success());
    assert!(
        text(&output).contains("a group of this process, or CAP_CHOWN, is needed"),
        "{}",
        text(&output)
    );
}

#[test]
fn a_directory_of_somebody_else_is_refused() {
    let root = directory();
    let run = root.path().join("run");
    made_by_the_kubelet(&run.join("node"));
    fs::set_permissions(run.join("node"), fs::Permissions::from_mode(0o700)).unwrap();
    std::os::unix::fs::chown(run.join("node"), Some(1000), None).unwrap();
    let output = prepare(&run, &[]);
    assert!(!output.status.success());
    assert!(
        text(&output).contains("belongs to uid 1000, mode 0700; it must be uid 0"),
        "{}",
        text(&output)
    );
}

#[test]
fn links_and_files_in_the_way_are_refused() {
    let root = directory();
    let elsewhere = root.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    let before = found(&elsewhere);
    for name in ["", "plugin", "broker"] {
        let run = root.path().join(format!("run-{name}"));
        if name.is_empty() {
            symlink(&elsewhere, &run).unwrap();
        } else {
            fs::create_dir(&run).unwrap();
            symlink(&elsewhere, run.join(name)).unwrap();
        }
        let output = prepare(&run, &[]);
        assert!(!output.status.success());
        assert!(
            text(&output).contains("is a symbolic link or no directory"),
            "{}",
            text(&output)
        );
    }
    assert_eq!(found(&elsewhere), before);
    let file = root.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(!prepare(&file, &[]).status.success());
}

#[test]
fn a_run_directory_that_survives_a_reboot_is_refused() {
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let run = root.path().join("run");
    let output = prepare(&run, &[]);
    assert!(
        !output.status.success() && text(&output).contains("is not on a tmpfs"),
        "{}",
        text(&output)
    );
    assert!(prepare(&run, &["--allow-disk"]).status.success());
}

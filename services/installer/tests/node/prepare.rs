//! The run directories. Needs root, and `setpriv` (util-linux) to take capabilities away.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output};

const BROKER: u32 = 64_807;

/// Runs `prepare` with exactly these capabilities.
#[expect(clippy::disallowed_methods, reason = "the test runs the command")]
fn prepare(run: &Path, capabilities: &str, args: &[&str]) -> Output {
    Command::new("setpriv")
        .args([
            "--no-new-privs",
            "--inh-caps=-all",
            "--bounding-set",
            capabilities,
        ])
        .arg(crate::support::binary("installer"))
        .args(["prepare", "--run-dir"])
        .arg(run)
        .args(args)
        .output()
        .unwrap()
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

#[test]
fn every_directory_gets_owner_and_mode_with_no_other_capability_than_chown() {
    let root = directory();
    let (run, ztunnel, istio) = (
        root.path().join("run"),
        root.path().join("ztunnel"),
        root.path().join("istio-cni"),
    );
    // As the kubelet makes it for a hostPath.
    fs::create_dir(&ztunnel).unwrap();
    fs::set_permissions(&ztunnel, fs::Permissions::from_mode(0o755)).unwrap();
    let args = [
        "--ztunnel-dir",
        ztunnel.to_str().unwrap(),
        "--istio-run-dir",
        istio.to_str().unwrap(),
    ];
    let table = [
        ("", (0, 0, 0o755)),
        ("cni", (0, 0, 0o700)),
        ("executor", (0, BROKER, 0o2750)),
        ("opener", (0, 0, 0o700)),
        ("state", (0, 0, 0o700)),
        ("broker", (BROKER, 0, 0o2750)),
        ("node", (BROKER, 0, 0o2750)),
        ("plugin", (0, 0, 0o700)),
    ];
    let check = || {
        for (name, wanted) in table {
            assert_eq!(found(&run.join(name)), wanted, "{name}");
        }
        assert_eq!(found(&ztunnel), (BROKER, 1337, 0o2750));
        assert_eq!(found(&istio), (0, BROKER, 0o770));
    };
    let output = prepare(&run, "-all,+chown", &args);
    assert!(output.status.success(), "{}", text(&output));
    check();
    // Again: nothing to do, so nothing is needed.
    fs::write(run.join("plugin/kubeconfig"), "kept").unwrap();
    let output = prepare(&run, "-all", &args);
    assert!(
        output.status.success() && !text(&output).contains("prepared"),
        "{}",
        text(&output)
    );
    check();
    assert_eq!(fs::read_to_string(run.join("plugin/kubeconfig")).unwrap(), "kept");
    // Damaged by somebody.
    fs::set_permissions(run.join("broker"), fs::Permissions::from_mode(0o777)).unwrap();
    std::os::unix::fs::chown(run.join("plugin"), Some(1000), Some(1000)).unwrap();
    let output = prepare(&run, "-all,+chown", &args);
    assert!(output.status.success(), "{}", text(&output));
    check();
}

#[test]
fn without_the_capability_it_is_named() {
    let root = directory();
    let output = prepare(&root.path().join("run"), "-all", &[]);
    assert!(!output.status.success());
    assert!(text(&output).contains("CAP_CHOWN is needed"), "{}", text(&output));
}

#[test]
fn links_and_files_in_the_way_are_refused() {
    let root = directory();
    let elsewhere = root.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    let before = found(&elsewhere);
    for name in ["", "cni", "broker"] {
        let run = root.path().join(format!("run-{name}"));
        if name.is_empty() {
            symlink(&elsewhere, &run).unwrap();
        } else {
            fs::create_dir(&run).unwrap();
            symlink(&elsewhere, run.join(name)).unwrap();
        }
        let output = prepare(&run, "-all,+chown", &[]);
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
    assert!(!prepare(&file, "-all,+chown", &[]).status.success());
}

#[test]
fn a_run_directory_that_survives_a_reboot_is_refused() {
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let run = root.path().join("run");
    let output = prepare(&run, "-all,+chown", &[]);
    assert!(
        !output.status.success() && text(&output).contains("is not on a tmpfs"),
        "{}",
        text(&output)
    );
    assert!(prepare(&run, "-all,+chown", &["--allow-disk"]).status.success());
}

//! The plugin as a container runtime sees it: every version, every command, one JSON document or nothing.

use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use sluice_integration::adds::{declared, mesh_with};
use sluice_integration::cni_error::CniError;
use sluice_integration::kernel_state::{NetnsState, probe_addresses, sandbox_files};
use sluice_integration::mesh::{Mesh, MeshOptions};
use sluice_integration::scene::{PATIENCE, mesh_pod};
use sluice_proto::pb::workload::PodState;
use sluice_testkit::cni::{Attachment, Chain};
use sluice_testkit::pod::Pod;
use sluice_testkit::process::{binary, output, text};
use sluice_testkit::wait::{poll_true, poll_until};

const VERSIONS: [&str; 4] = ["0.3.1", "0.4.0", "1.0.0", "1.1.0"];

fn start() -> Mesh {
    mesh_with(MeshOptions::default()).unwrap()
}

/// An executor that looks at rules and host sets only when asked to.
fn without_drift_pass() -> Mesh {
    let rarely = [
        "--drift-interval-ms",
        "600000",
        "--full-drift-interval-ms",
        "3600000",
    ];
    mesh_with(MeshOptions {
        executor: rarely.map(String::from).to_vec(),
        ..MeshOptions::default()
    })
    .unwrap()
}

/// A result as a primary plugin prints it, with all that newer versions and vendors put in.
fn rich_result(pod: &Pod, version: &str) -> Value {
    let mut result = pod.prev_result(version);
    result["routes"] = json!([{ "dst": "0.0.0.0/0", "gw": "10.244.0.1", "mtu": 1400, "advmss": 1360, "priority": 100,
                                "table": 50, "scope": 253 }]);
    result["interfaces"][2]["mtu"] = json!(1400);
    result["interfaces"][2]["socketPath"] = json!("/run/vhost.sock");
    result["interfaces"][2]["pciID"] = json!("0000:00:1f.6");
    result["example.com/vendor"] = json!({ "z": [1, null, 1.5e3], "a": { "unicode": "ü\u{1}" } });
    result
}

#[test]
fn the_result_before_comes_out_unchanged_in_every_version() {
    let mesh = start();
    for version in VERSIONS {
        let pod = declared(&mesh, &format!("web-{}", version.replace('.', "-"))).unwrap();
        let result = rich_result(&pod, version);
        let chain = mesh.chain_with(version, Vec::new()).unwrap();
        let outcome = chain
            .add(&Attachment::from(&pod), Some(&result))
            .unwrap()
            .ok()
            .unwrap();
        assert_eq!(outcome.result, Some(result), "{version}");
        mesh.wait_state(&pod, PodState::Enrolled, PATIENCE).unwrap();
        let deleted = chain
            .del(&Attachment::from(&pod), outcome.result.as_ref())
            .unwrap()
            .ok()
            .unwrap();
        assert_eq!(deleted.last().stdout, "", "{version}");
    }
    assert!(sandbox_files(&mesh).unwrap().is_empty());
}

/// CHECK of a pod in version 1.0.0.
fn check(mesh: &Mesh, pod: &Pod) -> Result<(), CniError> {
    let outcome = mesh
        .chain()
        .unwrap()
        .check(&Attachment::from(pod), Some(&pod.prev_result("1.0.0")))
        .unwrap();
    if outcome.succeeded() {
        assert_eq!(outcome.last().stdout, "");
        return Ok(());
    }
    Err(CniError::of(outcome.last()).unwrap())
}

#[test]
fn check_finds_rules_that_are_gone() {
    let mesh = without_drift_pass();
    let pod = mesh_pod(&mesh, "web").unwrap();
    check(&mesh, &pod).unwrap();
    let rule = "delete table inet sluice";
    text(
        &pod.netns().into(),
        "nft",
        &rule.split(' ').collect::<Vec<_>>(),
        b"",
    )
    .unwrap();
    check(&mesh, &pod)
        .unwrap_err()
        .assert("EXE-DRIFT", "netns-executor", "default/web");
}

#[test]
fn check_finds_a_policy_rule_that_is_gone() {
    let mesh = without_drift_pass();
    let pod = mesh_pod(&mesh, "web").unwrap();
    text(&pod.netns().into(), "ip", &["rule", "del", "pref", "32764"], b"").unwrap();
    check(&mesh, &pod)
        .unwrap_err()
        .assert("EXE-DRIFT", "netns-executor", "default/web");
}

#[test]
fn check_finds_a_probe_address_that_is_gone() {
    let mesh = without_drift_pass();
    let pod = mesh_pod(&mesh, "web").unwrap();
    let element = format!("delete element inet sluice-host probes-v4 {{ {} }}", pod.ip());
    // Again, if it was put back meanwhile.
    let error = poll_until("CHECK finds it", PATIENCE, || {
        let _ = text(mesh.node().place(), "nft", &[&element], b"");
        check(&mesh, &pod).err()
    })
    .unwrap();
    error.assert("EXE-PROBE", "netns-executor", "default/web");
    assert!(error.msg.contains(&pod.ip().to_string()), "{}", error.msg);
}

#[test]
fn check_finds_a_pod_that_no_proxy_has() {
    let mesh = start();
    let pod = mesh_pod(&mesh, "web").unwrap();
    mesh.proxy.as_ref().unwrap().kill().unwrap();
    poll_true("CHECK fails", PATIENCE, || check(&mesh, &pod).is_err()).unwrap();
    check(&mesh, &pod)
        .unwrap_err()
        .assert("ZT-NONE", "ambient-broker", "default/web");
    mesh.proxy.as_ref().unwrap().start_again().unwrap();
    poll_true("CHECK succeeds again", PATIENCE, || check(&mesh, &pod).is_ok()).unwrap();
}

#[test]
fn check_of_an_unknown_attachment_says_so() {
    let mesh = start();
    let pod = declared(&mesh, "never-added").unwrap();
    let error = check(&mesh, &pod).unwrap_err();
    error.assert("EXE-GONE", "netns-executor", "default/never-added");
    assert_eq!(error.code, 3);
}

#[test]
fn status_succeeds_at_once_whatever_the_agent_does() {
    let mesh = start();
    let chain = mesh.chain_with("1.1.0", Vec::new()).unwrap();
    let mut gated = chain.clone();
    gated.plugins[0]["status"] = json!({ "gateNode": true });
    // The fastest of a few: the machine may be busy.
    let fastest = |chain: &Chain| {
        let runs = (0..5).map(|_| chain.status().unwrap().last().clone());
        runs.min_by_key(|execution| execution.elapsed).unwrap()
    };
    let quiet = |when: &str| {
        let execution = fastest(&chain);
        assert!(
            execution.status.success() && execution.stdout.is_empty(),
            "{when}: {execution:?}"
        );
        assert!(
            execution.elapsed < Duration::from_millis(100),
            "{when}: {:?}",
            execution.elapsed
        );
    };
    quiet("everything runs");
    assert!(fastest(&gated).status.success());
    mesh.executor.signal(Signal::SIGSTOP).unwrap();
    quiet("the executor hangs");
    let late = fastest(&gated);
    assert_eq!(CniError::of(&late).unwrap().code, 50);
    assert!(late.elapsed < Duration::from_millis(150), "{:?}", late.elapsed);
    mesh.executor.kill().unwrap();
    quiet("the executor is gone");
    assert_eq!(CniError::of(&fastest(&gated)).unwrap().code, 50);
}

#[test]
fn gc_removes_what_its_network_no_longer_lists_and_nothing_else() {
    let mesh = start();
    let (stays, goes) = (
        mesh_pod(&mesh, "stays").unwrap(),
        mesh_pod(&mesh, "goes").unwrap(),
    );
    let elsewhere = declared(&mesh, "elsewhere").unwrap();
    let other = Chain {
        name: "othernet".to_owned(),
        ..mesh.chain().unwrap()
    };
    other
        .add(
            &Attachment::from(&elsewhere),
            Some(&elsewhere.prev_result("1.0.0")),
        )
        .unwrap()
        .ok()
        .unwrap();
    let before = NetnsState::of(stays.netns()).unwrap();
    let chain = mesh.chain_with("1.1.0", Vec::new()).unwrap();
    let outcome = chain.gc(&[Attachment::from(&stays)]).unwrap().ok().unwrap();
    assert_eq!(outcome.last().stdout, "");
    let left = [stays.ip(), elsewhere.ip()].into();
    assert_eq!(probe_addresses(&mesh).unwrap(), left);
    assert!(!NetnsState::of(goes.netns()).unwrap().text().contains("redirect"));
    assert_eq!(NetnsState::of(stays.netns()).unwrap(), before);
    let held = mesh
        .control()
        .wait("the proxy has let go", PATIENCE, |report| {
            report.workloads.len() == 2
        })
        .unwrap();
    assert!(!held.workloads.contains_key(goes.uid()));
    assert_eq!(sandbox_files(&mesh).unwrap().len(), 2);
}

/// Runs the plugin with stderr closed, logging turned up, and no other environment.
fn with_closed_stderr(mesh: &Mesh, chain: &Chain, command: &str, pod: Option<&Pod>, stdin: &str) -> Output {
    let attachment = pod.map(Attachment::from);
    let mut args = vec![
        "-i".to_owned(),
        "RUST_LOG=trace".to_owned(),
        "RUST_BACKTRACE=1".to_owned(),
    ];
    args.extend(
        chain
            .env_of(command, attachment.as_ref())
            .into_iter()
            .map(|(key, value)| format!("{key}={value}")),
    );
    args.extend(["/bin/sh", "-c", "exec \"$0\" 2>&-"].map(String::from));
    args.push(binary("sluice-cni").unwrap().display().to_string());
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    output(mesh.node().place(), "env", &args, stdin.as_bytes()).unwrap()
}

#[test]
fn stdout_is_one_document_or_nothing() {
    let mesh = start();
    let pod = declared(&mesh, "web").unwrap();
    let ghost = mesh.node().pod("ghost").create().unwrap();
    let mut chain = mesh.chain_with("1.1.0", Vec::new()).unwrap();
    chain.plugins[0]["logLevel"] = json!("debug");
    let stdin_of = |pod: &Pod| {
        chain
            .stdin_of(&chain.plugins[0], Some(&pod.prev_result("1.1.0")))
            .to_string()
    };
    let mut gc = chain.plugins[0].clone();
    gc["cni.dev/valid-attachments"] = json!([{ "containerID": pod.container_id(), "ifname": "eth0" }]);
    let gc = chain.stdin_of(&gc, None).to_string();
    let status = chain.stdin_of(&chain.plugins[0], None).to_string();
    for (command, pod, stdin, succeeds, prints) in [
        ("ADD", Some(&pod), stdin_of(&pod), true, true),
        ("ADD", Some(&ghost), stdin_of(&ghost), false, true),
        ("ADD", Some(&pod), "{ not JSON".to_owned(), false, true),
        ("ADD", None, stdin_of(&pod), false, true),
        ("CHECK", Some(&pod), stdin_of(&pod), true, false),
        ("CHECK", Some(&ghost), stdin_of(&ghost), false, true),
        ("STATUS", None, status.clone(), true, false),
        ("GC", None, gc, true, false),
        (
            "GC",
            None,
            status.replace("\"runDir\"", "\"runDirr\""),
            false,
            true,
        ),
        ("DEL", Some(&pod), stdin_of(&pod), true, false),
        ("DEL", Some(&pod), "[]".to_owned(), false, true),
        ("VERSION", None, status, true, true),
        ("NONSENSE", Some(&pod), stdin_of(&pod), false, true),
    ] {
        let ran = with_closed_stderr(&mesh, &chain, command, pod, &stdin);
        let stdout = String::from_utf8(ran.stdout).unwrap();
        let what = format!("{command} with {stdin:.60}: {} {stdout:?}", ran.status);
        assert_eq!(ran.status.success(), succeeds, "{what}");
        assert_eq!(serde_json::from_str::<Value>(&stdout).is_ok(), prints, "{what}");
        assert_eq!(stdout.is_empty(), !prints, "{what}");
        if !succeeds {
            assert!(serde_json::from_str::<CniError>(&stdout).is_ok(), "{what}");
            assert_eq!(ran.status.code(), Some(1), "{what}");
        }
    }
}

/// Whether an ELF file asks for a dynamic loader (`PT_INTERP`, elf(5)); 64 bit little endian.
fn is_static(binary: &Path) -> bool {
    let bytes = std::fs::read(binary).unwrap();
    let number = |at: usize, len: usize| {
        bytes[at..at + len]
            .iter()
            .rev()
            .fold(0_usize, |n, b| n << 8 | usize::from(*b))
    };
    let (start, size, count) = (number(0x20, 8), number(0x36, 2), number(0x38, 2));
    !(0..count).any(|i| number(start + i * size, 4) == 3)
}

/// A root directory, read-only, with nothing but the plugin, a netns file and the executor's socket.
fn empty_root(mesh: &Mesh, pod: &Pod, plugin: &Path) -> PathBuf {
    let root = mesh.node().dir().join("root");
    for directory in ["", "run/cni", "netns"] {
        std::fs::create_dir_all(root.join(directory)).unwrap();
    }
    std::fs::copy(plugin, root.join("sluice-cni")).unwrap();
    std::fs::write(root.join("netns/pod"), "").unwrap();
    let cni = mesh.run.cni_socket().parent().unwrap().to_owned();
    for (from, to) in [(cni.as_path(), "run/cni"), (pod.netns_path(), "netns/pod")] {
        let args =
            [Path::new("--bind"), from, &root.join(to)].map(|part| part.to_string_lossy().into_owned());
        text(
            mesh.node().place(),
            "mount",
            &args.each_ref().map(String::as_str),
            b"",
        )
        .unwrap();
    }
    let at = root.to_string_lossy();
    let read_only: [&[&str]; 2] = [&["--rbind", &at, &at], &["-o", "remount,bind,ro", &at]];
    for args in read_only {
        text(mesh.node().place(), "mount", args, b"").unwrap();
    }
    root
}

#[test]
fn a_static_plugin_works_in_an_empty_read_only_root_directory() {
    let plugin = binary("sluice-cni").unwrap();
    assert!(
        is_static(&plugin),
        "{} is not static: build it as `make dist` does and name its directory in SLUICE_BIN_DIR",
        plugin.display()
    );
    let mesh = start();
    let pod = declared(&mesh, "web").unwrap();
    let root = empty_root(&mesh, &pod, &plugin);
    let mut chain = mesh.chain().unwrap();
    chain.plugins[0]["runDir"] = json!("/run");
    let attachment = Attachment {
        netns: "/netns/pod".to_owned(),
        ..Attachment::from(&pod)
    };
    let result = pod.prev_result("1.0.0");
    let stdin = chain.stdin_of(&chain.plugins[0], Some(&result)).to_string();
    let run = |command: &str| {
        let mut args = vec!["-i".to_owned()];
        let env = chain.env_of(command, Some(&attachment)).into_iter();
        args.extend(
            env.filter(|(key, _)| key != "PATH")
                .map(|(key, value)| format!("{key}={value}")),
        );
        args.extend([
            "/usr/sbin/chroot".to_owned(),
            root.display().to_string(),
            "/sluice-cni".to_owned(),
        ]);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let ran = output(mesh.node().place(), "env", &args, stdin.as_bytes()).unwrap();
        let (stdout, stderr) = (
            String::from_utf8(ran.stdout).unwrap(),
            String::from_utf8(ran.stderr).unwrap(),
        );
        assert!(
            ran.status.success() && stderr.is_empty(),
            "{command}: {} {stdout} {stderr}",
            ran.status
        );
        stdout
    };
    assert_eq!(serde_json::from_str::<Value>(&run("ADD")).unwrap(), result);
    mesh.wait_state(&pod, PodState::Enrolled, PATIENCE).unwrap();
    assert_eq!(run("CHECK"), "");
    assert_eq!(run("DEL"), "");
    assert!(sandbox_files(&mesh).unwrap().is_empty());
}

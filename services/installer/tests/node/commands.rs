//! The commands that look or act once.

use std::fs;
use std::process::Output;

use base64::Engine;

use crate::support::{Node, OWNED, PODNET, SOON, wait_for};

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn a_plan_is_a_diff_and_changes_nothing() {
    let node = Node::new();
    let _broker = node.broker();
    fs::write(node.net.join("x.sluice-tmp.1"), "").unwrap();
    let output = node.once("plan", &[]);
    assert!(output.status.success());
    let text = stdout(&output);
    assert!(
        text.contains(&format!(
            "--- /dev/null\n+++ {}\n@@",
            node.net.join(OWNED).display()
        )),
        "{text}"
    );
    assert!(
        text.contains("+  {\n+    \"type\": \"sluice-cni\"") || text.contains("\"type\": \"sluice-cni\""),
        "{text}"
    );
    assert!(text.contains("# install the plugin: "), "{text}");
    assert!(
        text.contains("(not shown)") && !text.contains("first-token"),
        "{text}"
    );
    assert_eq!(node.names(), ["10-podnet.conflist", "x.sluice-tmp.1"]);
    assert!(!node.installed().exists() && !node.run.kubeconfig().exists());

    let text = stdout(&node.once("plan", &["--mode", "chained"]));
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("-  ")).collect();
    assert_eq!(
        lines,
        [r#"-  {"type":"portmap","capabilities":{"portMappings":true}}]}"#],
        "{text}"
    );
}

#[test]
fn a_flag_wins_over_the_environment_and_nonsense_there_is_refused_by_name() {
    let node = Node::new();
    let _broker = node.broker();
    let plan = |variable: (&str, &str), args: &[&str]| {
        let mut command = node.command("plan");
        command.env(variable.0, variable.1).args(args).output().unwrap()
    };
    let chained = ("SLUICE_CNI_MODE", "chained");
    assert!(stdout(&plan(chained, &[])).contains("/10-podnet.conflist"));
    let owned = stdout(&plan(chained, &["--mode", "owned"]));
    assert!(
        owned.contains(OWNED) && !owned.contains("/10-podnet.conflist"),
        "{owned}"
    );
    // An empty one is no default and no `false`.
    for (name, value, flag) in [
        ("SLUICE_CNI_MODE", "", "--mode"),
        ("SLUICE_GATE_NODE", "perhaps", "--gate-node"),
        ("SLUICE_REQUIRE_KUBECONFIG", "", "--require-kubeconfig"),
        ("SLUICE_SHUTDOWN_SECONDS", "soon", "--shutdown-seconds"),
    ] {
        let refused = plan((name, value), &[]);
        assert!(
            refused.status.code() == Some(2) && stderr(&refused).contains(flag),
            "{name}={value}: {}",
            stderr(&refused)
        );
    }
}

#[test]
fn a_plan_of_what_is_done_is_nothing_to_do() {
    let node = Node::new();
    let _broker = node.broker();
    let _installer = node.start_ready();
    assert_eq!(stdout(&node.once("plan", &[])), "# nothing to do\n");
}

#[test]
fn a_plan_without_a_broker_says_so() {
    let node = Node::new();
    let text = stdout(&node.once("plan", &[]));
    assert!(text.starts_with("# cannot reach the broker at "), "{text}");
    assert!(text.contains(OWNED));
}

#[test]
fn a_probe_of_nothing_fails_with_the_reason() {
    let node = Node::new();
    assert!(
        node.health().starts_with("the installer does not answer at "),
        "{}",
        node.health()
    );
    let _installer = node.start();
    wait_for("alive", SOON, || {
        let output = node.once("healthcheck", &["--alive"]);
        (output.status.success() && stdout(&output) == "alive\n").then_some(())
    });
    assert!(node.health().starts_with("not ready: "));
}

/// Of two agents on a node the one that stands by may be what is to mend the other: its pod gets ready whatever that one says.
#[test]
fn a_probe_in_another_container_than_the_serving_installers_finds_its_own_standing_by() {
    let node = Node::new();
    let asked = |args: &[&str]| {
        let output = node.once_elsewhere("healthcheck", args);
        (output.status.success(), stdout(&output))
    };
    assert!(!asked(&[]).0, "nobody serves");
    let _installer = node.start();
    node.wait_health("not ready: ", SOON);
    for args in [&[][..], &["--alive"]] {
        assert_eq!(asked(args), (true, "standing by\n".to_owned()), "{args:?}");
    }
}

#[test]
fn a_plugin_that_does_not_answer_is_not_installed() {
    let node = Node::new();
    let _broker = node.broker();
    for bad in [
        "#!/bin/sh\nexit 0\n",
        "#!/bin/sh\necho '{\"cniVersion\":\"1.0.0\"}'\n",
        "\x7fELF and no more",
    ] {
        fs::write(node.image().join("sluice-cni"), bad).unwrap();
        let mut installer = node.start();
        assert!(!installer.wait(SOON).success());
        assert!(
            node.log_text().contains("nothing is installed: "),
            "{}",
            node.log_text()
        );
        assert!(!node.installed().exists());
        assert_eq!(node.names(), ["10-podnet.conflist"]);
    }
}

#[test]
fn a_run_directory_that_others_can_write_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let node = Node::new();
    let directory = node.run.kubeconfig().parent().unwrap().to_owned();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o777)).unwrap();
    let mut installer = node.start();
    assert!(!installer.wait(SOON).success());
    assert!(
        node.log_text().contains("mode 0777; it must be uid 0"),
        "{}",
        node.log_text()
    );
    fs::remove_dir(&directory).unwrap();
    let mut installer = node.start();
    assert!(!installer.wait(SOON).success());
    assert!(node.log_text().contains("cannot open"), "{}", node.log_text());
}

#[test]
fn a_purge_waits_for_the_last_del() {
    let node = Node::new();
    let _broker = node.broker();
    let mut installer = node.start_ready();
    installer.kill();
    let output = node.once("purge", &[]);
    assert!(
        !output.status.success() && stderr(&output).contains("02-sluice.conflist still names the plugin"),
        "{}",
        stderr(&output)
    );
    assert!(node.once("uninstall", &[]).status.success());

    let cache = node.root().join("cache");
    fs::create_dir_all(cache.join("results")).unwrap();
    let config = base64::engine::general_purpose::STANDARD.encode(PODNET.replace("portmap", "sluice-cni"));
    let result = cache.join("results/podnet-c0ffee-eth0");
    fs::write(
        &result,
        format!(r#"{{"kind":"cniCacheV1","containerId":"c0ffee","config":"{config}","ifName":"eth0"}}"#),
    )
    .unwrap();
    let cache = ["--cni-cache-dir", cache.to_str().unwrap()];
    let output = node.once("purge", &cache);
    assert!(
        !output.status.success() && stderr(&output).contains("whose DEL is still to come"),
        "{}",
        stderr(&output)
    );
    assert!(node.installed().exists());
    fs::remove_file(result).unwrap();
    assert!(node.once("purge", &cache).status.success());
    assert!(!node.installed().exists());
    // Of nothing: done already.
    assert!(node.once("uninstall", &["--purge"]).status.success());
}

#[test]
fn the_stand_in_lets_every_pod_come_and_go() {
    use std::io::Write;
    use std::process::{Command, Stdio};
    #[expect(clippy::disallowed_methods, reason = "the test runs the program")]
    let run = |command: &str, input: &str| {
        let mut child = Command::new(crate::support::binary("sluice-cni-removed"))
            .env_clear()
            .env("CNI_COMMAND", command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{command}");
        stdout(&output)
    };
    let result = r#"{"cniVersion":"1.0.0", "ips":[{"address":"10.0.0.2/24"}],"mtu":1450.0}"#;
    let config = format!(
        r#"{{"cniVersion":"1.0.0","name":"n","type":"sluice-cni","runDir":"/gone","prevResult":{result}}}"#
    );
    assert_eq!(run("ADD", &config), result);
    for command in ["DEL", "CHECK", "GC", "STATUS"] {
        assert_eq!(run(command, &config), "");
    }
    assert_eq!(run("DEL", "not json"), "");
    let versions: serde_json::Value =
        serde_json::from_str(&run("VERSION", r#"{"cniVersion":"1.0.0"}"#)).unwrap();
    assert_eq!(versions["supportedVersions"].as_array().unwrap().len(), 7);
}

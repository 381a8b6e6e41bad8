//! The report has what helps, and no secret, wherever one was planted.
#![cfg(test)]

#[path = "../support/answers.rs"]
mod answers;
#[path = "../support/fake.rs"]
#[expect(dead_code, reason = "another test binary uses the rest")]
mod fake;
#[path = "../support/kubectl.rs"]
#[expect(dead_code, reason = "another test binary uses the rest")]
mod kubectl;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use answers::sick;
use fake::{Done, Node, run};
use kubectl::Cluster;
use serde_json::json;
use tempfile::TempDir;

/// The plugin's token, in the form that the API server gives out: header, claims (`sub` and `exp`), signature.
const TOKEN: &str = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJzeXN0ZW06c2VydmljZWFjY291bnQ6czpwIiwiZXhwIjoxNzkwMDAwMDAwfQ.cGxhbnRlZC1zaWc";
/// In other people's files.
const FOREIGN: &str = "planted-foreign-4711";

/// The files of a node, secrets included.
struct Host {
    directory: TempDir,
}

impl Host {
    fn new(run_dir: &Path) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = directory.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let conflist = json!({ "cniVersion": "1.0.0", "name": "k8s", "plugins": [
            { "type": "other", "policy": { "type": "k8s", "k8s_auth_token": FOREIGN } }, { "type": "sluice-cni" }] });
        write("net.d/02-sluice.conflist", &conflist.to_string());
        write(
            "net.d/calico-kubeconfig",
            &format!("users:\n- name: calico\n  user:\n    token: {FOREIGN}\n"),
        );
        write("net.d/broken.conf", &format!("{{ \"password\": \"{FOREIGN}"));
        write("bin/sluice-cni", "binary");
        write(
            "logs/sluice-system_sluice-node-abc12_uid/ambient-broker/0.log",
            &format!("Authorization: Bearer {FOREIGN}\ntoken {TOKEN} expired\nan ordinary line\n"),
        );
        write("logs/team-a_web-0_uid/app/0.log", "somebody else's log");
        let in_run = |path: &str, text: &str| {
            let path = run_dir.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let kubeconfig = json!({
            "clusters": [{ "name": "local", "cluster": { "server": "https://10.0.0.1:443" } }],
            "users": [{ "name": "sluice-plugin", "user": { "token": TOKEN } }],
        });
        in_run("plugin/kubeconfig", &kubeconfig.to_string());
        in_run("plugin/unprotected/u.json", r#"{"pod":"kube/etcd"}"#);
        in_run("state/sandboxes/a.json", r#"{"sandbox":"a"}"#);
        // Where nobody expects it.
        in_run("cni/tombstones/x.json", &format!("{{\"note\":\"{TOKEN}\"}}"));
        Self { directory }
    }

    fn flags(&self) -> Vec<String> {
        let at = |name: &str| self.directory.path().join(name).display().to_string();
        vec![
            format!("--cni-net-dir={}", at("net.d")),
            format!("--cni-bin-dir={}", at("bin")),
            format!("--log-dir={}", at("logs")),
            format!("--credentials={}", at("disk/kubeconfig")),
        ]
    }
}

/// Unpacks with the `tar` of this machine.
#[expect(clippy::disallowed_methods, reason = "an independent tool reads the archive")]
fn unpack(archive: &Path) -> (TempDir, Vec<(String, String)>) {
    let directory = tempfile::tempdir().unwrap();
    let status = Command::new("tar")
        .arg("-xf")
        .arg(archive)
        .arg("-C")
        .arg(directory.path())
        .status()
        .unwrap();
    assert!(status.success());
    let mut files = Vec::new();
    collect(directory.path(), directory.path(), &mut files);
    (directory, files)
}

fn collect(root: &Path, directory: &Path, files: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(root, &path, files);
        } else {
            let name = path.strip_prefix(root.join("sluice-bug-report")).unwrap();
            files.push((name.display().to_string(), fs::read_to_string(&path).unwrap()));
        }
    }
}

/// The one file whose name ends so.
fn file<'a>(files: &'a [(String, String)], end: &str) -> &'a str {
    let found: Vec<_> = files.iter().filter(|(name, _)| name.ends_with(end)).collect();
    assert_eq!(
        found.len(),
        1,
        "{end}: {:?}",
        files.iter().map(|(name, _)| name).collect::<Vec<_>>()
    );
    &found[0].1
}

fn no_secret(files: &[(String, String)]) {
    for (name, text) in files {
        for secret in [FOREIGN, TOKEN, TOKEN.rsplit('.').next().unwrap()] {
            assert!(!text.contains(secret), "{name}: {text}");
        }
    }
}

fn report(run_dir: &Path, host: &Host, target: &Path) -> Done {
    let mut arguments = vec!["bug-report".to_owned()];
    arguments.extend(host.flags());
    arguments.push(target.display().to_string());
    run(run_dir, &arguments.iter().map(String::as_str).collect::<Vec<_>>())
}

#[test]
fn a_node_is_told_in_full_and_without_its_secrets() {
    let node = Node::new(sick());
    let host = Host::new(node.run_dir.path());
    let target = host.directory.path().join("report.tar");
    let done = report(node.run_dir.path(), &host, &target);
    assert_eq!((done.status, &*done.stderr), (0, ""), "{done:?}");
    assert!(done.stdout.contains("report.tar"), "{done:?}");
    assert_eq!(fs::metadata(&target).unwrap().permissions().mode() & 0o777, 0o600);

    let (_directory, files) = unpack(&target);
    no_secret(&files);
    for (end, part) in [
        ("status.txt", "no ready proxy connection"),
        ("status.json", "\"source_problems\""),
        ("preflight.txt", "fib lookup"),
        ("pods/team-a/web-1.txt", "EADDRINUSE"),
        ("pods/team-a/job-x.json", "\"decides\": true"),
        ("versions.txt", "sluicectl "),
        ("net.d/02-sluice.conflist", "\"type\":\"sluice-cni\""),
        ("net.d/broken.conf", "[REDACTED]"),
        ("net.d/LISTING.txt", "calico-kubeconfig"),
        ("bin/LISTING.txt", "sluice-cni"),
        ("kubeconfig.json", "\"exp\": 1790000000"),
        ("unprotected/u.json", "kube/etcd"),
        ("sandboxes/a.json", "sandbox"),
        ("ambient-broker/0.log", "an ordinary line"),
        ("LISTING.txt", ""),
    ] {
        if end == "LISTING.txt" {
            assert!(
                files
                    .iter()
                    .any(|(name, text)| name.ends_with(end) && text.contains("workload.sock"))
            );
        } else {
            assert!(file(&files, end).contains(part), "{end}: {}", file(&files, end));
        }
    }
    for absent in ["calico-kubeconfig", "web-0_uid"] {
        assert!(!files.iter().any(|(name, _)| name.contains(absent)), "{absent}");
    }
}

#[test]
fn a_node_on_which_nothing_runs_is_told_as_far_as_it_can_be() {
    let root = tempfile::tempdir().unwrap();
    let host = Host::new(&root.path().join("run"));
    fs::write(
        root.path().join("run/plugin/kubeconfig"),
        format!("token: {TOKEN}\n"),
    )
    .unwrap();
    let target = root.path().join("report.tar");
    assert_eq!(report(&root.path().join("run"), &host, &target).status, 0);
    let (_directory, files) = unpack(&target);
    no_secret(&files);
    let notes = file(&files, "NOTES.txt");
    assert!(notes.contains("cannot reach the broker"), "{notes}");
    assert!(notes.contains("not a kubeconfig in JSON, left out"), "{notes}");
    assert!(file(&files, "02-sluice.conflist").contains("sluice-cni"));
}

#[test]
fn credentials_on_disk_are_told_of_without_their_token() {
    let node = Node::new(sick());
    let host = Host::new(node.run_dir.path());
    let disk = host.directory.path().join("disk");
    fs::create_dir(&disk).unwrap();
    fs::rename(
        node.run_dir.path().join("plugin/kubeconfig"),
        disk.join("kubeconfig"),
    )
    .unwrap();
    let target = host.directory.path().join("report.tar");
    assert_eq!(report(node.run_dir.path(), &host, &target).status, 0);
    let (_directory, files) = unpack(&target);
    no_secret(&files);
    assert!(file(&files, "kubeconfig.json").contains("\"exp\": 1790000000"));
}

#[test]
fn a_file_that_exists_is_not_written_over() {
    let root = tempfile::tempdir().unwrap();
    let host = Host::new(root.path());
    let target = root.path().join("report.tar");
    fs::write(&target, "precious").unwrap();
    let done = report(root.path(), &host, &target);
    assert!(
        done.status == 1 && done.stderr.contains("File exists"),
        "{done:?}"
    );
    assert_eq!(fs::read_to_string(&target).unwrap(), "precious");
}

#[test]
fn from_afar_each_container_tells_what_it_sees() {
    let node = Node::new(sick());
    let _host = Host::new(node.run_dir.path());
    let cluster = Cluster::new(node.run_dir.path());
    fs::write(
        cluster.file("log"),
        format!("Authorization: Bearer {FOREIGN}\nan ordinary line\n{TOKEN}\n"),
    )
    .unwrap();
    fs::write(
        cluster.file("node.yaml"),
        format!("kind: Node\nannotations:\n  x/token: {FOREIGN}\n"),
    )
    .unwrap();
    let done = cluster.run(&["--node", "node-1", "bug-report", "report.tar"]);
    assert_eq!((done.status, &*done.stderr), (0, ""), "{done:?}");
    let (_directory, files) = unpack(&cluster.file("report.tar"));
    no_secret(&files);
    for (name, part) in [
        ("ambient-broker/status.txt", "no ready proxy connection"),
        ("ambient-broker/pods/team-a/web-1.txt", "EADDRINUSE"),
        ("installer/kubeconfig.json", "\"exp\": 1790000000"),
        ("netns-executor/versions.txt", "sluicectl "),
        ("logs/installer.log", "an ordinary line"),
        // What ends before the others start may be why they do not.
        ("logs/first.log", "an ordinary line"),
        ("cluster/node.yaml", "kind: Node"),
        ("cluster/pod.yaml", "web-0"),
    ] {
        assert!(
            file(&files, name).contains(part),
            "{name}: {}",
            file(&files, name)
        );
    }
    // What this cluster's kubectl does not know is noted, and keeps nothing else from being told.
    assert!(file(&files, "NOTES.txt").contains("cluster/events.txt: kubectl get events failed"));
}

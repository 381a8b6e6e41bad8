//! What operators see: metrics that add up, status that is what the kernel has, problems named where they are.

use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use sluice_integration::manifests::PodOptions;
use sluice_integration::mesh::{Mesh, MeshOptions};
use sluice_integration::scene::{PATIENCE, Scene, mesh_pod};
use sluice_integration::uds_http::{get, metric};
use sluice_proto::pb::workload::PodState;
use sluice_testkit::cni::Attachment;
use sluice_testkit::netns::Place;
use sluice_testkit::process::{Process, Spawn, binary, output, text};
use sluice_testkit::standin::Behaviour;
use sluice_testkit::wait::{poll_true, poll_until};

/// Runs `sluicectl`; gives exit status and output.
pub(crate) fn ctl(mesh: &Mesh, args: &[&str]) -> (i32, String) {
    let program = binary("sluicectl").unwrap();
    let run = mesh.run.root().display().to_string();
    let all: Vec<&str> = ["--run-dir", &run].iter().chain(args).copied().collect();
    let output = output(mesh.node().place(), program.to_str().unwrap(), &all, b"").unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.code().unwrap(), text)
}

fn ctl_json(mesh: &Mesh, args: &[&str]) -> Value {
    let (_, text) = ctl(mesh, &[&["-o", "json"], args].concat());
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn metrics(mesh: &Mesh) -> String {
    get(&mesh.run.http_socket(), "/metrics").unwrap().body
}

#[test]
fn metrics_tell_every_stage_and_add_up() {
    let mesh = Mesh::start().unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    mesh_pod(&mesh, "fine").unwrap();
    let plain = mesh.node().pod("plain").create().unwrap();
    mesh.manifests.pod(&plain, &PodOptions::mode("none")).unwrap();
    mesh.add(&plain).unwrap().ok().unwrap();
    let lost = mesh.node().pod("lost").create().unwrap();
    mesh.manifests.pod(&lost, &PodOptions::default()).unwrap();
    mesh.wait_state(&lost, PodState::Broken, PATIENCE).unwrap();
    let waiting = mesh.node().pod("waiting").create().unwrap();
    mesh.manifests
        .pod(
            &waiting,
            &PodOptions {
                without_addresses: true,
                ..PodOptions::default()
            },
        )
        .unwrap();
    mesh.wait_state(&waiting, PodState::Pending, PATIENCE).unwrap();
    let text = metrics(&mesh);
    let value = |series: &str| metric(&text, series).unwrap_or_else(|| panic!("no {series} in\n{text}"));
    assert!((value("pods_enrolled") - 1.0).abs() < 0.1);
    assert!((value("pods_pending") - 1.0).abs() < 0.1);
    assert!((value("pods_broken{reason=\"netns-not-found\"}") - 1.0).abs() < 0.1);
    assert!(
        (value("pods_expected") - 3.0).abs() < 0.1,
        "expected is not enrolled + broken + pending"
    );
    assert!((value("pods_unprotected") - 2.0).abs() < 0.1);
    assert!((value("zds_connections{state=\"ready\"}") - 1.0).abs() < 0.1);
    for stage in [
        "connect",
        "netns",
        "classify",
        "rules",
        "handoff",
        "probe-set",
        "total",
    ] {
        let seen = value(&format!("executor_add_seconds_count{{stage=\"{stage}\"}}"));
        assert!(seen > 0.0, "stage {stage} was never measured");
    }
    assert!(
        text.contains("add_seconds_bucket") && text.contains("stage=\"ack\""),
        "{text}"
    );
    poll_true("the start is measured", PATIENCE, || {
        metric(&metrics(&mesh), "start_to_ready_seconds").is_some_and(|seconds| seconds > 0.0)
    })
    .unwrap();
    for name in [
        "api_initial_sync_seconds",
        "reconcile_seconds",
        "host_rules_repaired",
        "zds_queue_depth",
        "zds_oldest_waiter_seconds",
    ] {
        assert!(text.contains(name), "no {name} in\n{text}");
    }
    assert!(text.trim_end().ends_with("# EOF"));
}

#[test]
fn status_is_what_the_kernel_has() {
    // Slow enough for a look before the repair.
    let slow = [
        "--drift-interval-ms",
        "600000",
        "--full-drift-interval-ms",
        "600000",
    ];
    let scene = Scene::start_with(MeshOptions {
        executor: slow.map(String::from).to_vec(),
        ..MeshOptions::default()
    })
    .unwrap();
    let healthy = scene.mesh.describe(&scene.client).unwrap();
    assert!(healthy.differences.is_empty(), "{:?}", healthy.differences);
    assert!(healthy.rules.iter().any(|rule| rule.contains("15001")) && !healthy.probe_addresses.is_empty());
    let shown = healthy.pod.unwrap();
    assert!(
        shown.zds_connection > 0
            && shown.acked_unix_ms > 0
            && shown.netns.unwrap().inode == scene.client.netns().inode()
    );
    let (status, text_of) = ctl(&scene.mesh, &["status", "--pod", "default/client"]);
    assert_eq!(status, 0, "{text_of}");
    text(
        &Place::from(scene.client.netns()),
        "nft",
        &["flush", "table", "inet", "sluice"],
        b"",
    )
    .unwrap();
    let broken = scene.mesh.describe(&scene.client).unwrap();
    assert!(!broken.differences.is_empty(), "the damage is not shown");
    assert!(scene.mesh.describe(&scene.server).unwrap().differences.is_empty());
}

#[test]
fn a_stopped_executor_makes_the_node_not_ready_and_fails_liveness() {
    let scene = Scene::start().unwrap();
    let ready = || get(&scene.mesh.run.http_socket(), "/readyz").is_ok_and(|response| response.status == 200);
    poll_true("the node is ready", PATIENCE, ready).unwrap();
    let alive = || {
        let run = scene.mesh.run.root().display().to_string();
        let program = binary("netns-executor").unwrap();
        output(
            scene.mesh.node().place(),
            "timeout",
            &["11", program.to_str().unwrap(), "--run-dir", &run, "healthcheck"],
            b"",
        )
        .unwrap()
        .status
        .success()
    };
    assert!(alive(), "liveness fails on a healthy node");
    scene.mesh.executor.signal(Signal::SIGSTOP).unwrap();
    let not_ready = poll_true("readiness tells", PATIENCE, || !ready());
    let healthy = alive();
    let reasons = get(&scene.mesh.run.http_socket(), "/readyz").map(|response| response.body);
    scene.mesh.executor.signal(Signal::SIGCONT).unwrap();
    not_ready.unwrap();
    assert!(reasons.unwrap().contains("executor"));
    assert!(!healthy, "liveness passes although the executor is stopped");
    poll_true("the node is ready again", PATIENCE, ready).unwrap();
    scene.wait_enrolled().unwrap();
}

#[test]
fn a_bad_manifest_is_named_by_file_line_and_field_and_changes_nothing_else() {
    let scene = Scene::start().unwrap();
    let bad = "apiVersion: v1\nkind: Pod\nmetadata:\n  name: bad\n  namespace: default\n  labels: 7\n";
    scene.mesh.manifests.write("bad.yaml", bad).unwrap();
    let problem = poll_until("the problem is reported", PATIENCE, || {
        scene.mesh.node_status().ok()?.source_problems.into_iter().next()
    })
    .unwrap();
    assert!(
        problem.file.ends_with("bad.yaml") && problem.line == 6 && problem.field.contains("labels"),
        "{problem:?}"
    );
    scene.wait_enrolled().unwrap();
    // A file that was good and turns bad keeps what it said.
    let file = format!("pod-default-{}.json", scene.client.name());
    scene.mesh.manifests.write(&file, "{").unwrap();
    poll_true("both are reported", PATIENCE, || {
        scene.mesh.node_status().unwrap().source_problems.len() == 2
    })
    .unwrap();
    scene.wait_enrolled().unwrap();
    let (_, text_of) = ctl(&scene.mesh, &["status"]);
    assert!(text_of.contains("bad.yaml"), "{text_of}");
    std::fs::remove_file(scene.mesh.manifests.path().join("bad.yaml")).unwrap();
    scene
        .mesh
        .manifests
        .pod(&scene.client, &PodOptions::default())
        .unwrap();
    poll_true("all is well again", PATIENCE, || {
        scene.mesh.node_status().unwrap().source_problems.is_empty()
    })
    .unwrap();
    scene.wait_enrolled().unwrap();
}

#[test]
fn sluicectl_answers_from_the_running_node() {
    let scene = Scene::start().unwrap();
    let plain = scene.mesh.node().pod("plain").create().unwrap();
    scene
        .mesh
        .manifests
        .pod(&plain, &PodOptions::mode("none"))
        .unwrap();
    scene.mesh.add(&plain).unwrap().ok().unwrap();
    let (status, table) = ctl(&scene.mesh, &["status"]);
    assert!(
        status == 0
            && ["client", "server", "plain"]
                .iter()
                .all(|name| table.contains(name)),
        "{status}: {table}"
    );
    assert!(ctl_json(&scene.mesh, &["status"]).is_object());
    let (status, why) = ctl(&scene.mesh, &["explain", "plain"]);
    assert!(
        status == 0 && why.contains("istio.io/dataplane-mode"),
        "{status}: {why}"
    );
    let (status, why) = ctl(&scene.mesh, &["explain", "default/client"]);
    assert!(status == 0 && why.contains("namespace"), "{status}: {why}");
    let (status, why) = ctl(&scene.mesh, &["explain", "nobody"]);
    assert!(status != 0 && why.contains("nobody"), "{status}: {why}");
    let (status, features) = ctl(&scene.mesh, &["preflight"]);
    assert_eq!(status, 0, "{features}");
    for family in ["ip", "ip6"] {
        assert!(features.contains(family), "{features}");
    }
    let all = ctl_json(&scene.mesh, &["preflight"]);
    let names = all.to_string();
    for feature in ["redirect", "mark", "zone", "socket", "set"] {
        assert!(names.contains(feature), "no {feature} in {names}");
    }
    assert!(
        all.as_array()
            .unwrap()
            .iter()
            .all(|feature| feature["available"] == true),
        "{names}"
    );
}

/// `sluicectl watch` in the background.
fn watching(mesh: &Mesh) -> Process {
    Spawn::binary("sluicectl")
        .unwrap()
        .arg("--run-dir")
        .arg(mesh.run.root())
        .arg("watch")
        .place(mesh.node().place().clone())
        .log(mesh.node().dir().join("watch.log"))
        .start()
        .unwrap()
}

#[test]
fn sluicectl_watch_shows_changes_as_they_happen() {
    let scene = Scene::start().unwrap();
    let watch = watching(&scene.mesh);
    let shows = |what: &str| poll_true(what, PATIENCE, || watch.log_text().contains(what));
    shows("client").unwrap();
    scene
        .mesh
        .manifests
        .pod(&scene.client, &PodOptions::mode("none"))
        .unwrap();
    scene
        .mesh
        .wait_state(&scene.client, PodState::Out, PATIENCE)
        .unwrap();
    poll_true("leaving is shown", PATIENCE, || {
        watch
            .log_text()
            .to_lowercase()
            .lines()
            .any(|line| line.contains("client") && line.contains("out"))
    })
    .unwrap();
}

#[test]
fn a_refusing_proxy_is_named_in_status_and_exit_status() {
    let scene = Scene::start().unwrap();
    scene
        .mesh
        .control()
        .behave(Behaviour::default().nack("default/refused", "cannot bind [::1]:15053"))
        .unwrap();
    let pod = scene.mesh.node().pod("refused").create().unwrap();
    scene.mesh.manifests.pod(&pod, &PodOptions::mode("none")).unwrap();
    scene.mesh.add(&pod).unwrap().ok().unwrap();
    scene.mesh.manifests.pod(&pod, &PodOptions::default()).unwrap();
    let broken = scene.mesh.wait_state(&pod, PodState::Broken, PATIENCE).unwrap();
    assert_eq!(broken.reason, "proxy-nack");
    let (status, shown) = ctl(&scene.mesh, &["status", "--pod", "default/refused"]);
    assert!(
        status == 3 && shown.contains("15053") && shown.contains("net.ipv6.conf.all.disable_ipv6"),
        "{status}: {shown}"
    );
    let (status, _) = ctl(&scene.mesh, &["status"]);
    assert_eq!(status, 3);
    scene.mesh.control().behave(Behaviour::default()).unwrap();
    scene
        .mesh
        .wait_state(&pod, PodState::Enrolled, Duration::from_secs(30))
        .unwrap();
}

#[test]
fn a_refused_pod_blocks_no_other_and_is_forgotten_when_it_goes() {
    let scene = Scene::start().unwrap();
    let refused = scene.mesh.node().pod("refused").create().unwrap();
    scene
        .mesh
        .manifests
        .pod(&refused, &PodOptions::mode("none"))
        .unwrap();
    scene.mesh.add(&refused).unwrap().ok().unwrap();
    let nack = Behaviour::default().nack("default/refused", "cannot bind [::1]:15053");
    scene.mesh.control().behave(nack).unwrap();
    scene
        .mesh
        .manifests
        .pod(&refused, &PodOptions::default())
        .unwrap();
    scene
        .mesh
        .wait_state(&refused, PodState::Broken, PATIENCE)
        .unwrap();
    let other = mesh_pod(&scene.mesh, "other").unwrap();
    scene.wait_enrolled().unwrap();
    let uid = refused.uid().to_owned();
    scene.mesh.del(&refused).unwrap().ok().unwrap();
    scene.mesh.manifests.delete_pod(&refused).unwrap();
    refused.delete().unwrap();
    scene
        .mesh
        .control()
        .wait("the proxy has let go", PATIENCE, |report| {
            !report.pending.contains_key(&uid) && !report.workloads.contains_key(&uid)
        })
        .unwrap();
    let known =
        |status: &sluice_proto::pb::workload::Pod| status.pod.as_ref().is_some_and(|pod| pod.uid == uid);
    poll_true("the broker has forgotten it", PATIENCE, || {
        !scene.mesh.pods().unwrap().iter().any(known)
    })
    .unwrap();
    let (status, _) = ctl(&scene.mesh, &["status"]);
    assert_eq!(status, 0, "a pod that is gone still counts");
    scene
        .mesh
        .wait_state(&other, PodState::Enrolled, PATIENCE)
        .unwrap();
}

#[test]
fn a_plugin_that_decides_by_another_configuration_than_the_broker_is_told_of() {
    let mesh = Mesh::start().unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    let pod = mesh.node().pod("web").create().unwrap();
    mesh.manifests.pod(&pod, &PodOptions::default()).unwrap();
    let mut chain = mesh.chain().unwrap();
    chain.plugins.last_mut().unwrap()["selection"] = json!({ "excludedNamespaces": ["elsewhere"] });
    let add = chain.add(&Attachment::from(&pod), Some(&pod.prev_result("1.0.0")));
    add.unwrap().ok().unwrap();
    let (_, status) = ctl(&mesh, &["status"]);
    assert!(
        status.contains("Configuration") && status.contains("DIFFERS"),
        "{status}"
    );
    chain.plugins.last_mut().unwrap()["selection"] = json!({});
    let again = chain.add(&Attachment::from(&pod), Some(&pod.prev_result("1.0.0")));
    again.unwrap().ok().unwrap();
    let (_, status) = ctl(&mesh, &["status"]);
    assert!(!status.contains("DIFFERS"), "{status}");
}

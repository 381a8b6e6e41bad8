//! The handoff to ztunnel between the real broker and several proxies, some of which misbehave.

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sluice_integration::add_client::{AddClient, attachment};
use sluice_integration::manifests::PodOptions;
use sluice_integration::mesh::Mesh;
use sluice_integration::proxies::{Handoff, node_without_proxy, wait_told};
use sluice_integration::raw_ztunnel::RawZtunnel;
use sluice_integration::scene::{PATIENCE, mesh_pod};
use sluice_proto::pb::cni::add_response::Outcome;
use sluice_proto::pb::types::Attachment;
use sluice_proto::pb::workload::PodState;
use sluice_testkit::netns::{Netns, Place};
use sluice_testkit::pod::Pod;
use sluice_testkit::process::text;
use sluice_testkit::standin::{Behaviour, Control};
use sluice_testkit::wait::poll_true;

/// Established connections of the ZDS socket as `ss` sees them. The server's end of a Unix connection belongs to the
/// netns of the client.
fn live_sockets(mesh: &Mesh, clients: &[&Handoff]) -> usize {
    let mut places = vec![Place::default()];
    for client in clients {
        let netns = File::open(format!("/proc/{}/ns/net", client.process.pid())).unwrap();
        places.push(Place::from(&Netns::from_fd(netns.into())));
    }
    let directory = mesh.run.zds_socket().parent().unwrap().display().to_string();
    let listings = places
        .iter()
        .map(|place| text(place, "ss", &["-x", "-p", "-n"], b"").unwrap());
    listings
        .map(|all| {
            all.lines()
                .filter(|line| line.contains("ESTAB") && line.contains(&directory))
                .count()
        })
        .sum()
}

fn counted(mesh: &Mesh) -> usize {
    mesh.node_status().unwrap().zds.len()
}

fn settles_at(mesh: &Mesh, clients: &[&Handoff]) {
    let mut last = (0, 0);
    let outcome = poll_true("broker and kernel agree", PATIENCE, || {
        last = (counted(mesh), live_sockets(mesh, clients));
        last == (clients.len(), clients.len())
    });
    outcome.unwrap_or_else(|late| {
        panic!(
            "{late}: told {}, alive {}, expected {}",
            last.0,
            last.1,
            clients.len()
        )
    });
}

fn leave(mesh: &Mesh, pod: &Pod) {
    mesh.del(pod).unwrap().ok().unwrap();
    mesh.manifests.delete_pod(pod).unwrap();
}

#[test]
fn connections_are_counted_as_the_kernel_has_them_in_any_order_of_coming_and_going() {
    let mesh = node_without_proxy().unwrap();
    let sequences: [&[&str]; 3] = [
        &["+1", "+2", "-1", "-2"],
        &["+1", "+2", "-2", "-1"],
        &["+1", "-1", "+2"],
    ];
    let mut pods = 0;
    for (round, sequence) in sequences.iter().enumerate() {
        let mut live: Vec<(&str, Handoff)> = Vec::new();
        for step in *sequence {
            let (verb, name) = step.split_at(1);
            if verb == "+" {
                live.push((name, Handoff::ready(&mesh, &format!("r{round}-{name}")).unwrap()));
            } else {
                live.retain(|(known, _)| known != &name);
            }
            settles_at(&mesh, &live.iter().map(|(_, proxy)| proxy).collect::<Vec<_>>());
            if !live.is_empty() {
                pods += 1;
                let pod = mesh_pod(&mesh, &format!("pod-{pods}")).unwrap();
                leave(&mesh, &pod);
            }
        }
    }
    settles_at(&mesh, &[]);
    // Fewer at a time than a broker that is behind refuses.
    for _ in 0..4 {
        for _ in 0..25 {
            let quick = RawZtunnel::connect(&mesh.run.zds_socket()).unwrap();
            quick.hello(1).unwrap();
        }
        settles_at(&mesh, &[]);
    }
    let last = Handoff::ready(&mesh, "last").unwrap();
    settles_at(&mesh, &[&last]);
    let pod = mesh_pod(&mesh, "after-all").unwrap();
    wait_told(&last.control, "add", &pod).unwrap();
}

#[test]
fn a_connection_that_cannot_serve_gets_no_add_while_an_older_one_can() {
    let mesh = node_without_proxy().unwrap();
    let first = Handoff::ready(&mesh, "first").unwrap();
    let serves = |name: &str| {
        let started = Instant::now();
        let pod = mesh_pod(&mesh, name).unwrap();
        wait_told(&first.control, "add", &pod).unwrap();
        // Below the 4 s that an unanswered message costs.
        assert!(
            started.elapsed() < Duration::from_secs(4),
            "{name} waited for the wrong connection"
        );
        pod
    };
    serves("before");
    {
        let _mute = RawZtunnel::connect(&mesh.run.zds_socket()).unwrap();
        poll_true("it is counted", PATIENCE, || counted(&mesh) == 2).unwrap();
        serves("without-hello");
    }
    for (name, behaviour) in [
        ("silent", Behaviour::default().silent("*")),
        ("nacking", Behaviour::default().nack("*", "cannot")),
    ] {
        let second = Handoff::start(&mesh, name, &behaviour).unwrap();
        second
            .control
            .wait("it is connected", PATIENCE, |report| report.connections > 0)
            .unwrap();
        serves(name);
        assert!(!second.control.counts().unwrap().ready);
    }
    let second = Handoff::ready(&mesh, "second").unwrap();
    let pod = mesh_pod(&mesh, "to-the-second").unwrap();
    wait_told(&second.control, "add", &pod).unwrap();
    leave(&mesh, &pod);
    for proxy in [&first, &second] {
        let held = |control: &Control| control.counts().unwrap().workloads.contains_key(pod.uid());
        poll_true("nobody holds the pod", PATIENCE, || !held(&proxy.control)).unwrap();
    }
    for proxy in [&first, &second] {
        wait_told(&proxy.control, "del", &pod).unwrap();
    }
}

#[test]
fn a_dead_pod_is_in_no_proxys_final_state() {
    let mut mesh = Mesh::start().unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    let alive = mesh_pod(&mesh, "alive").unwrap();
    let gone = |mesh: &Mesh, uid: &str| {
        let held = || mesh.control().counts().unwrap();
        poll_true("the proxy has let go", PATIENCE, || {
            !held().workloads.contains_key(uid) && !held().pending.contains_key(uid)
        })
        .unwrap();
        mesh.control().wait_ready(PATIENCE).unwrap();
    };
    // Deleted while the broker was down, with DEL.
    let pod = mesh_pod(&mesh, "deleted").unwrap();
    let uid = pod.uid().to_owned();
    mesh.broker.kill().unwrap();
    leave(&mesh, &pod);
    pod.delete().unwrap();
    mesh.broker.start_again().unwrap();
    mesh.wait_state(&alive, PodState::Enrolled, PATIENCE).unwrap();
    gone(&mesh, &uid);
    // Sandbox lost without DEL while both were down; the API still lists the pod.
    let pod = mesh_pod(&mesh, "lost").unwrap();
    let uid = pod.uid().to_owned();
    mesh.executor.kill().unwrap();
    mesh.broker.kill().unwrap();
    pod.delete().unwrap();
    mesh.executor.start_again().unwrap();
    mesh.broker.start_again().unwrap();
    mesh.wait_state(&alive, PodState::Enrolled, PATIENCE).unwrap();
    gone(&mesh, &uid);
    // Deleted before its status was written: the API never told its address.
    let pod = mesh.node().pod("unwritten").create().unwrap();
    let unwritten = PodOptions {
        without_addresses: true,
        phase: "Pending".to_owned(),
        ..PodOptions::default()
    };
    mesh.manifests.pod(&pod, &unwritten).unwrap();
    mesh.add(&pod).unwrap().ok().unwrap();
    wait_told(&mesh.control(), "add", &pod).unwrap();
    let uid = pod.uid().to_owned();
    mesh.manifests.delete_pod(&pod).unwrap();
    pod.delete().unwrap();
    gone(&mesh, &uid);
    // Deleted between the start and the end of a snapshot.
    let pod = mesh_pod(&mesh, "in-between").unwrap();
    let uid = pod.uid().to_owned();
    mesh.proxy.take().unwrap().kill().unwrap();
    let slow = Handoff::start(&mesh, "slow", &Behaviour::default().delay_ms("add", 500)).unwrap();
    poll_true("the snapshot has begun", PATIENCE, || {
        !slow.control.report().unwrap().messages.is_empty()
    })
    .unwrap();
    leave(&mesh, &pod);
    pod.delete().unwrap();
    slow.control.wait_ready(PATIENCE).unwrap();
    poll_true("the proxy has let go", PATIENCE, || {
        !slow.control.counts().unwrap().workloads.contains_key(&uid)
    })
    .unwrap();
    drop(slow);
    mesh.start_proxy().unwrap();
    gone(&mesh, &uid);
    assert!(
        mesh.control()
            .counts()
            .unwrap()
            .workloads
            .contains_key(alive.uid())
    );
}

#[test]
fn a_pod_that_has_ended_is_deleted_at_the_proxy_even_without_its_netns() {
    let mesh = Mesh::start().unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    for (name, phase) in [("job", "Succeeded"), ("crashed", "Failed")] {
        let pod = mesh_pod(&mesh, name).unwrap();
        mesh.manifests
            .pod(
                &pod,
                &PodOptions {
                    phase: phase.into(),
                    ..PodOptions::default()
                },
            )
            .unwrap();
        wait_told(&mesh.control(), "del", &pod).unwrap();
        let other = mesh_pod(&mesh, &format!("{name}-2")).unwrap();
        let status = PodOptions {
            phase: phase.into(),
            ..PodOptions::default()
        };
        let uid = other.uid().to_owned();
        mesh.manifests.pod(&other, &status).unwrap();
        other.delete().unwrap();
        poll_true("del without a netns", PATIENCE, || {
            mesh.control()
                .report()
                .unwrap()
                .messages
                .iter()
                .any(|m| m.kind == "del" && m.uid == uid)
        })
        .unwrap();
    }
}

#[test]
fn deletes_end_in_time_while_a_proxy_keeps_reconnecting() {
    const DELETES: usize = 1000;
    const WORKERS: usize = 8;
    let mesh = node_without_proxy().unwrap();
    let steady = Handoff::ready(&mesh, "steady").unwrap();
    let pods: Vec<Pod> = (0..WORKERS)
        .map(|n| mesh.node().pod(&format!("pod-{n}")).create().unwrap())
        .collect();
    for pod in &pods {
        mesh.manifests.pod(pod, &PodOptions::default()).unwrap();
    }
    let stop = AtomicBool::new(false);
    let longest = std::thread::scope(|scope| {
        scope.spawn(|| reconnect(&mesh, &stop));
        let workers: Vec<_> = pods
            .iter()
            .map(|pod| scope.spawn(|| come_and_go(&mesh, pod, DELETES / WORKERS)))
            .collect();
        let longest = workers
            .into_iter()
            .map(|worker| worker.join().unwrap())
            .max()
            .unwrap();
        stop.store(true, Ordering::Relaxed);
        longest
    });
    assert!(
        longest < Duration::from_secs(6),
        "an operation waited {longest:?}"
    );
    steady
        .control
        .wait("all deletes are applied", PATIENCE, |report| {
            report.workloads.is_empty()
        })
        .unwrap();
    settles_at(&mesh, &[&steady]);
    let pod = mesh_pod(&mesh, "after-all").unwrap();
    wait_told(&steady.control, "add", &pod).unwrap();
}

/// A pod is added and deleted so many times, as a sandbox of its own each time; gives the longest wait.
fn come_and_go(mesh: &Mesh, pod: &Pod, times: usize) -> Duration {
    let client = AddClient::new(&mesh.run).unwrap();
    let mut longest = Duration::ZERO;
    for number in 0..times {
        let key = Attachment {
            container_id: format!("{}-{number}", pod.name()),
            ..attachment(pod)
        };
        for step in ["add", "del"] {
            let started = Instant::now();
            if step == "add" {
                let outcome = client.add_as(pod, key.clone()).unwrap().outcome;
                assert!(matches!(outcome, Some(Outcome::Admitted(_))), "{outcome:?}");
            } else {
                client.del(key.clone()).unwrap();
            }
            longest = longest.max(started.elapsed());
        }
    }
    longest
}

/// Connects, takes what comes for 20 ms, closes; again and again.
fn reconnect(mesh: &Mesh, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        let Ok(peer) = RawZtunnel::connect(&mesh.run.zds_socket()) else {
            continue;
        };
        let until = Instant::now() + Duration::from_millis(20);
        let _ = peer.hello(1);
        while Instant::now() < until
            && peer
                .receive(Duration::from_millis(5))
                .is_ok_and(|message| message.is_some())
        {
            let _ = peer.ack();
        }
    }
}

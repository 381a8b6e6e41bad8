//! Coming and going, thousands of times: nothing is left behind, nothing grows, no thread strays.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use sluice_integration::add_client::{AddClient, attachment};
use sluice_integration::descriptors::all_processes;
use sluice_integration::manifests::PodOptions;
use sluice_integration::mesh::{Mesh, MeshOptions};
use sluice_integration::netns_state::{redirects, rules_of};
use sluice_integration::proxies::Handoff;
use sluice_integration::scene::{APP_PORT, PATIENCE, Scene, turn};
use sluice_proto::pb::cni::add_response::Outcome;
use sluice_proto::pb::workload::PodState;
use sluice_testkit::pod::Pod;
use sluice_testkit::process::status::ProcStatus;
use sluice_testkit::process::text;
use sluice_testkit::traffic::client::fetch;
use sluice_testkit::wait::poll_true;

/// Label off and on once; rules are as before after "off", traffic is captured after "on".
fn cycle(scene: &Scene, pod: &Pod, options: &PodOptions, without: &str) {
    let on = PodOptions {
        labels: [options.labels.clone(), PodOptions::mode("ambient").labels].concat(),
        ..options.clone()
    };
    scene.mesh.manifests.pod(pod, &on).unwrap();
    scene.mesh.wait_state(pod, PodState::Enrolled, PATIENCE).unwrap();
    assert!(redirects(pod.netns()).unwrap());
    let outbound = || {
        scene.mesh.control().counts().unwrap().workloads[pod.uid()]
            .counts
            .outbound
    };
    let before = outbound();
    fetch(pod.netns(), scene.target(), PATIENCE).unwrap();
    poll_true("traffic is captured", PATIENCE, || outbound() > before).unwrap();
    scene.mesh.manifests.pod(pod, &PodOptions::mode("none")).unwrap();
    scene.mesh.wait_state(pod, PodState::Out, PATIENCE).unwrap();
    assert_eq!(rules_of(pod.netns()).unwrap(), without, "debris with {options:?}");
}

fn pod_outside(scene: &Scene, name: &str, ipv6: bool) -> Pod {
    let pod = scene.mesh.node().pod(name).families(true, ipv6).create().unwrap();
    scene.mesh.manifests.pod(&pod, &PodOptions::mode("none")).unwrap();
    scene.mesh.add(&pod).unwrap().ok().unwrap();
    pod
}

#[test]
fn twenty_cycles_of_a_label_leave_no_debris_and_twenty_adds_and_dels() {
    let scene = Scene::start().unwrap();
    let pod = pod_outside(&scene, "cycling", false);
    let without = rules_of(pod.netns()).unwrap();
    for _ in 0..20 {
        cycle(&scene, &pod, &PodOptions::default(), &without);
    }
    let report = scene.mesh.control().report().unwrap();
    let count = |kind: &str| {
        report
            .messages
            .iter()
            .filter(|m| m.kind == kind && m.uid == pod.uid())
            .count()
    };
    assert_eq!((count("add"), count("del"), count("keep")), (20, 20, 0));
}

#[test]
fn every_option_leaves_no_debris() {
    let scene = Scene::start().unwrap();
    let options = [
        PodOptions::default().annotation("ambient.istio.io/dns-capture", "true"),
        PodOptions::default().annotation("ambient.istio.io/dns-capture", "false"),
        PodOptions::default().annotation("ambient.istio.io/bypass-inbound-capture", "true"),
        PodOptions::default().annotation("istio.io/reroute-virtual-interfaces", "br0,tap1"),
    ];
    for (name, ipv6) in [("four", false), ("dual", true)] {
        let pod = pod_outside(&scene, name, ipv6);
        let without = rules_of(pod.netns()).unwrap();
        for options in &options {
            cycle(&scene, &pod, options, &without);
        }
    }
}

/// What must not grow, of each process.
#[derive(Debug)]
struct Footprint {
    namespaces: BTreeSet<u64>,
    descriptors: usize,
    rss: u64,
}

/// By name and pid: the opener is two processes.
fn footprints(mesh: &Mesh) -> BTreeMap<(String, u32), Footprint> {
    let ours = all_processes(mesh)
        .unwrap()
        .into_iter()
        .filter(|(name, _)| name != "standin-proxy");
    let look = |pid: u32| {
        let status = ProcStatus::read(pid).unwrap();
        let namespaces = status.thread_netns().unwrap().into_values().collect();
        Footprint {
            namespaces,
            descriptors: status.descriptors().unwrap().len(),
            rss: status.rss(),
        }
    };
    ours.map(|(name, pid)| ((name, pid), look(pid))).collect()
}

/// In the middle of the ADD, as the runtime does when it gives up: the interface goes, or the netns.
fn removed_in_the_middle(mesh: &Mesh, pod: &Pod, client: &AddClient, number: usize) {
    let pause = Duration::from_micros(u64::try_from(number * 7919 % 6000).unwrap());
    let (place, veth, path) = (mesh.node().place(), pod.host_ifname(), pod.netns_path());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(pause);
            if number % 8 == 3 {
                let _ = text(place, "ip", &["link", "del", veth], b"");
            } else {
                text(place, "umount", &["--lazy", path.to_str().unwrap()], b"").unwrap();
                place.run(|| std::fs::remove_file(path)).unwrap();
            }
        });
        // Whatever comes of it, it must come in time.
        client.add(pod).unwrap();
    });
}

/// One worker: the same pod comes and goes; every fourth time it is removed in the middle of the ADD.
fn come_and_go(mesh: &Mesh, name: &str, next: &AtomicUsize, cycles: usize, admitted: &AtomicUsize) {
    let client = AddClient::new(&mesh.run).unwrap();
    let first = mesh.node().pod(name).create().unwrap();
    let (uid, addresses) = (first.uid().to_owned(), first.addresses().to_vec());
    mesh.manifests.pod(&first, &PodOptions::default()).unwrap();
    drop(first);
    let mut number = next.fetch_add(1, Ordering::Relaxed);
    while number < cycles {
        let pod = mesh
            .node()
            .pod(name)
            .uid(&uid)
            .addresses(&addresses)
            .create()
            .unwrap();
        let key = attachment(&pod);
        if number % 4 == 3 {
            removed_in_the_middle(mesh, &pod, &client, number);
            drop(pod);
            client.del(key).unwrap();
        } else {
            let outcome = client.add(&pod).unwrap().outcome;
            let passed = matches!(outcome, Some(Outcome::Admitted(_)));
            assert!(passed, "cycle {number}: {outcome:?}");
            admitted.fetch_add(1, Ordering::Relaxed);
            client.del(key).unwrap();
            pod.delete().unwrap();
        }
        number = next.fetch_add(1, Ordering::Relaxed);
    }
}

fn run_cycles(mesh: &Mesh, label: &str, cycles: usize) -> usize {
    let (next, admitted) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for worker in 0..8 {
            let (next, admitted) = (&next, &admitted);
            scope.spawn(move || come_and_go(mesh, &format!("{label}-{worker}"), next, cycles, admitted));
        }
    });
    admitted.into_inner()
}

/// 10,000 cycles, more than a minute; `SLUICE_CYCLES` for fewer or more.
#[test]
fn thousands_of_adds_and_dels_leave_nothing_behind() {
    let _turn = turn();
    let cycles = std::env::var("SLUICE_CYCLES")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(10_000);
    let mesh = Mesh::start_with(MeshOptions {
        without_proxy: true,
        ..MeshOptions::default()
    })
    .unwrap();
    mesh.manifests.namespace("default", "ambient").unwrap();
    let proxy = Handoff::ready(&mesh, "proxy").unwrap();
    run_cycles(&mesh, "warm", cycles / 10);
    let interfaces = || mesh.node().interfaces().unwrap().len();
    poll_true("warm-up is over", PATIENCE, || interfaces() == 2).unwrap();
    let before = footprints(&mesh);
    let started = Instant::now();
    let admitted = run_cycles(&mesh, "pod", cycles);
    println!("{cycles} cycles in {:?}, {admitted} admitted", started.elapsed());
    poll_true("all host interfaces are gone", PATIENCE, || interfaces() == 2).unwrap();
    poll_true("the proxy holds nothing", PATIENCE, || {
        proxy.control.counts().unwrap().workloads.is_empty()
    })
    .unwrap();
    poll_true("no sandbox is left", PATIENCE, || {
        mesh.node_status().unwrap().executor.unwrap().sandboxes == 0
    })
    .unwrap();
    assert_eq!(
        std::fs::read_dir(mesh.run.sandboxes()).unwrap().count(),
        0,
        "table files are left"
    );
    assert_eq!(before.len(), 4, "{before:?}");
    for (process, was) in before {
        let name = &process.0;
        poll_true(&format!("descriptors of {name} are as before"), PATIENCE, || {
            footprints(&mesh)[&process].descriptors <= was.descriptors + 2
        })
        .unwrap_or_else(|late| panic!("{late}: {was:?}, now {:?}", footprints(&mesh)[&process]));
        let now = &footprints(&mesh)[&process];
        println!("{name}: {was:?} -> {now:?}");
        assert_eq!(
            now.namespaces, was.namespaces,
            "a thread of {name} is somewhere else"
        );
        assert_eq!(
            now.namespaces.len(),
            1,
            "threads of {name} are in several namespaces"
        );
        assert!(
            now.rss <= was.rss + 1024 * 1024,
            "{name} grew from {} to {} bytes",
            was.rss,
            now.rss
        );
    }
}

#[test]
fn an_address_that_a_pod_adds_later_works_the_same_before_and_after_a_restart() {
    let scene = Scene::start().unwrap();
    let server = sluice_testkit::netns::Place::from(scene.server.netns());
    for args in [
        &["link", "add", "tun0", "type", "veth", "peer", "name", "tun1"][..],
        &["addr", "add", "100.64.1.2/32", "dev", "tun0"],
        &["link", "set", "tun0", "up"],
    ] {
        text(&server, "ip", args, b"").unwrap();
    }
    let client = sluice_testkit::netns::Place::from(scene.client.netns());
    text(
        &client,
        "ip",
        &[
            "route",
            "add",
            "100.64.1.2/32",
            "via",
            &scene.server.ip().to_string(),
        ],
        b"",
    )
    .unwrap();
    let inbound = || {
        scene.mesh.control().counts().unwrap().workloads[scene.server.uid()]
            .counts
            .inbound
    };
    let added = || scene.mesh.control().counts().unwrap().workloads[scene.server.uid()].clone();
    let ask = || {
        let before = inbound();
        let seen = fetch(scene.client.netns(), ([100, 64, 1, 2], APP_PORT).into(), PATIENCE).unwrap();
        (seen.peer.ip(), seen.local, inbound() - before)
    };
    let before = (ask(), added().pod, added().service_account, added().netns_inode);
    let known = scene.mesh.pod_state(&scene.server).unwrap().addresses;
    scene.mesh.broker.restart().unwrap();
    scene.mesh.wait_serving().unwrap();
    scene.wait_enrolled().unwrap();
    assert_eq!(
        (ask(), added().pod, added().service_account, added().netns_inode),
        before
    );
    assert_eq!(
        scene.mesh.pod_state(&scene.server).unwrap().addresses,
        known,
        "an address was invented"
    );
}

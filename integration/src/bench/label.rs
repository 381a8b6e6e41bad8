//! From a label change, as the source's event brings it, to its effect on a running pod.

use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::Context;
use sluice_proto::pb::workload::PodState;
use sluice_testkit::pod::Pod;
use sluice_testkit::traffic::server::EchoServer;

use super::events::Events;
use super::report::Report;
use super::rig::{OUTSIDE, Rig};
use super::stats::Samples;
use crate::manifests::PodOptions;

const ROUNDS: usize = 25;
const PORT: u16 = 8080;
/// Connections that the pod has all the time; conntrack is told of each before the pod is enrolled.
const KEPT: usize = 20;

/// Both ways, many times.
pub(super) fn changes(report: &mut Report, rig: &mut Rig) -> anyhow::Result<()> {
    let mut pods = rig.make(2, OUTSIDE)?;
    for pod in &pods {
        rig.add(pod)?;
    }
    let (mover, other) = (pods.remove(0), pods.remove(0));
    let app = EchoServer::start(other.netns(), PORT)?;
    let target = SocketAddr::new(other.address(false), PORT);
    let kept: Vec<_> = mover.netns().run(|| {
        let connect = |_| TcpStream::connect(target);
        (0..KEPT).map(connect).collect::<std::io::Result<Vec<_>>>()
    })?;
    let events = Events::subscribe(&rig.mesh)?;
    let (mut joined, mut left) = (Samples::default(), Samples::default());
    for _ in 0..ROUNDS {
        let began = Instant::now();
        rig.mesh.manifests.pod(&mover, &PodOptions::mode("ambient"))?;
        joined.push(events.wait(&mover, PodState::Enrolled)? - began);
        left.push(leave(rig, &mover, target)?);
        events.wait(&mover, PodState::Out)?;
    }
    report.bound("label on until enrolled, p50", joined.median(), "ms", 5.0);
    report.bound(
        "label off until new connections go direct, p50",
        left.median(),
        "ms",
        10.0,
    );
    drop((app, kept));
    rig.remove(vec![mover, other])
}

/// Nobody listens on the proxy's port, so a redirected connection is refused: the first that is not goes direct.
fn leave(rig: &Rig, mover: &Pod, target: SocketAddr) -> anyhow::Result<Duration> {
    mover.netns().run(|| {
        let redirected = TcpStream::connect(target).is_err();
        anyhow::ensure!(redirected, "a connection of an enrolled pod was not redirected");
        let began = Instant::now();
        rig.mesh
            .manifests
            .pod(mover, &PodOptions::mode("none"))
            .context("label")?;
        while TcpStream::connect(target).is_err() {
            anyhow::ensure!(
                began.elapsed() < Duration::from_secs(10),
                "connections are still redirected"
            );
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(began.elapsed())
    })
}

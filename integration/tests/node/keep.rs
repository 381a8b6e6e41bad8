//! Enrolling a running pod breaks none of its connections, however silent they are.

use std::net::SocketAddr;

use sluice_integration::manifests::PodOptions;
use sluice_integration::mesh::Mesh;
use sluice_integration::scene::{APP_PORT, PATIENCE, turn};
use sluice_proto::pb::workload::PodState;
use sluice_testkit::netns::{Netns, Place};
use sluice_testkit::pod::Pod;
use sluice_testkit::process::text;
use sluice_testkit::traffic::client::{Load, LoadOptions, fetch};
use sluice_testkit::traffic::connection::Connection;
use sluice_testkit::traffic::server::{EchoServer, Seen};

/// A pod outside the mesh that runs and has connections, and the pod at their other end, which stays outside.
pub(crate) struct Running {
    _apps: [EchoServer; 2],
    pub(crate) pod: Pod,
    peer: Pod,
    pub(crate) mesh: Mesh,
}

/// Connections that were opened and used once, with what the application saw then.
pub(crate) struct Silent(Vec<(Connection, Seen)>);

impl Running {
    /// A pod that came through an ADD.
    pub(crate) fn added() -> Self {
        Self::start(|mesh, pod| {
            mesh.add(pod).unwrap().ok().unwrap();
        })
    }

    fn start(come: impl Fn(&Mesh, &Pod)) -> Self {
        let mesh = Mesh::start().unwrap();
        mesh.manifests.namespace("default", "").unwrap();
        let [pod, peer] = ["runner", "peer"].map(|name| {
            let pod = mesh.node().pod(name).dual_stack().create().unwrap();
            mesh.manifests.pod(&pod, &PodOptions::mode("none")).unwrap();
            pod
        });
        come(&mesh, &pod);
        let apps = [&pod, &peer].map(|pod| EchoServer::start(pod.netns(), APP_PORT).unwrap());
        Self {
            _apps: apps,
            pod,
            peer,
            mesh,
        }
    }

    /// From where to where, each way in each family.
    fn ways(&self) -> Vec<(&Netns, SocketAddr)> {
        let ways = [(&self.pod, &self.peer), (&self.peer, &self.pod)].map(|(from, to)| {
            [false, true].map(|ipv6| (from.netns(), SocketAddr::new(to.address(ipv6), APP_PORT)))
        });
        ways.concat()
    }

    /// Opens two connections each way.
    pub(crate) fn open(&self) -> Silent {
        let ways = self.ways();
        let open = |(netns, target): &(&Netns, SocketAddr)| {
            let mut connection = Connection::open(netns, *target, PATIENCE).unwrap();
            let seen = connection.ask().unwrap();
            (connection, seen)
        };
        Silent(ways.iter().chain(&ways).map(open).collect())
    }

    pub(crate) fn label(&self, mode: &str) {
        self.mesh
            .manifests
            .pod(&self.pod, &PodOptions::mode(mode))
            .unwrap();
    }

    pub(crate) fn wait_state(&self, state: PodState) {
        self.mesh.wait_state(&self.pod, state, PATIENCE).unwrap();
    }

    /// Connections of the pod that the proxy got.
    pub(crate) fn captured(&self) -> u64 {
        let held = self.mesh.control().counts().unwrap().workloads;
        held.get(self.pod.uid())
            .map_or(0, |held| held.counts.outbound + held.counts.inbound)
    }

    /// What conntrack knows in the pod, a line a connection.
    pub(crate) fn entries(&self) -> Vec<String> {
        let place = Place::from(self.pod.netns());
        let list = |family| text(&place, "conntrack", &["-L", "-p", "tcp", "-f", family], b"").unwrap();
        let both = list("ipv4") + &list("ipv6");
        both.lines().map(ToOwned::to_owned).collect()
    }

    /// A new connection each way is the proxy's.
    pub(crate) fn assert_new_ones_are_captured(&self) {
        let before = self.captured();
        for (netns, target) in self.ways() {
            fetch(netns, target, PATIENCE).unwrap();
        }
        assert_eq!(self.captured(), before + 4);
    }
}

impl Silent {
    /// Each of them is known to conntrack, and translated in neither direction.
    pub(crate) fn unknown_to(&self, entries: &[String]) -> Vec<String> {
        let tuple = |from: SocketAddr, to: SocketAddr| {
            let (from_ip, to_ip) = (from.ip(), to.ip());
            format!(
                "src={from_ip} dst={to_ip} sport={} dport={}",
                from.port(),
                to.port()
            )
        };
        let wanted = self.0.iter().map(|(_, seen)| {
            let (there, back) = (tuple(seen.peer, seen.local), tuple(seen.local, seen.peer));
            format!("ESTABLISHED {there} {back} [ASSURED]")
        });
        let unknown = |wanted: &String| !entries.iter().any(|entry| entry.contains(wanted));
        wanted.filter(unknown).collect()
    }

    /// Each of them still is what it was.
    pub(crate) fn assert_kept(&mut self, when: &str) {
        for (connection, seen) in &mut self.0 {
            let now = connection.ask();
            assert_eq!(now.map_err(|e| e.to_string()).as_ref(), Ok(&*seen), "{when}");
        }
    }
}

fn keeps_its_connections(running: &Running) {
    let _turn = turn();
    let mut silent = running.open();
    // Others speak all the time; none of them is new.
    let busy = LoadOptions {
        new_per_second: 0,
        timeout: PATIENCE,
        ..LoadOptions::new(running.ways()[0].1)
    };
    let busy = Load::start(running.pod.netns(), busy).unwrap();
    busy.wait_answered(40, PATIENCE).unwrap();
    running.label("ambient");
    running.wait_state(PodState::Enrolled);
    let entries = running.entries();
    let unknown = silent.unknown_to(&entries);
    assert!(unknown.is_empty(), "{unknown:#?} not in {entries:#?}");
    silent.assert_kept("enrolled");
    busy.wait_answered(40, PATIENCE).unwrap();
    assert_eq!(running.captured(), 0, "kept connections are direct");
    running.assert_new_ones_are_captured();
    running.label("none");
    running.wait_state(PodState::Out);
    silent.assert_kept("out again");
    busy.stop().nothing_failed().unwrap();
    let told = running.mesh.node_status().unwrap().executor.unwrap();
    assert_eq!(told.unlisted_enrolments, 0);
}

#[test]
fn a_pod_that_was_added_outside_the_mesh_keeps_its_connections() {
    keeps_its_connections(&Running::added());
}

#[test]
fn a_pod_that_is_adopted_keeps_its_connections() {
    keeps_its_connections(&Running::start(|_, pod| {
        pod.start_process().unwrap();
    }));
}

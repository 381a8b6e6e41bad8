//! The built executor and opener as processes of a simulated node, with their production privileges. Needs root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed step is a failed test"
)]

#[path = "node_harness/harness.rs"]
mod harness;

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use caps::Capability;
use harness::{Broker, Dial, Pod, ambient, eventually, hand_over};
use prost::Message as _;
use sluice_proto::pb::cni::add_response::Outcome;
use sluice_proto::pb::executor::adopt_response::Outcome as Adopted;
use sluice_proto::pb::executor::sandbox_event::Event;
use sluice_proto::pb::executor::{
    DescriptorOf, DescriptorReply, DescriptorRequest, PreflightRequest, Sandbox, descriptor_reply,
    descriptor_request,
};
use sluice_proto::pb::types::Mode;
use sluice_proto::tombstone::Tombstone;
use sluice_proto::transport::seqpacket::SeqpacketConnection;
use sluice_testkit::netns::Netns;
use sluice_testkit::node::Node;
use sluice_testkit::process::{Identity, Process, Spawn};

const SOON: Duration = Duration::from_secs(10);

struct Setup {
    opener: Option<Process>,
    executor: Option<Process>,
    dial: Dial,
    // Last, so that the processes are gone before their namespaces.
    node: Node,
}

impl Setup {
    async fn start() -> Self {
        let node = Node::new().unwrap();
        let dial = Dial {
            run: node.prepare_run_dir().unwrap(),
        };
        let mut setup = Self {
            opener: None,
            executor: None,
            dial,
            node,
        };
        setup.start_executor();
        setup.start_opener();
        setup.until_host_is_reachable().await;
        setup
    }

    fn start_executor(&mut self) {
        let process = Spawn::program("netns-executor", env!("CARGO_BIN_EXE_netns-executor"))
            .arg("--run-dir")
            .arg(self.dial.run.root())
            .arg("--drift-interval-ms")
            .arg("200")
            .arg("--recovery-interval-ms")
            .arg("200")
            .place(self.node.place_with(&Netns::new().unwrap()))
            .identity(Identity::root_with(&[Capability::CAP_NET_ADMIN]))
            .log(self.node.dir().join("netns-executor.log"))
            .start()
            .unwrap();
        // The socket of an earlier life may still lie there, so ask whether anybody answers.
        let run = self.dial.run.clone();
        process
            .wait_ready(SOON, || {
                std::os::unix::net::UnixStream::connect(run.executor_socket()).is_ok()
            })
            .unwrap();
        self.executor = Some(process);
    }

    fn start_opener(&mut self) {
        let process = Spawn::program("netns-opener", env!("CARGO_BIN_EXE_netns-opener"))
            .arg("--run-dir")
            .arg(self.dial.run.root())
            .arg("--host-netns")
            .arg(self.node.netns_path())
            .arg("--netns-dir")
            .arg(self.node.netns_dir())
            .place(self.node.place_with(&Netns::new().unwrap()))
            .identity(Identity::root_with(&[
                Capability::CAP_SYS_ADMIN,
                Capability::CAP_SYS_PTRACE,
            ]))
            .log(self.node.dir().join("netns-opener.log"))
            .start()
            .unwrap();
        self.opener = Some(process);
    }

    async fn until_host_is_reachable(&self) {
        let mut broker = self.dial.broker().await;
        let deadline = tokio::time::Instant::now() + SOON;
        loop {
            let status = broker.status().await;
            if status.host_reachable {
                return;
            }
            assert!(
                tokio::time::Instant::now() < deadline,
                "host not reachable: {status:?}"
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn watch(&self) -> (Broker, Vec<Sandbox>) {
        let mut broker = self.dial.broker().await;
        let snapshot = broker.snapshot().await;
        (broker, snapshot)
    }

    /// Ends the executor without warning.
    fn kill_executor(&mut self) {
        drop(self.executor.take());
    }

    fn pod(pod: &sluice_testkit::pod::Pod) -> Pod {
        let handed_over = pod.netns().run(hand_over);
        Pod {
            container: pod.container_id().into(),
            ifname: "eth0".into(),
            uid: pod.uid().into(),
            address: pod.ip().to_string(),
            path: pod.netns_path().to_owned(),
            handed_over: Some(Arc::new(handed_over)),
        }
    }

    async fn enrolled(&self, broker: &mut Broker, pod: &sluice_testkit::pod::Pod) -> (Pod, Sandbox) {
        self.enrol(broker, Self::pod(pod)).await
    }

    async fn enrol(&self, broker: &mut Broker, mut asked: Pod) -> (Pod, Sandbox) {
        let add = self.dial.add(&asked);
        asked.handed_over = None;
        let sandbox = broker.enrol().await;
        let outcome = add.await.unwrap();
        assert!(
            matches!(&outcome, Outcome::Admitted(a) if a.mode() == Mode::Ambient),
            "{outcome:?}"
        );
        (asked, sandbox)
    }
}

fn nft(netns: &Netns, arguments: &str) -> String {
    netns.run(|| {
        #[expect(
            clippy::disallowed_methods,
            reason = "kernel state is asserted with independent tools"
        )]
        let output = std::process::Command::new("nft")
            .args(arguments.split(' '))
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    })
}

#[tokio::test]
async fn after_kill_and_restart_pods_are_reached_by_path_and_no_rule_changes() {
    let mut s = Setup::start().await;
    let pods = [
        s.node.pod("a").create().unwrap(),
        s.node.pod("b").create().unwrap(),
    ];
    let (mut broker, _) = s.watch().await;
    let (first, _) = s.enrolled(&mut broker, &pods[0]).await;
    let (second, _) = s.enrolled(&mut broker, &pods[1]).await;
    // Handles of rules change when a rule is replaced, even by an equal one.
    let before: Vec<_> = pods
        .iter()
        .map(|pod| nft(pod.netns(), "-a -s list ruleset"))
        .collect();
    drop(broker);
    s.kill_executor();
    let tombstone = Tombstone {
        attachment: second.attachment().try_into().unwrap(),
        deleted_unix_ms: u64::MAX,
    };
    tombstone.write(&s.dial.run.tombstones()).unwrap();
    s.start_executor();
    let (mut broker, snapshot) = s.watch().await;
    assert_eq!(snapshot.len(), 1, "the other one was deleted meanwhile");
    if !snapshot[0].reachable {
        broker
            .until(|event| matches!(event, Event::Changed(sandbox) if sandbox.reachable).then_some(()))
            .await;
    }
    for (pod, before) in pods.iter().zip(&before) {
        assert_eq!(nft(pod.netns(), "-a -s list ruleset"), *before);
    }
    s.until_host_is_reachable().await;
    let host = || nft(s.node.netns(), "-s list ruleset");
    assert!(host().contains(&pods[0].ip().to_string()), "{}", host());
    eventually("tombstoned address left the probe set", || {
        !host().contains(&pods[1].ip().to_string())
    })
    .await;
    s.dial.del(&first).await;
    assert_eq!(nft(pods[0].netns(), "-s list ruleset"), "");
}

#[tokio::test]
async fn a_running_pod_is_adopted_and_a_features_check_runs() {
    let s = Setup::start().await;
    let pod = s.node.pod("a").create().unwrap();
    pod.start_process().unwrap();
    let (mut broker, _) = s.watch().await;
    let request = |address: String| sluice_proto::pb::executor::AdoptRequest {
        pod: Some(sluice_proto::pb::types::PodRef {
            namespace: pod.namespace().into(),
            name: pod.name().into(),
            uid: pod.uid().into(),
        }),
        addresses: vec![address],
        netns_path: String::new(),
    };
    let wrong = broker
        .client
        .adopt(request("192.0.2.1".into()))
        .await
        .unwrap()
        .into_inner()
        .outcome
        .unwrap();
    assert!(
        matches!(&wrong, Adopted::Failed(f) if f.cause.contains("none of its addresses")),
        "{wrong:?}"
    );
    let adopted = broker
        .client
        .adopt(request(pod.ip().to_string()))
        .await
        .unwrap()
        .into_inner()
        .outcome
        .unwrap();
    let Adopted::Sandbox(sandbox) = adopted else {
        panic!("{adopted:?}")
    };
    assert!(sandbox.adopted && sandbox.reachable);
    assert_eq!(sandbox.netns.as_ref().unwrap().inode, pod.netns().inode());
    broker.program(&sandbox, ambient()).await;
    assert!(nft(pod.netns(), "list ruleset").contains("15001"));
    let features = broker
        .client
        .preflight(PreflightRequest { ipv6: true })
        .await
        .unwrap()
        .into_inner()
        .features;
    assert!(
        features.len() > 5 && features.iter().all(|feature| feature.available),
        "{features:?}"
    );
}

#[tokio::test]
async fn privileges_are_net_admin_alone_and_no_inet_socket_is_open() {
    let s = Setup::start().await;
    let executor = s.executor.as_ref().unwrap();
    let (pid, status) = (executor.pid(), executor.status().unwrap());
    let net_admin = format!("{:016x}", 1_u64 << 12);
    for set in ["CapPrm", "CapEff", "CapBnd"] {
        assert_eq!(status.field(set), net_admin, "{set}");
    }
    assert_eq!(status.field("NoNewPrivs"), "1");
    assert_eq!(status.field("Seccomp"), "2");
    for table in ["tcp", "tcp6", "udp", "udp6"] {
        let sockets = std::fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap();
        assert_eq!(sockets.lines().count(), 1, "{table}: {sockets}");
    }
    let answer = std::os::unix::net::UnixStream::connect(s.dial.run.cni_socket());
    assert!(answer.is_ok());
}

#[tokio::test]
async fn a_descriptor_given_back_counts_only_for_its_own_sandbox() {
    let mut s = Setup::start().await;
    let pods = [
        s.node.pod("a").create().unwrap(),
        s.node.pod("b").create().unwrap(),
    ];
    let (mut broker, _) = s.watch().await;
    // The path leads nowhere, so only the descriptor can bring the namespace back.
    let pod = Pod {
        path: s.node.netns_dir().join("gone"),
        ..Setup::pod(&pods[0])
    };
    let (_, first) = s.enrol(&mut broker, pod).await;
    let (_, held) = s.dial.fetch(&first).await;
    drop(broker);
    s.kill_executor();
    drop(s.opener.take());
    s.start_executor();
    let (mut broker, snapshot) = s.watch().await;
    assert!(!snapshot[0].reachable, "without an opener nothing is reached");
    s.start_opener();
    let offer = |descriptor: OwnedFd| {
        let (dial, sandbox) = (s.dial.clone(), first.clone());
        async move {
            let connection = SeqpacketConnection::connect(&dial.run.descriptor_socket()).unwrap();
            let of = DescriptorOf {
                attachment: sandbox.attachment,
                generation: sandbox.generation,
            };
            let request = DescriptorRequest {
                request: Some(descriptor_request::Request::Offer(of)),
            };
            connection
                .send(&request.encode_to_vec(), &[descriptor.as_fd()])
                .await
                .unwrap();
            let reply = connection.receive(1).await.unwrap();
            DescriptorReply::decode(reply.bytes.as_slice())
                .unwrap()
                .outcome
                .unwrap()
        }
    };
    s.until_host_is_reachable().await;
    let wrong = offer(
        pods[1]
            .netns()
            .run(|| File::open("/proc/thread-self/ns/net").unwrap().into()),
    )
    .await;
    assert!(
        matches!(&wrong, descriptor_reply::Outcome::Failed(f) if f.code == "EXE-GONE"),
        "{wrong:?}"
    );
    let right = offer(held.into_iter().next().unwrap()).await;
    assert!(
        matches!(&right, descriptor_reply::Outcome::Ok(id) if id.inode == pods[0].netns().inode()),
        "{right:?}"
    );
    let reached = |event| matches!(event, Event::Changed(sandbox) if sandbox.reachable).then_some(());
    broker.until(reached).await;
}

#[tokio::test]
async fn silent_slow_and_garbling_peers_delay_nobody() {
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;
    let s = Setup::start().await;
    let path = s.dial.run.cni_socket();
    let mut peers: Vec<_> = (0..30).map(|_| UnixStream::connect(&path).unwrap()).collect();
    for peer in &mut peers[10..20] {
        peer.write_all(b"P").unwrap();
    }
    for peer in &mut peers[20..] {
        peer.write_all(b"\x7fgarbage").unwrap();
    }
    let pod = s.node.pod("a").create().unwrap();
    let (mut broker, _) = s.watch().await;
    let begun = std::time::Instant::now();
    s.enrolled(&mut broker, &pod).await;
    assert!(
        begun.elapsed() < Duration::from_millis(500),
        "{:?}",
        begun.elapsed()
    );
}

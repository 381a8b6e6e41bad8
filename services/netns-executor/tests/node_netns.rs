//! Sandboxes on real network namespaces: the executor's servers in this process, everything else the kernel. Needs root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed step is a failed test"
)]

#[path = "node_harness/harness.rs"]
mod harness;
#[path = "support/netns.rs"]
mod support;

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use harness::{Broker, Executor, Pod, ambient, eventually};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use sluice_netns_executor::kernel::Kernel;
use sluice_netns_executor::kernel::real::RealKernel;
use sluice_proto::pb::cni::add_response::Outcome;
use sluice_proto::pb::executor::sandbox_event::Event;
use sluice_proto::pb::executor::{descriptor_reply, program_response};
use sluice_proto::pb::types::Mode;
use support::Netns;

/// Descriptors are counted for the whole process, so one test runs at a time.
static ONE_AT_A_TIME: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

struct Setup {
    _turn: tokio::sync::MutexGuard<'static, ()>,
    host: Netns,
    executor: Arc<Executor>,
    broker: Broker,
}

/// What the plugin hands over.
fn hand_over(netns: &Netns) -> Vec<OwnedFd> {
    netns.run(harness::hand_over)
}

async fn setup() -> Setup {
    let turn = ONE_AT_A_TIME.lock().await;
    let kernel = Arc::new(RealKernel::new().unwrap());
    let executor = Arc::new(Executor::start(Arc::clone(&kernel) as Arc<dyn Kernel>).await);
    let host = Netns::new();
    let opened = kernel.open_host(hand_over(&host)).unwrap();
    executor.node.probes.attach(opened).await.unwrap();
    let mut broker = executor.broker().await;
    broker.snapshot().await;
    Setup {
        _turn: turn,
        host,
        executor,
        broker,
    }
}

fn pod_netns() -> Netns {
    let netns = Netns::new();
    netns.sh("ip link add eth0 type veth peer name peer0 && ip link set eth0 up && ip addr add 10.0.0.5/24 dev eth0");
    netns
}

impl Setup {
    fn pod(&self, container: &str, uid: &str, descriptors: Vec<OwnedFd>) -> Pod {
        Pod {
            handed_over: Some(Arc::new(descriptors)),
            ..Pod::new(&self.executor, container, uid)
        }
    }

    /// Adds a pod as the plugin does, which closes its descriptors once they are sent.
    async fn enrolled(&mut self, netns: &Netns) -> Pod {
        let mut pod = self.pod("c1", "u1", hand_over(netns));
        let add = self.executor.add(&pod);
        pod.handed_over = None;
        let sandbox = self.broker.pending().await;
        let outcome = self.broker.program(&sandbox, ambient()).await.outcome.unwrap();
        assert!(
            matches!(outcome, program_response::Outcome::Programmed(_)),
            "{outcome:?}"
        );
        let (reply, _netns) = self.executor.fetch(&sandbox).await;
        assert!(
            matches!(reply.outcome, Some(descriptor_reply::Outcome::Ok(_))),
            "{reply:?}"
        );
        self.broker.admit(&sandbox, Mode::Ambient).await;
        let outcome = add.await.unwrap();
        assert!(
            matches!(&outcome, Outcome::Admitted(a) if a.mode() == Mode::Ambient),
            "{outcome:?}"
        );
        pod
    }
}

/// Open descriptors of this process.
fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[tokio::test]
async fn add_programs_the_namespace_and_del_leaves_it_as_before() {
    let mut s = setup().await;
    let netns = pod_netns();
    let before = (
        netns.sh("nft list ruleset; ip rule; ip -6 rule; ip route show table all"),
        open_descriptors(),
    );
    let pod = s.enrolled(&netns).await;
    assert!(netns.sh("nft list ruleset").contains("15001"));
    assert!(netns.sh("ip rule").contains("0x111"));
    assert!(s.host.sh("nft list ruleset").contains("10.0.0.5"));
    s.executor.del(&pod).await;
    assert_eq!(
        netns.sh("nft list ruleset; ip rule; ip -6 rule; ip route show table all"),
        before.0
    );
    assert!(!s.host.sh("nft list ruleset").contains("10.0.0.5"));
    eventually("descriptors closed", || open_descriptors() <= before.1).await;
}

#[tokio::test]
async fn flushed_rules_come_back_and_the_host_rules_too() {
    let mut s = setup().await;
    let netns = pod_netns();
    s.enrolled(&netns).await;
    let (rules, host_rules) = (netns.sh("nft -s list ruleset"), s.host.sh("nft -s list ruleset"));
    netns.sh("nft flush ruleset");
    eventually("pod's rules repaired", || {
        netns.sh("nft -s list ruleset") == rules
    })
    .await;
    s.broker
        .until(|event| {
            matches!(event, Event::Repaired(repaired) if repaired.attachment.is_some()).then_some(())
        })
        .await;
    s.host.sh("nft flush ruleset");
    eventually("host's rules repaired", || {
        s.host.sh("nft -s list ruleset") == host_rules
    })
    .await;
}

#[tokio::test]
async fn a_deleted_interface_lets_the_namespace_go() {
    let mut s = setup().await;
    let netns = pod_netns();
    let before = open_descriptors();
    s.enrolled(&netns).await;
    let begun = std::time::Instant::now();
    netns.sh("ip link del eth0");
    assert_eq!(s.broker.gone().await.0, "interface-gone");
    eventually("descriptors closed", || open_descriptors() <= before).await;
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    assert!(!s.host.sh("nft list ruleset").contains("10.0.0.5"));
}

#[tokio::test]
async fn forged_descriptors_are_refused_by_name_and_change_nothing() {
    let s = setup().await;
    let (netns, other) = (pod_netns(), pod_netns());
    let own: OwnedFd = File::open("/proc/self/ns/net").unwrap().into();
    let pid_namespace: OwnedFd = File::open("/proc/self/ns/pid").unwrap().into();
    let file: OwnedFd = tempfile::tempfile().unwrap().into();
    let with = |mut descriptors: Vec<OwnedFd>, more: &OwnedFd| {
        descriptors.push(more.try_clone().unwrap());
        descriptors
    };
    let mixed = || {
        let mut descriptors = hand_over(&netns);
        descriptors[1] = hand_over(&other).swap_remove(1);
        descriptors
    };
    let tcp = || {
        socket(
            AddressFamily::Inet,
            SockType::Stream,
            SockFlag::SOCK_CLOEXEC,
            None,
        )
        .unwrap()
    };
    let cases: Vec<(&str, Vec<OwnedFd>, &str)> = vec![
        ("host", hand_over(&s.host), "host's network namespace"),
        (
            "own",
            vec![own.try_clone().unwrap()],
            "executor's own network namespace",
        ),
        ("file", with(hand_over(&netns), &file), "a regular file"),
        ("pidns", vec![pid_namespace], "a regular file"),
        (
            "twice",
            with(hand_over(&netns), &own),
            "two descriptors of kind netns",
        ),
        (
            "many",
            hand_over(&netns).into_iter().chain(hand_over(&netns)).collect(),
            "8 descriptors",
        ),
        ("mixed", mixed(), "socket belongs to namespace inode"),
        ("tcp", with(hand_over(&netns), &tcp()), "a socket of family 2"),
        (
            "few",
            vec![hand_over(&netns).swap_remove(0)],
            "no descriptor of kind netfilter socket",
        ),
        ("none", Vec::new(), "no descriptors came"),
    ];
    let rules = netns.sh("nft list ruleset");
    for (name, descriptors, expected) in cases {
        let pod = s.pod(name, name, descriptors);
        let Outcome::Refused(failure) = s.executor.add(&pod).await.unwrap() else {
            panic!("{name} was taken");
        };
        assert_eq!(failure.code, "EXE-FD", "{name}");
        assert!(failure.cause.contains(expected), "{name}: {}", failure.cause);
    }
    assert_eq!(netns.sh("nft list ruleset"), rules);
    assert_eq!(s.executor.node.hub.sandboxes(), 0);
    let _ = other.sockets().netfilter.as_fd();
}

#[tokio::test]
async fn rules_of_istios_agent_are_taken_over() {
    let mut s = setup().await;
    let netns = pod_netns();
    netns.sh("iptables-nft -t nat -N ISTIO_OUTPUT && iptables-nft -t nat -A OUTPUT -j ISTIO_OUTPUT && iptables-nft -t nat -A ISTIO_OUTPUT -p tcp -j REDIRECT --to-ports 15001");
    s.enrolled(&netns).await;
    let rules = netns.sh("nft list ruleset");
    assert!(!rules.contains("ISTIO_OUTPUT"), "{rules}");
    assert!(rules.contains("15001"));
}

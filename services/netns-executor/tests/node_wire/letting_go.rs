//! Sandboxes whose DEL never came: let go once nobody else has the namespace.

use std::time::{Duration, Instant};

use sluice_proto::ambient::Desired;
use sluice_proto::pb::executor::{PodGoneRequest, Sandbox};

use crate::harness::{Broker, Pod, eventually};
use crate::setup::{WithOpener, setup_with_opener};

/// An executor with opener and broker, and one admitted mesh pod.
struct Enrolled {
    node: WithOpener,
    pod: Pod,
    sandbox: Sandbox,
}

impl Enrolled {
    async fn new() -> Self {
        let mut node = setup_with_opener().await;
        let pod = Pod::new(&node.executor, "c1", "u1");
        let sandbox = node.executor.enrol(&mut node.broker, &pod).await;
        Self { node, pod, sandbox }
    }

    /// Tells that the pod is gone; who still has the namespace.
    async fn tell(&mut self, generation: u64, pod_uid: &str) -> String {
        tell(&mut self.node.broker, &self.sandbox, generation, pod_uid).await
    }

    async fn tell_gone(&mut self) -> String {
        self.tell(self.sandbox.generation, "u1").await
    }

    /// The runtime unmounts the namespace and says nothing.
    fn unmount(&self) -> u64 {
        let inode = self.pod.inode();
        std::fs::rename(&self.pod.path, self.pod.path.with_extension("held")).unwrap();
        inode
    }

    async fn nothing_is_held(&self, inode: u64) {
        eventually("namespace closed", || self.node.kernel.netns(inode).open == 0).await;
        assert_eq!(self.node.executor.sandbox_files(), 0);
        assert!(self.node.kernel.state().probes.is_empty());
        // Whoever is still there must not leave the mesh in plain text.
        assert!(matches!(
            self.node.kernel.netns(inode).programmed,
            Desired::Ambient(_)
        ));
    }
}

/// Tells that the pod is gone; who still has the namespace.
async fn tell(broker: &mut Broker, sandbox: &Sandbox, generation: u64, pod_uid: &str) -> String {
    let request = PodGoneRequest {
        attachment: sandbox.attachment.clone(),
        generation,
        pod_uid: pod_uid.to_owned(),
    };
    broker.client.pod_gone(request).await.unwrap().into_inner().held
}

/// Tells it again and again, as a broker does.
async fn until_let_go(broker: &mut Broker, sandbox: &Sandbox) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !tell(broker, sandbox, sandbox.generation, "u1").await.is_empty() {
        assert!(Instant::now() < deadline, "not let go");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_deleted_pod_is_let_go_as_soon_as_its_namespace_is_unmounted() {
    let mut s = Enrolled::new().await;
    assert!(s.tell_gone().await.contains("mounted"));
    let begun = Instant::now();
    let inode = s.unmount();
    assert_eq!(s.tell_gone().await, "");
    let (reason, generation) = s.node.broker.gone().await;
    assert_eq!((reason.as_str(), generation), ("pod-gone", s.sandbox.generation));
    s.nothing_is_held(inode).await;
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    assert_eq!(s.tell_gone().await, "", "told again");
}

#[tokio::test]
async fn a_process_of_the_pod_keeps_its_namespace_until_del_had_its_time() {
    let mut s = Enrolled::new().await;
    let inode = s.unmount();
    s.node.opener.finds("u1", &s.pod.path.with_extension("held"));
    let begun = Instant::now();
    assert!(s.tell_gone().await.contains("a process of the pod"));
    until_let_go(&mut s.node.broker, &s.sandbox).await;
    assert!(begun.elapsed() >= s.node.executor.settings.pod_gone);
    assert_eq!(s.node.broker.gone().await.0, "pod-gone");
    s.nothing_is_held(inode).await;
}

#[tokio::test]
async fn only_the_very_sandbox_is_let_go() {
    let mut s = Enrolled::new().await;
    assert_eq!(s.tell(s.sandbox.generation + 1, "u1").await, "");
    assert_eq!(s.tell(s.sandbox.generation, "u2").await, "");
    assert_eq!(s.node.executor.node.hub.sandboxes(), 1);
}

#[tokio::test]
async fn an_unmounted_namespace_is_noticed_although_nobody_tells() {
    let mut s = Enrolled::new().await;
    let inode = s.unmount();
    assert_eq!(s.node.broker.gone().await.0, "netns-gone");
    s.nothing_is_held(inode).await;
}

#[tokio::test]
async fn without_an_opener_nobody_can_tell_and_del_gets_its_time() {
    let s = Enrolled::new().await;
    let inode = s.unmount();
    let Enrolled { node, sandbox, .. } = s;
    let WithOpener {
        kernel,
        executor,
        mut broker,
        opener,
        ..
    } = node;
    drop(opener);
    let begun = Instant::now();
    let held = tell(&mut broker, &sandbox, sandbox.generation, "u1").await;
    assert!(held.contains("opener"), "{held}");
    until_let_go(&mut broker, &sandbox).await;
    assert!(begun.elapsed() >= executor.settings.pod_gone);
    eventually("namespace closed", || kernel.netns(inode).open == 0).await;
}

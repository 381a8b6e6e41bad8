//! The installer's end of `NodeLifecycle`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use sluice_ambient_broker::lifecycle::{Fate, Lifecycle, NodeFacts};
use sluice_proto::pb::node::node_lifecycle_client::NodeLifecycleClient;
use sluice_proto::pb::node::{
    InstallerReport, Installs, Lifecycle as PbLifecycle, NodeState, PluginCredentials, WatchRequest,
};
use sluice_proto::transport::grpc::{UdsChannel, origin};

use crate::harness::{Node, SOON, dial};

#[derive(Debug, Default)]
struct Facts {
    lifecycle: Mutex<Lifecycle>,
    credentials: Mutex<Option<PluginCredentials>>,
    withdrawn: AtomicBool,
    failures: Mutex<Vec<String>>,
}

impl Facts {
    fn say(&self, fate: Fate, reason: &str) {
        *self.lifecycle.lock().unwrap() = Lifecycle {
            fate,
            reason: reason.into(),
        };
    }
}

impl NodeFacts for Facts {
    fn lifecycle(&self) -> Lifecycle {
        self.lifecycle.lock().unwrap().clone()
    }

    fn credentials(&self) -> Option<PluginCredentials> {
        self.credentials.lock().unwrap().clone()
    }

    fn withdraw(&self) -> BoxFuture<'_, ()> {
        self.withdrawn.store(true, Ordering::Relaxed);
        Box::pin(std::future::ready(()))
    }

    fn installer_failed(&self, problem: &str) {
        self.failures.lock().unwrap().push(problem.to_owned());
    }

    fn last_look(&self) -> BoxFuture<'_, Lifecycle> {
        Box::pin(async {
            Lifecycle {
                fate: Fate::Remove,
                reason: "looked once more".into(),
            }
        })
    }
}

async fn installer(node: &Node) -> NodeLifecycleClient<UdsChannel> {
    let channel = dial(&node.run.node_socket()).await;
    NodeLifecycleClient::with_origin(channel, origin())
}

/// A node with an executor and a broker, and an installer that is connected.
async fn begun() -> (Node, Arc<Facts>, NodeLifecycleClient<UdsChannel>) {
    let mut node = Node::new();
    let facts = Arc::new(Facts::default());
    node.facts = Some(facts.clone());
    node.executor.serve(&node.run);
    node.start_broker();
    let client = installer(&node).await;
    (node, facts, client)
}

async fn until(
    states: &mut tonic::Streaming<NodeState>,
    what: &str,
    accept: impl Fn(&NodeState) -> bool,
) -> NodeState {
    let wait = async {
        loop {
            let state = states.message().await.unwrap().unwrap();
            if accept(&state) {
                return state;
            }
        }
    };
    tokio::time::timeout(SOON, wait)
        .await
        .unwrap_or_else(|_| panic!("never {what}"))
}

#[tokio::test]
async fn the_installer_is_told_when_the_node_can_serve_what_becomes_of_it_and_with_which_token() {
    let mut node = Node::new();
    let facts = Arc::new(Facts::default());
    node.facts = Some(facts.clone());
    node.start_broker();
    let mut client = installer(&node).await;
    let mut states = client.watch(WatchRequest {}).await.unwrap().into_inner();
    let first = states.message().await.unwrap().unwrap();
    assert!(
        !first.can_serve && first.why_not.contains("the executor is not connected"),
        "{first:?}"
    );
    assert_eq!(
        (first.lifecycle(), first.credentials.is_none()),
        (PbLifecycle::Unspecified, true)
    );

    node.executor.serve(&node.run);
    let serving = until(&mut states, "serving", |state| state.can_serve).await;
    assert_eq!(serving.why_not, "");
    facts.say(Fate::Keep, "it exists");
    let kept = until(&mut states, "kept", |state| {
        state.lifecycle() == PbLifecycle::Keep
    })
    .await;
    assert_eq!(kept.lifecycle_reason, "it exists");
    let credentials = PluginCredentials {
        server: "https://10.96.0.1:443".into(),
        tls_server_name: String::new(),
        ca_pem: "pem".into(),
        token: "token".into(),
        expires_unix: 7,
    };
    *facts.credentials.lock().unwrap() = Some(credentials.clone());
    let issued = until(&mut states, "issued", |state| state.credentials.is_some()).await;
    assert_eq!(issued.credentials, Some(credentials));

    let stopped = Instant::now();
    node.stop.cancel();
    let last = until(&mut states, "final", |state| state.r#final).await;
    assert_eq!(
        (last.lifecycle(), last.lifecycle_reason.as_str()),
        (PbLifecycle::Remove, "looked once more")
    );
    assert!(
        states.message().await.unwrap().is_none(),
        "the stream ends with the last word"
    );
    node.broker.take().unwrap().await.unwrap();
    assert!(
        stopped.elapsed() < Duration::from_secs(2),
        "{:?}",
        stopped.elapsed()
    );
}

#[tokio::test]
async fn an_installer_that_is_not_ready_makes_the_node_not_ready() {
    let (node, _, mut client) = begun().await;
    let mut report = InstallerReport {
        ready: false,
        problem: "no primary network yet".into(),
        mode: "owned".into(),
        ..InstallerReport::default()
    };
    client.report(report.clone()).await.unwrap();
    let (status, text) = node.get("/readyz").await;
    assert!(
        status == 503 && text.contains("the installer is not ready: no primary network yet"),
        "{text}"
    );
    let metric = async |line: &str| {
        let (_, text) = node.get("/metrics").await;
        assert!(text.lines().any(|found| found == line), "no {line:?} in {text}");
    };
    metric("istio_cni_install_ready 0").await;
    report.ready = true;
    report.repairs = 3;
    report.installs = Some(Installs {
        succeeded: 2,
        plugin_failed: 5,
        kubeconfig_failed: 0,
        configuration_failed: 7,
    });
    client.report(report).await.unwrap();
    metric("istio_cni_install_ready 1").await;
    metric("installer_repairs 3").await;
    metric("istio_cni_installs_total{result=\"SUCCESS\"} 2").await;
    metric("istio_cni_installs_total{result=\"COPY_BINARIES_FAILURE\"} 5").await;
    metric("istio_cni_installs_total{result=\"CREATE_KUBECONFIG_FAILURE\"} 0").await;
    metric("istio_cni_installs_total{result=\"CREATE_CNI_CONFIG_FAILURE\"} 7").await;
    let until = Instant::now() + SOON;
    loop {
        let (status, text) = node.get("/readyz").await;
        assert!(!text.contains("installer"), "{text}");
        if status == 200 {
            break;
        }
        assert!(Instant::now() < until, "{text}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn what_keeps_the_installer_from_being_ready_is_told_to_people() {
    let (_node, facts, mut client) = begun().await;
    let report = |ready: bool, problem: &str| InstallerReport {
        ready,
        problem: problem.to_owned(),
        ..InstallerReport::default()
    };
    let told = async |problems: &[&str]| {
        let until = Instant::now() + 2 * SOON;
        while *facts.failures.lock().unwrap() != problems {
            assert!(Instant::now() < until, "{:?}", facts.failures.lock().unwrap());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let started = Instant::now();
    client
        .report(report(false, "no primary network yet"))
        .await
        .unwrap();
    told(&["no primary network yet"]).await;
    // Who is just starting is not complained of.
    assert!(
        started.elapsed() > Duration::from_secs(4),
        "{:?}",
        started.elapsed()
    );
    client.report(report(true, "")).await.unwrap();
    client.report(report(false, "it is gone again")).await.unwrap();
    told(&["no primary network yet", "it is gone again"]).await;
}

#[tokio::test]
async fn a_plugin_that_is_given_another_selection_makes_the_node_not_ready() {
    let (node, _, mut client) = begun().await;
    let with = |selection_hash: String| InstallerReport {
        ready: true,
        selection_hash,
        ..InstallerReport::default()
    };
    client.report(with("0123456789abcdef".to_owned())).await.unwrap();
    let (status, text) = node.get("/readyz").await;
    // Both are named, so that they can be compared with what broker and installer log.
    let ours = sluice_selection::SelectionConfig::default().hash();
    assert!(
        status == 503 && text.contains("selection 0123456789abcdef") && text.contains(&ours),
        "{text}"
    );
    client.report(with(ours)).await.unwrap();
    let (_, text) = node.get("/readyz").await;
    assert!(!text.contains("selection"), "{text}");
}

#[tokio::test]
async fn without_a_cluster_there_is_no_socket_for_an_installer() {
    let mut node = Node::new();
    node.executor.serve(&node.run);
    node.start_broker();
    node.workloads().await;
    assert!(!node.run.node_socket().exists());
}

/// The installer may find us only when we were asked to stop.
#[tokio::test]
async fn an_installer_that_comes_late_is_told_the_last_word() {
    let mut node = Node::new();
    node.facts = Some(Arc::new(Facts::default()));
    node.stop.cancel();
    node.start_broker();
    let mut states = installer(&node)
        .await
        .watch(WatchRequest {})
        .await
        .unwrap()
        .into_inner();
    let last = until(&mut states, "final", |state| state.r#final).await;
    assert_eq!(last.lifecycle(), PbLifecycle::Remove);
    node.broker.take().unwrap().await.unwrap();
}

/// An agent that is asked to leave while it starts: its executor may have made rules before we find it.
#[tokio::test]
async fn an_executor_that_comes_after_the_agent_was_asked_to_leave_is_retired_as_well() {
    let mut node = Node::new();
    node.facts = Some(Arc::new(Facts::default()));
    node.start_broker();
    let _states = installer(&node).await.watch(WatchRequest {}).await.unwrap();
    node.stop.cancel();
    node.executor.serve(&node.run);
    node.broker.take().unwrap().await.unwrap();
    let calls = node.executor.0.lock().unwrap().calls.clone();
    assert!(calls.contains(&"retire".to_owned()), "{calls:?}");
}

#[tokio::test]
async fn an_agent_that_leaves_the_node_takes_everything_back_and_leaves_no_socket() {
    let (mut node, facts, mut client) = begun().await;
    let mut states = client.watch(WatchRequest {}).await.unwrap().into_inner();
    until(&mut states, "serving", |state| state.can_serve).await;
    assert!(node.run.zds_socket().exists());

    node.stop.cancel();
    let last = until(&mut states, "final", |state| state.r#final).await;
    assert_eq!(last.lifecycle(), PbLifecycle::Remove);
    node.broker.take().unwrap().await.unwrap();
    assert!(facts.withdrawn.load(Ordering::Relaxed));
    let calls = node.executor.0.lock().unwrap().calls.clone();
    assert!(calls.contains(&"retire".to_owned()), "{calls:?}");
    for socket in [
        node.run.zds_socket(),
        node.run.workload_socket(),
        node.run.http_socket(),
        node.run.node_socket(),
    ] {
        assert!(!socket.exists(), "{}", socket.display());
    }
}

//! The Kubernetes source, status writer and lifecycle against a stand-in API server that fails in every way it can.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a step that fails fails the test"
)]

mod api;
mod lifecycle;
mod lookup;
mod roles;
mod source;
mod status;

use std::sync::Arc;
use std::time::{Duration, Instant};

use api::Api;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use serde_json::{Value, json};
use sluice_ambient_broker::cluster::{Access, Kubernetes, Settings, Timing};
use sluice_ambient_broker::source::{PodSource, SourceEvent};
use sluice_selection::OwnPods;

const SOON: Duration = Duration::from_secs(10);
const NODE: &str = "node-1";
const PODS: &str = "/api/v1/pods";
const NAMESPACES: &str = "/api/v1/namespaces";

fn quick() -> Timing {
    Timing {
        head: Duration::from_millis(500),
        list: Duration::from_secs(1),
        lookup: Duration::from_millis(500),
        call: Duration::from_millis(500),
        watch: Duration::from_secs(1),
        watch_grace: Duration::from_millis(200),
        retry: (Duration::from_millis(20), Duration::from_millis(200)),
        event_repeat: Duration::from_millis(500),
        last_look: Duration::from_millis(500),
    }
}

async fn kubernetes(api: &Api, timing: Timing) -> Kubernetes {
    Kubernetes::new(Settings {
        access: Access::Kubeconfig(api.kubeconfig()),
        node: NODE.into(),
        pod: "sluice-node-abcde".parse().unwrap(),
        own: OwnPods {
            namespace: "sluice-system".into(),
            daemon_set: "sluice-node".into(),
        },
        plugin_service_account: "sluice-plugin".into(),
        timing,
    })
    .await
    .unwrap()
}

fn pod(name: &str, uid: &str) -> Value {
    json!({"metadata": {"name": name, "namespace": "shop", "uid": uid, "labels": {"app": name}},
        "spec": {"nodeName": NODE}, "status": {"phase": "Running", "podIP": "10.0.0.1"}})
}

fn path(name: &str) -> String {
    format!("/api/v1/namespaces/shop/pods/{name}")
}

fn namespace(api: &Api, name: &str, mode: &str) {
    let object = json!({"metadata": {"name": name, "labels": {"istio.io/dataplane-mode": mode}}});
    api.put(&format!("{NAMESPACES}/{name}"), object);
}

/// The source's events in short words, with a deadline.
struct Heard(BoxStream<'static, SourceEvent>);

impl Heard {
    fn new(kubernetes: &Kubernetes) -> Self {
        Self(kubernetes.events())
    }

    async fn next(&mut self) -> String {
        let event = tokio::time::timeout(SOON, self.0.next())
            .await
            .expect("nothing told")
            .unwrap();
        match event {
            SourceEvent::Synced => "synced".into(),
            SourceEvent::PodApplied(pod) => format!("+pod {} {}", pod.id.name, pod.id.uid),
            SourceEvent::PodDeleted(pod) => format!("-pod {} {}", pod.id.name, pod.id.uid),
            SourceEvent::NamespaceApplied(namespace) => format!("+namespace {}", namespace.name),
            SourceEvent::NamespaceDeleted(namespace) => format!("-namespace {}", namespace.name),
            SourceEvent::Problem(problem) => format!("problem {problem}"),
            SourceEvent::ProblemCleared { place } => format!("over {place}"),
            SourceEvent::Undetermined(_) => "undetermined".into(),
        }
    }

    /// What is told until `last`, which is told too; troubles of other parts than pods and namespaces left out.
    async fn until(&mut self, last: &str) -> Vec<String> {
        let mut heard = Vec::new();
        loop {
            let next = self.next().await;
            if next.contains("daemonsets") || next.contains("serviceaccounts") {
                continue;
            }
            let done = next.starts_with(last);
            heard.push(next);
            if done {
                return heard;
            }
        }
    }

    async fn synced(&mut self) {
        self.until("synced").await;
    }
}

async fn eventually<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + SOON;
    loop {
        if let Some(value) = attempt() {
            return value;
        }
        assert!(Instant::now() < until, "never: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn ready() -> (Api, Kubernetes, Heard) {
    let api = Api::start().await;
    namespace(&api, "shop", "ambient");
    let kubernetes = kubernetes(&api, quick()).await;
    let mut heard = Heard::new(&kubernetes);
    heard.synced().await;
    (api, kubernetes, heard)
}

fn shared(kubernetes: &Kubernetes) -> Arc<dyn PodSource> {
    Arc::new(kubernetes.clone())
}

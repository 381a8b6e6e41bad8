//! The API as the broker's source: pods of this node and all namespaces.
//!
//! Namespaces come first: a pod that is told before its namespace would be decided as if that had no labels.

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use futures_util::stream::BoxStream;
use kube::core::params::GetParams;
use kube::core::request::Request;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;

use super::Kubernetes;
use super::mirror::{Found, Mirror, PodNews};
use super::troubles::{place, problem};
use super::watch::{Target, Told, watch};
use super::wire::{MetadataOnly, RawPod};
use crate::source::{Lookup, PodSource, SourceError, SourceEvent};

/// Events a slow listener may be behind; then the watches wait.
const QUEUE: usize = 64;

/// How often it is checked whether the watch has told of pods that were found by asking.
const SETTLE: Duration = Duration::from_secs(5);

const NAMESPACES: &str = "/api/v1/namespaces";
const PODS: &str = "/api/v1/pods";

impl PodSource for Kubernetes {
    fn events(&self) -> BoxStream<'static, SourceEvent> {
        let (sender, receiver) = mpsc::channel(QUEUE);
        let told = tell(self.clone(), sender);
        tokio::spawn(told);
        Box::pin(ReceiverStream::new(receiver))
    }

    fn lookup<'a>(&'a self, namespace: &'a str, name: &'a str) -> BoxFuture<'a, Result<Lookup, SourceError>> {
        Box::pin(async move {
            let within = self.api.timing.lookup;
            let pods = Request::new(format!("{NAMESPACES}/{namespace}/pods"));
            let pod = self
                .api
                .find::<RawPod>("get pod", pods.get(name, &GetParams::default()), within);
            let namespaces = Request::new(NAMESPACES).get_metadata(namespace, &GetParams::default());
            let namespace = self.api.find::<MetadataOnly>("get namespace", namespaces, within);
            let (pod, namespace) = tokio::try_join!(pod, namespace)?;
            let invalid = |error| SourceError::Api(super::ApiError::unexpected("read the answer", &error));
            let pod = pod.map(RawPod::convert).transpose().map_err(invalid)?;
            let here = pod.filter(|pod| pod.pod.node_name.as_deref() == Some(self.settings.node.as_str()));
            if let Some(pod) = &here {
                self.seen(pod);
                let found = Found {
                    pod: pod.clone(),
                    at: Instant::now(),
                };
                self.found
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(found);
            }
            Ok(Lookup {
                pod: here.map(|pod| pod.pod),
                namespace: namespace
                    .map(MetadataOnly::namespace)
                    .transpose()
                    .map_err(invalid)?,
                undetermined: false,
            })
        })
    }
}

/// Tells `listener` for as long as it listens.
async fn tell(kubernetes: Kubernetes, listener: mpsc::Sender<SourceEvent>) {
    let api = &kubernetes.api;
    let mut watches = JoinSet::new();
    let (namespaces, mut namespace_news) = mpsc::channel(QUEUE);
    let target = Target {
        what: "namespaces",
        path: NAMESPACES,
        fields: None,
        metadata: true,
        page: Some(500),
    };
    watches.spawn(watch::<MetadataOnly>(api.clone(), target, namespaces));
    let (pods, mut pod_news) = mpsc::channel(QUEUE);
    let mut pods = Some(pods);
    let mut mirror = Mirror::default();
    let mut troubles = api.troubles.watch();
    let mut told_troubles = BTreeMap::new();
    let mut synced = false;
    let mut settle = tokio::time::interval(SETTLE);
    loop {
        let events = tokio::select! {
            // A trouble that is over is told before what came of it.
            biased;
            () = listener.closed() => return,
            Ok(()) = troubles.changed() => {
                let now = troubles.borrow_and_update().clone();
                let events = differences(&told_troubles, &now);
                told_troubles = now;
                events
            }
            _ = settle.tick() => {
                let found = std::mem::take(&mut *kubernetes.found.lock().unwrap_or_else(PoisonError::into_inner));
                kubernetes.pod_news(mirror.settle(found, Instant::now()))
            }
            Some(told) = namespace_news.recv() => {
                if matches!(told, Told::Listed)
                    && let Some(pods) = pods.take()
                {
                    watches.spawn(watch::<RawPod>(api.clone(), kubernetes.pods(), pods));
                }
                mirror.namespace(told)
            }
            Some(told) = pod_news.recv() => {
                let listed = matches!(told, Told::Listed);
                let mut events = kubernetes.pod_news(mirror.pod(told));
                if listed && !std::mem::replace(&mut synced, true) {
                    events.push(SourceEvent::Synced);
                }
                events
            }
        };
        for event in events {
            if listener.send(event).await.is_err() {
                return;
            }
        }
    }
}

impl Kubernetes {
    fn pods(&self) -> Target {
        Target {
            what: "pods",
            path: PODS,
            fields: Some(format!("spec.nodeName={}", self.settings.node)),
            metadata: false,
            // There are no more of them than the kubelet allows on one node.
            page: None,
        }
    }

    fn pod_news(&self, news: PodNews) -> Vec<SourceEvent> {
        for pod in &news.gone {
            self.book.gone(pod.sandbox_uid());
        }
        if let Some(pod) = &news.seen {
            self.seen(pod);
        }
        news.events
    }
}

fn differences(
    before: &BTreeMap<&'static str, String>,
    now: &BTreeMap<&'static str, String>,
) -> Vec<SourceEvent> {
    let over = before.iter().filter(|(at, text)| now.get(*at) != Some(text));
    let over = over.map(|(at, _)| SourceEvent::ProblemCleared { place: place(at) });
    let new = now.iter().filter(|(at, text)| before.get(*at) != Some(text));
    over.chain(new.map(|(at, text)| SourceEvent::Problem(problem(at, text))))
        .collect()
}

//! What was told of the API's objects so far, and how the next news differs from it: pure.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sluice_proto::id::{Namespace as NamespaceName, PodName};

use super::watch::Told;
use super::wire::{MetadataOnly, RawPod, WirePod};
use crate::source::{Namespace, Pod, Problem, SourceEvent};

type PodKey = (NamespaceName, PodName);

/// The objects as the source's listener knows them.
#[derive(Debug, Default)]
pub(super) struct Mirror {
    namespaces: HashMap<NamespaceName, Arc<Namespace>>,
    pods: HashMap<PodKey, Arc<Pod>>,
    /// Seen since the list began.
    listed_namespaces: Option<HashSet<NamespaceName>>,
    listed_pods: Option<HashSet<PodKey>>,
    /// Everything about pods up to this version has been told.
    reached: u64,
    /// Pods that were found by asking, of which the watch may never tell.
    found: Vec<Found>,
}

/// A pod that was found by asking for it.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) pod: WirePod,
    /// When.
    pub(super) at: Instant,
}

/// By then whoever asked has dealt with the answer.
const DEALT_WITH: Duration = Duration::from_secs(5);

/// What became of one piece of news about pods.
#[derive(Debug, Default)]
pub(super) struct PodNews {
    /// What to tell.
    pub(super) events: Vec<SourceEvent>,
    /// The pod that was seen, changed or not.
    pub(super) seen: Option<WirePod>,
    /// Pods that are gone.
    pub(super) gone: Vec<Arc<Pod>>,
}

impl Mirror {
    /// Takes news of a namespace; what to tell.
    pub(super) fn namespace(&mut self, told: Told<MetadataOnly>) -> Vec<SourceEvent> {
        match told {
            Told::Listing => {
                self.listed_namespaces = Some(HashSet::new());
                Vec::new()
            }
            Told::Listed => {
                let listed = self.listed_namespaces.take().unwrap_or_default();
                let gone: Vec<_> = self
                    .namespaces
                    .extract_if(|name, _| !listed.contains(name))
                    .collect();
                gone.into_iter()
                    .map(|(_, namespace)| SourceEvent::NamespaceDeleted(namespace))
                    .collect()
            }
            Told::Reached(_) => Vec::new(),
            Told::Applied(raw) => {
                let namespace = match raw.namespace() {
                    Ok(namespace) => namespace,
                    Err(error) => return vec![unreadable("namespaces", &error)],
                };
                if let Some(listed) = &mut self.listed_namespaces {
                    listed.insert(namespace.name.clone());
                }
                let known = self
                    .namespaces
                    .insert(namespace.name.clone(), Arc::clone(&namespace));
                if known.as_ref() == Some(&namespace) {
                    return Vec::new();
                }
                vec![SourceEvent::NamespaceApplied(namespace)]
            }
            Told::Deleted(raw) => {
                let name = raw.namespace().ok().map(|namespace| namespace.name.clone());
                let gone = name.and_then(|name| self.namespaces.remove(&name));
                gone.into_iter().map(SourceEvent::NamespaceDeleted).collect()
            }
        }
    }

    /// Takes news of a pod.
    pub(super) fn pod(&mut self, told: Told<RawPod>) -> PodNews {
        let mut news = PodNews::default();
        match told {
            Told::Listing => self.listed_pods = Some(HashSet::new()),
            Told::Reached(version) => self.reached = self.reached.max(version),
            Told::Listed => {
                let listed = self.listed_pods.take().unwrap_or_default();
                let gone = self.pods.extract_if(|key, _| !listed.contains(key));
                news.gone.extend(gone.map(|(_, pod)| pod));
            }
            Told::Applied(raw) => match raw.convert() {
                Ok(seen) => self.applied(seen, &mut news),
                Err(error) => news.events.push(unreadable("pods", &error)),
            },
            Told::Deleted(raw) => {
                if let Ok(last) = raw.convert() {
                    // Of the same name, but another one: that was told before.
                    let key = key(&last.pod);
                    if self
                        .pods
                        .get(&key)
                        .is_some_and(|known| known.id.uid == last.pod.id.uid)
                    {
                        self.pods.remove(&key);
                        news.gone.push(last.pod);
                    }
                }
            }
        }
        let deleted = news.gone.iter().cloned().map(SourceEvent::PodDeleted);
        news.events.splice(0..0, deleted);
        news
    }

    /// Takes in what was found by asking; tells that pods are gone which came and went between two lists.
    pub(super) fn settle(&mut self, found: Vec<Found>, now: Instant) -> PodNews {
        self.found.extend(found);
        let mut news = PodNews::default();
        for found in std::mem::take(&mut self.found) {
            let known = self.pods.get(&key(&found.pod.pod));
            if known.is_some_and(|known| known.id.uid == found.pod.pod.id.uid) {
                continue;
            }
            if now < found.at + DEALT_WITH || self.reached < found.pod.version {
                self.found.push(found);
            } else {
                news.gone.push(found.pod.pod);
            }
        }
        news.events
            .extend(news.gone.iter().cloned().map(SourceEvent::PodDeleted));
        news
    }

    fn applied(&mut self, seen: WirePod, news: &mut PodNews) {
        self.reached = self.reached.max(seen.version);
        let pod = Arc::clone(&seen.pod);
        let key = key(&pod);
        if let Some(listed) = &mut self.listed_pods {
            listed.insert(key.clone());
        }
        let known = self.pods.insert(key, Arc::clone(&pod));
        news.seen = Some(seen);
        if known.as_ref() == Some(&pod) {
            return;
        }
        if let Some(known) = known.filter(|known| known.id.uid != pod.id.uid) {
            news.gone.push(known);
        }
        news.events.push(SourceEvent::PodApplied(pod));
    }
}

fn key(pod: &Pod) -> PodKey {
    (pod.id.namespace.clone(), pod.id.name.clone())
}

fn unreadable(what: &str, error: &dyn std::fmt::Display) -> SourceEvent {
    SourceEvent::Problem(Problem {
        place: super::troubles::place(what),
        line: None,
        field: Some("metadata".into()),
        message: format!("an object is ignored: {error}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(name: &str, uid: &str, label: &str) -> RawPod {
        serde_json::from_value(
            serde_json::json!({"metadata": {"name": name, "namespace": "shop", "uid": uid,
            "resourceVersion": "1", "labels": {"l": label}}}),
        )
        .unwrap()
    }

    fn kinds(news: &PodNews) -> Vec<String> {
        let show = |event: &SourceEvent| match event {
            SourceEvent::PodApplied(pod) => format!("+{} {}", pod.id.name, pod.id.uid),
            SourceEvent::PodDeleted(pod) => format!("-{} {}", pod.id.name, pod.id.uid),
            other => format!("{other:?}"),
        };
        news.events.iter().map(show).collect()
    }

    #[test]
    fn a_new_list_tells_only_what_is_new_and_what_is_gone() {
        let mut mirror = Mirror::default();
        mirror.pod(Told::Listing);
        assert_eq!(kinds(&mirror.pod(Told::Applied(raw("a", "1", "x")))), ["+a 1"]);
        assert_eq!(kinds(&mirror.pod(Told::Applied(raw("b", "2", "x")))), ["+b 2"]);
        assert!(mirror.pod(Told::Listed).events.is_empty());
        mirror.pod(Told::Listing);
        let unchanged = mirror.pod(Told::Applied(raw("a", "1", "x")));
        assert!(unchanged.events.is_empty() && unchanged.seen.is_some());
        let listed = mirror.pod(Told::Listed);
        assert_eq!((kinds(&listed), listed.gone.len()), (vec!["-b 2".to_owned()], 1));
    }

    #[test]
    fn a_list_that_broke_off_takes_nothing_away() {
        let mut mirror = Mirror::default();
        mirror.pod(Told::Listing);
        mirror.pod(Told::Applied(raw("a", "1", "x")));
        mirror.pod(Told::Listed);
        mirror.pod(Told::Listing);
        // Broken off; the next one begins anew.
        mirror.pod(Told::Listing);
        mirror.pod(Told::Applied(raw("a", "1", "x")));
        assert!(mirror.pod(Told::Listed).events.is_empty());
    }

    #[test]
    fn a_pod_of_the_same_name_replaces_the_old_one_and_a_late_deletion_does_not_count() {
        let mut mirror = Mirror::default();
        mirror.pod(Told::Applied(raw("a", "1", "x")));
        assert_eq!(
            kinds(&mirror.pod(Told::Applied(raw("a", "2", "x")))),
            ["-a 1", "+a 2"]
        );
        assert!(mirror.pod(Told::Deleted(raw("a", "1", "x"))).events.is_empty());
        assert_eq!(kinds(&mirror.pod(Told::Deleted(raw("a", "2", "y")))), ["-a 2"]);
    }

    #[test]
    fn a_pod_that_was_found_and_never_told_of_is_gone_once_the_watch_has_passed_it() {
        let now = Instant::now();
        let found = |uid: &str, version: u64| {
            let mut pod = raw("a", uid, "x").convert().unwrap();
            pod.version = version;
            vec![Found { pod, at: now }]
        };
        let mut mirror = Mirror::default();
        mirror.pod(Told::Reached(5));
        assert!(mirror.settle(found("1", 7), now).events.is_empty());
        assert!(mirror.settle(Vec::new(), now + DEALT_WITH).events.is_empty());
        mirror.pod(Told::Reached(7));
        assert_eq!(kinds(&mirror.settle(Vec::new(), now + DEALT_WITH)), ["-a 1"]);
        assert!(mirror.settle(Vec::new(), now + 2 * DEALT_WITH).events.is_empty());
        mirror.settle(found("2", 9), now);
        mirror.pod(Told::Applied(raw("a", "2", "x")));
        mirror.pod(Told::Reached(10));
        assert!(mirror.settle(Vec::new(), now + DEALT_WITH).events.is_empty());
    }

    #[test]
    fn namespaces_are_told_once() {
        let namespace = |label: &str| -> MetadataOnly {
            serde_json::from_value(serde_json::json!({"metadata": {"name": "n", "labels": {"l": label}}}))
                .unwrap()
        };
        let mut mirror = Mirror::default();
        mirror.namespace(Told::Listing);
        assert_eq!(mirror.namespace(Told::Applied(namespace("x"))).len(), 1);
        assert!(mirror.namespace(Told::Listed).is_empty());
        assert!(mirror.namespace(Told::Applied(namespace("x"))).is_empty());
        assert_eq!(mirror.namespace(Told::Applied(namespace("y"))).len(), 1);
        mirror.namespace(Told::Listing);
        assert!(matches!(
            mirror.namespace(Told::Listed).as_slice(),
            [SourceEvent::NamespaceDeleted(_)]
        ));
    }
}

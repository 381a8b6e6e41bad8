//! Whether this node is still meant to have the agent: what its own DaemonSet says.
//!
//! The DaemonSet is watched, not only read at the end: `helm uninstall` removes it before the roles and the
//! ServiceAccount, so that by the time the agent is asked to stop it may no longer ask.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::StreamExt;
use kube::core::WatchEvent;
use kube::core::params::{GetParams, WatchParams};
use kube::core::request::Request;
use serde::Deserialize;
use sluice_selection::Labels;
use tokio::sync::watch;

use super::Kind;
use super::client::Api;
use super::failure::ApiError;
use super::node_affinity::{Affinity, Unwanted};
use super::pause::Pause;
use super::wire::{Metadata, MetadataOnly};
use crate::lifecycle::{Fate, Lifecycle};

/// The place in troubles.
const PLACE: &str = "daemonsets";

/// The DaemonSet and the node it may want.
#[derive(Debug, Clone)]
pub(super) struct Own {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) node: String,
}

/// What is known of the DaemonSet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Known {
    pub(super) lifecycle: Lifecycle,
    /// Its UID, as long as it exists.
    pub(super) uid: Option<String>,
}

/// A DaemonSet, as far as it says which nodes it wants.
#[derive(Debug, Clone, Default, Deserialize)]
struct DaemonSet {
    #[serde(default)]
    metadata: Metadata,
    #[serde(default)]
    spec: Spec,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct Spec {
    #[serde(default)]
    template: Template,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct Template {
    #[serde(default)]
    spec: PodSpec,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodSpec {
    #[serde(default)]
    node_selector: Option<BTreeMap<String, String>>,
    #[serde(default)]
    affinity: Option<Affinity>,
}

/// Where a watch begins.
struct Seen {
    version: String,
    generation: i64,
}

impl Own {
    fn collection(&self) -> String {
        format!("/apis/apps/v1/namespaces/{}/daemonsets", self.namespace)
    }

    /// Looks once.
    async fn look(&self, api: &Api, within: Duration) -> Result<(Known, Option<Seen>), ApiError> {
        let request = Request::new(self.collection()).get(&self.name, &GetParams::default());
        let found = api.find::<DaemonSet>("get daemonset", request, within).await?;
        let Some(found) = found else {
            return Ok((self.gone(), None));
        };
        let seen = Seen {
            version: found.metadata.resource_version.clone(),
            generation: found.metadata.generation,
        };
        let pods = &found.spec.template.spec;
        let picky = pods.affinity.as_ref().is_some_and(Affinity::is_required)
            || pods
                .node_selector
                .as_ref()
                .is_some_and(|selector| !selector.is_empty());
        let node = if picky && found.metadata.deletion_timestamp.is_none() {
            self.node_labels(api, within).await
        } else {
            Ok(None)
        };
        Ok((self.judge(&found, node), Some(seen)))
    }

    /// `None`: there is no such node.
    async fn node_labels(&self, api: &Api, within: Duration) -> Result<Option<Labels>, ApiError> {
        let request = Request::new("/api/v1/nodes").get_metadata(&self.node, &GetParams::default());
        let node = api.find::<MetadataOnly>("get node", request, within).await?;
        Ok(node.map(|node| node.metadata.labels))
    }

    fn gone(&self) -> Known {
        Known {
            lifecycle: Lifecycle {
                fate: Fate::Remove,
                reason: format!("DaemonSet {}/{} does not exist", self.namespace, self.name),
            },
            uid: None,
        }
    }

    /// What follows from the DaemonSet and, where it matters, the node's labels: pure.
    fn judge(&self, found: &DaemonSet, node: Result<Option<Labels>, ApiError>) -> Known {
        let set = format!("DaemonSet {}/{}", self.namespace, self.name);
        let keep = |reason: String| (Fate::Keep, reason);
        let (fate, reason) = if let Some(at) = &found.metadata.deletion_timestamp {
            (Fate::Remove, format!("{set} is being deleted since {at}"))
        } else {
            let pods = &found.spec.template.spec;
            match node {
                // Whoever removes the rule for nodes does not thereby remove the agent.
                Err(error) => keep(format!(
                    "{set} exists; which nodes it wants is not known: {error}"
                )),
                Ok(None) => keep(format!("{set} exists")),
                Ok(Some(labels)) => {
                    let selector = pods.node_selector.clone().unwrap_or_default();
                    match Affinity::unwanted(pods.affinity.as_ref(), &selector, &self.node, &labels) {
                        None => keep(format!("{set} exists and wants this node")),
                        Some(Unwanted(why)) => (
                            Fate::Remove,
                            format!("{set} no longer wants node {}: {why}", self.node),
                        ),
                    }
                }
            }
        };
        Known {
            lifecycle: Lifecycle { fate, reason },
            uid: Some(found.metadata.uid.clone()),
        }
    }

    /// Watches for ever.
    pub(super) async fn watch(self, api: Api, known: watch::Sender<Known>) {
        let mut pause = Pause::new(api.timing.retry);
        loop {
            let looked = self.look(&api, api.timing.call).await;
            let result = match looked {
                Ok((now, seen)) => {
                    publish(&known, now);
                    api.troubles.over(PLACE);
                    let Some(seen) = seen else {
                        // It may come back, by the same name.
                        tokio::time::sleep(api.timing.retry.1).await;
                        continue;
                    };
                    self.follow(&api, &seen, &known).await
                }
                Err(error) => Err(error),
            };
            let wait = match result {
                Ok(()) => {
                    pause.reset();
                    super::pause::spread(api.timing.retry.0)
                }
                Err(error) if error.kind == Kind::Gone => pause.next(),
                Err(error) => {
                    api.troubles.stand(PLACE, &error);
                    pause.next().max(error.wait.unwrap_or_default())
                }
            };
            tokio::time::sleep(wait).await;
        }
    }

    /// Returns when the specification may have changed, or the watch has ended.
    async fn follow(&self, api: &Api, seen: &Seen, known: &watch::Sender<Known>) -> Result<(), ApiError> {
        let what = "watch daemonset";
        let params = WatchParams {
            field_selector: Some(format!("metadata.name={}", self.name)),
            timeout: u32::try_from(api.timing.watch.as_secs().max(1)).ok(),
            bookmarks: true,
            ..WatchParams::default()
        };
        let built = Request::new(self.collection()).watch_metadata(&params, &seen.version);
        let mut events = std::pin::pin!(api.watch::<MetadataOnly>(what, built).await?);
        let silence = api.timing.watch + api.timing.watch_grace;
        loop {
            let event = tokio::time::timeout(silence, events.next()).await;
            match event.map_err(|_| ApiError::silent(what, silence))? {
                None => return Ok(()),
                Some(Err(error)) => return Err(ApiError::new(what, &error)),
                Some(Ok(WatchEvent::Error(status))) => return Err(ApiError::of_status(what, &status)),
                Some(Ok(WatchEvent::Deleted(_))) => {
                    publish(known, self.gone());
                    return Ok(());
                }
                // Deleting in the foreground and a new specification raise the generation, status does not.
                Some(Ok(WatchEvent::Added(set) | WatchEvent::Modified(set))) => {
                    if set.metadata.generation != seen.generation || set.metadata.deletion_timestamp.is_some()
                    {
                        return Ok(());
                    }
                }
                Some(Ok(WatchEvent::Bookmark(_))) => {}
            }
        }
    }

    /// The last look, when the process is asked to stop. What the watch has seen counts where the API server does not
    /// answer any more, or not to us.
    pub(super) async fn last_look(&self, api: &Api, seen: &Known) -> Lifecycle {
        let within = api.timing.last_look;
        let looked = tokio::time::timeout(within, self.look(api, within)).await;
        let error = match looked {
            Ok(Ok((now, _))) => return now.lifecycle,
            Ok(Err(error)) => error,
            Err(_) => ApiError::silent("get daemonset", within),
        };
        if seen.lifecycle.fate == Fate::Remove {
            return seen.lifecycle.clone();
        }
        Lifecycle {
            fate: Fate::Unknown,
            reason: error.to_string(),
        }
    }
}

fn publish(known: &watch::Sender<Known>, now: Known) {
    known.send_if_modified(|before| {
        let news = *before != now;
        if news {
            tracing::info!(
                fate = now.lifecycle.fate.as_str(),
                reason = now.lifecycle.reason,
                "lifecycle"
            );
            *before = now;
        }
        news
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> Own {
        Own {
            namespace: "sluice-system".into(),
            name: "sluice-node".into(),
            node: "n1".into(),
        }
    }

    fn set(spec: &serde_json::Value, deleted: bool) -> DaemonSet {
        let at = deleted.then_some("2026-01-01T00:00:00Z");
        serde_json::from_value(
            serde_json::json!({"metadata": {"name": "sluice-node", "uid": "d", "deletionTimestamp": at},
            "spec": {"template": {"spec": spec}}}),
        )
        .unwrap()
    }

    fn fate(spec: &serde_json::Value, labels: &[(&str, &str)]) -> Fate {
        let labels = labels
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect();
        own().judge(&set(spec, false), Ok(Some(labels))).lifecycle.fate
    }

    #[test]
    fn present_and_wanted_is_kept_deleting_or_unwanted_is_removed() {
        let nothing = serde_json::json!({});
        let selector = serde_json::json!({"nodeSelector": {"kubernetes.io/os": "linux", "mesh": "yes"}});
        assert_eq!(fate(&nothing, &[]), Fate::Keep);
        assert_eq!(
            own().judge(&set(&nothing, true), Ok(None)).lifecycle.fate,
            Fate::Remove
        );
        assert_eq!(
            fate(&selector, &[("kubernetes.io/os", "linux"), ("mesh", "yes")]),
            Fate::Keep
        );
        assert_eq!(fate(&selector, &[("kubernetes.io/os", "linux")]), Fate::Remove);
        let blind = own().judge(
            &set(&selector, false),
            Err(ApiError::unexpected("get node", &"403")),
        );
        assert_eq!(blind.lifecycle.fate, Fate::Keep);
        assert_eq!(blind.uid.as_deref(), Some("d"));
    }
}

//! The agent's end in a cluster: run as a Job before `helm uninstall` deletes anything.
//!
//! helm deletes the DaemonSet, and some milliseconds later the ServiceAccount and its roles. An agent that hears of its end
//! only then can clean its node, but no longer withdraw the status of pods. So the DaemonSet is first told to want no
//! node any more, which agents take as the word to clean up, and the end of their pods is awaited.
//!
//! Not while an agent is being replaced: the old one has been told already that the agent stays on its node, and of the new one
//! parts may still stand by, which clean nothing.

use std::time::Duration;

use kube::core::params::{GetParams, ListParams, Patch, PatchParams};
use kube::core::request::Request;
use serde::Deserialize;
use sluice_selection::OwnPods;
use tokio::time::{Instant, sleep, timeout_at};

use super::Kind;
use super::access::{Access, ConnectError};
use super::client::{Api, Timing};
use super::failure::ApiError;
use super::wire::{List, Metadata, MetadataOnly};

/// No node has this label.
const RETIRED: &str = "sluice-mesh.io/retired";
/// Between two looks, and between two attempts.
const APART: Duration = Duration::from_millis(500);

/// Agents that are being replaced end within this, unless their node does not answer: the grace period of their pods.
const REPLACED: Duration = Duration::from_secs(30);

/// The agent could not be retired.
#[derive(Debug, thiserror::Error)]
pub enum RetireError {
    /// The API server cannot be asked at all.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// It does not answer, or not to us.
    #[error("cannot tell DaemonSet {namespace}/{name} to end")]
    Tell {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// Why.
        #[source]
        source: ApiError,
    },
}

/// How it went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retired {
    /// There was no DaemonSet.
    Nothing,
    /// No pod of it is left.
    Done,
    /// So many nodes had not finished in time, for example because they do not answer.
    Unfinished(i64),
}

/// A DaemonSet, as far as it says where its pods are.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct DaemonSet {
    metadata: Metadata,
    status: Status,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Status {
    observed_generation: i64,
    current_number_scheduled: i64,
    number_misscheduled: i64,
}

impl DaemonSet {
    /// Nodes that still have a pod; `None`: the controller has not looked since the change.
    fn left(&self) -> Option<i64> {
        let status = &self.status;
        (status.observed_generation >= self.metadata.generation)
            .then_some(status.current_number_scheduled + status.number_misscheduled)
    }
}

/// Tells the DaemonSet to want no node any more, and waits up to `wait` for the end of its pods.
pub async fn retire(access: &Access, own: &OwnPods, wait: Duration) -> Result<Retired, RetireError> {
    let api = Api::new(access, Timing::default()).await?;
    let begun = Instant::now();
    let until = begun + wait;
    let failed = |source| RetireError::Tell {
        namespace: own.namespace.clone(),
        name: own.daemon_set.clone(),
        source,
    };
    while Instant::now() < until.min(begun + REPLACED) && is_ending(&api, own).await {
        sleep(APART).await;
    }
    let Some(told) = tell(&api, own, until).await.map_err(failed)? else {
        return Ok(Retired::Nothing);
    };
    let mut left = told.left();
    while left != Some(0) {
        if Instant::now() >= until {
            return Ok(Retired::Unfinished(
                left.unwrap_or(told.status.current_number_scheduled),
            ));
        }
        sleep(APART).await;
        let request = Request::new(collection(own)).get(&own.daemon_set, &GetParams::default());
        match api
            .find::<DaemonSet>("get daemonset", request, api.timing.call)
            .await
        {
            Ok(None) => return Ok(Retired::Done),
            Ok(Some(found)) => left = found.left().or(left),
            Err(error) => tracing::warn!(%error, "cannot look at the DaemonSet"),
        }
    }
    Ok(Retired::Done)
}

/// Whether a pod of it is on its way out. Not known: it is not waited for.
async fn is_ending(api: &Api, own: &OwnPods) -> bool {
    let pods = Request::new(format!("/api/v1/namespaces/{}/pods", own.namespace));
    let request = pods.list_metadata(&ListParams::default());
    match api
        .read::<List<MetadataOnly>>("list own pods", request, api.timing.call)
        .await
    {
        Ok(pods) => pods.items.iter().any(|pod| {
            let MetadataOnly { metadata } = pod;
            metadata.deletion_timestamp.is_some() && own.contains(&own.namespace, &metadata.name)
        }),
        Err(error) => {
            tracing::warn!(%error, "cannot look whether an agent is being replaced");
            false
        }
    }
}

/// Patches it; whatever may pass is tried again until `until`. `None`: there is none.
async fn tell(api: &Api, own: &OwnPods, until: Instant) -> Result<Option<DaemonSet>, ApiError> {
    let body = serde_json::json!({
        "spec": {"template": {"spec": {"nodeSelector": {RETIRED: "true"}}}}
    });
    loop {
        let request = Request::new(collection(own)).patch(
            &own.daemon_set,
            &PatchParams::default(),
            &Patch::Merge(&body),
        );
        let asked = api.find::<DaemonSet>("patch daemonset", request, api.timing.call);
        let error = match timeout_at(until, asked).await {
            Ok(Ok(found)) => return Ok(found),
            Ok(Err(error)) => error,
            Err(_) => ApiError::silent("patch daemonset", api.timing.call),
        };
        let hopeless = matches!(error.kind, Kind::Unauthorized | Kind::Forbidden);
        if hopeless || Instant::now() + APART >= until {
            return Err(error);
        }
        sleep(APART).await;
    }
}

fn collection(own: &OwnPods) -> String {
    format!("/apis/apps/v1/namespaces/{}/daemonsets", own.namespace)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(text: &str) -> Option<i64> {
        serde_json::from_str::<DaemonSet>(text).unwrap().left()
    }

    #[test]
    fn nothing_is_left_once_the_controller_has_looked_and_no_pod_is_anywhere() {
        let set = |status: &str| format!(r#"{{"metadata": {{"generation": 2}}, "status": {status}}}"#);
        assert_eq!(
            left(&set(r#"{"observedGeneration": 1, "currentNumberScheduled": 0}"#)),
            None
        );
        assert_eq!(
            left(&set(r#"{"observedGeneration": 2, "numberMisscheduled": 3}"#)),
            Some(3)
        );
        assert_eq!(
            left(&set(r#"{"observedGeneration": 2, "numberMisscheduled": 0}"#)),
            Some(0)
        );
        assert_eq!(left(&set("{}")), None);
    }
}

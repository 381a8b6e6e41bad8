//! Writes the status annotation: a merge patch of one key through `pods/status`, for the one pod that is meant.
//!
//! The patch carries the UID: the API server refuses it if another pod has taken the name meanwhile
//! (`metadata.uid` cannot change).

use std::time::Instant;

use kube::core::params::{Patch as Body, PatchParams};
use kube::core::request::Request;
use sluice_selection::REDIRECTION_STATUS;
use tokio::task::JoinSet;

use super::Kind;
use super::book::{Book, ENABLED, Patch, Patched};
use super::client::Api;
use super::wire::MetadataOnly;

/// Patches under way at one time.
const AT_ONCE: usize = 4;

/// The place in troubles.
const PLACE: &str = "pods/status";

/// Writes whatever is due, for ever.
pub(super) async fn write(api: Api, book: Book) {
    let mut under_way = JoinSet::new();
    loop {
        let (due, next) = book.due(Instant::now(), AT_ONCE - under_way.len());
        for patch in due {
            let (api, book) = (api.clone(), book.clone());
            under_way.spawn(async move {
                let result = apply(&api, &patch).await;
                book.patched(&patch, result, Instant::now());
            });
        }
        let next = next.unwrap_or_else(|| Instant::now() + std::time::Duration::from_mins(10));
        tokio::select! {
            Some(_) = under_way.join_next() => {}
            () = book.changed(), if under_way.len() < AT_ONCE => {}
            () = tokio::time::sleep_until(next.into()) => {}
        }
    }
}

async fn apply(api: &Api, patch: &Patch) -> Patched {
    let pod = &patch.pod;
    let value = patch.enrolled.then_some(ENABLED);
    let body = serde_json::json!({
        "metadata": {"uid": pod.uid.as_str(), "annotations": {REDIRECTION_STATUS: value}}
    });
    let request = Request::new(format!("/api/v1/namespaces/{}/pods", pod.namespace)).patch_subresource(
        "status",
        pod.name.as_str(),
        &PatchParams::default(),
        &Body::Merge(body),
    );
    let answer = api
        .read::<MetadataOnly>("patch pods/status", request, api.timing.call)
        .await;
    match answer {
        Ok(patched) => {
            api.troubles.over(PLACE);
            tracing::debug!(%pod, enrolled = patch.enrolled, "status annotation written");
            Patched::Done(patched.metadata.version())
        }
        Err(error) if matches!(error.kind, Kind::NotFound | Kind::Conflict) => {
            tracing::debug!(%pod, %error, "status annotation not written: the pod is gone");
            Patched::Gone
        }
        Err(error) => {
            api.troubles.stand(PLACE, &error);
            Patched::Failed(error.wait)
        }
    }
}

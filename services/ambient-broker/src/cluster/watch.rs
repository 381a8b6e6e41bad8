//! One collection, listed and then watched for ever.
//!
//! A watch that ends, breaks or falls silent is begun again at the version it had reached; only when the server no
//! longer has that version (410) is everything listed anew. What the listener had stays as it is meanwhile.
//!
//! The list is a consistent read: one from an API server's cache that lags would take back newer facts, and with them
//! pods out of the mesh. It is not cut into pages where the caller can do without: servers answer it from memory then.

use std::time::Duration;

use futures_util::StreamExt;
use kube::core::WatchEvent;
use kube::core::params::{ListParams, WatchParams};
use kube::core::request::Request;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::Kind;
use super::client::{Api, Built};
use super::failure::ApiError;
use super::pause::Pause;
use super::wire::{List, Object, number};

/// A watch that ended sooner than this did not go well, whatever the server says.
const TOO_SHORT: Duration = Duration::from_secs(1);

/// What is watched.
#[derive(Debug, Clone)]
pub(super) struct Target {
    /// Its name in messages, e.g. `pods`.
    pub(super) what: &'static str,
    /// The collection's path.
    pub(super) path: &'static str,
    /// Which of its objects.
    pub(super) fields: Option<String>,
    /// Only their metadata.
    pub(super) metadata: bool,
    /// Objects in one answer at most; `None`: all.
    pub(super) page: Option<u32>,
}

/// What the listener is told.
#[derive(Debug, Clone)]
pub(super) enum Told<K> {
    /// A list begins: what is not told until [`Told::Listed`] no longer exists.
    Listing,
    /// The list is complete.
    Listed,
    /// Everything up to this version has been told.
    Reached(u64),
    /// The object exists, as it is now.
    Applied(K),
    /// The object is gone; as it was last.
    Deleted(K),
}

/// Nobody listens any more.
struct Unheard;

/// Why a watch ended.
enum End {
    /// The server ended it.
    Closed,
    Failed(ApiError),
    Unheard,
}

impl From<Unheard> for End {
    fn from(_: Unheard) -> Self {
        Self::Unheard
    }
}

impl From<ApiError> for End {
    fn from(error: ApiError) -> Self {
        Self::Failed(error)
    }
}

/// Tells `listener` for as long as it listens.
pub(super) async fn watch<K>(api: Api, target: Target, listener: mpsc::Sender<Told<K>>)
where
    K: Object,
{
    let mut version = None;
    let mut pause = Pause::new(api.timing.retry);
    loop {
        let started = Instant::now();
        let end = match &mut version {
            None => match list(&api, &target, &listener).await {
                Ok(listed) => {
                    version = Some(listed);
                    continue;
                }
                Err(end) => end,
            },
            Some(version) => follow(&api, &target, &listener, version, &mut pause).await,
        };
        let wait = match end {
            End::Unheard => return,
            End::Closed if started.elapsed() < TOO_SHORT => pause.next(),
            End::Closed => continue,
            End::Failed(error) if error.kind == Kind::Gone => {
                tracing::info!(what = target.what, "version too old; listing anew");
                version = None;
                // A server that has no version to watch from must not be listed without end.
                if started.elapsed() < TOO_SHORT {
                    pause.next()
                } else {
                    Duration::ZERO
                }
            }
            End::Failed(error) => {
                api.troubles.stand(target.what, &error);
                pause.next().max(error.wait.unwrap_or_default())
            }
        };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = listener.closed() => return,
        }
    }
}

/// Lists everything; the version that the list is of.
async fn list<K: Object>(
    api: &Api,
    target: &Target,
    listener: &mpsc::Sender<Told<K>>,
) -> Result<String, End> {
    let what = format!("list {}", target.what);
    let request = Request::new(target.path);
    let until = Instant::now() + api.timing.list;
    let mut params = ListParams {
        field_selector: target.fields.clone(),
        limit: target.page,
        ..ListParams::default()
    };
    let mut begun = false;
    loop {
        let built: Built = if target.metadata {
            request.list_metadata(&params)
        } else {
            request.list(&params)
        };
        let left = until.saturating_duration_since(Instant::now());
        let page: List<K> = tokio::select! {
            page = api.read(&what, built, left) => page?,
            () = listener.closed() => return Err(End::Unheard),
        };
        api.troubles.over(target.what);
        // A server that cannot be asked must not look like one without objects.
        if !std::mem::replace(&mut begun, true) {
            tell(listener, Told::Listing).await?;
        }
        for object in page.items {
            tell(listener, Told::Applied(object)).await?;
        }
        let next = page.metadata.next.filter(|next| !next.is_empty());
        if next.is_some() {
            params.continue_token = next;
            continue;
        }
        tell(listener, Told::Listed).await?;
        let version = page.metadata.resource_version;
        tell(listener, Told::Reached(number(&version))).await?;
        return Ok(version);
    }
}

/// Watches from `version` on, which moves along.
async fn follow<K: Object>(
    api: &Api,
    target: &Target,
    listener: &mpsc::Sender<Told<K>>,
    version: &mut String,
    pause: &mut Pause,
) -> End {
    let what = format!("watch {}", target.what);
    let params = WatchParams {
        field_selector: target.fields.clone(),
        timeout: u32::try_from(api.timing.watch.as_secs().max(1)).ok(),
        bookmarks: true,
        ..WatchParams::default()
    };
    let request = Request::new(target.path);
    let built: Built = if target.metadata {
        request.watch_metadata(&params, version)
    } else {
        request.watch(&params, version)
    };
    let mut events = match api.watch::<K>(&what, built).await {
        Ok(events) => std::pin::pin!(events),
        Err(error) => return End::Failed(error),
    };
    api.troubles.over(target.what);
    let silence = api.timing.watch + api.timing.watch_grace;
    loop {
        let event = tokio::select! {
            event = tokio::time::timeout(silence, events.next()) => event,
            () = listener.closed() => return End::Unheard,
        };
        let told = match event {
            Err(_) => return End::Failed(ApiError::silent(&what, silence)),
            Ok(None) => return End::Closed,
            Ok(Some(Err(error))) => return End::Failed(ApiError::new(&what, &error)),
            Ok(Some(Ok(WatchEvent::Error(status)))) => {
                return End::Failed(ApiError::of_status(&what, &status));
            }
            Ok(Some(Ok(WatchEvent::Bookmark(bookmark)))) => {
                version.clone_from(&bookmark.metadata.resource_version);
                Told::Reached(number(version))
            }
            Ok(Some(Ok(WatchEvent::Added(object) | WatchEvent::Modified(object)))) => Told::Applied(object),
            Ok(Some(Ok(WatchEvent::Deleted(object)))) => Told::Deleted(object),
        };
        pause.reset();
        if let Told::Applied(object) | Told::Deleted(object) = &told {
            version.clone_from(&object.metadata().resource_version);
        }
        if tell(listener, told).await.is_err() {
            return End::Unheard;
        }
    }
}

async fn tell<K>(listener: &mpsc::Sender<Told<K>>, told: Told<K>) -> Result<(), Unheard> {
    listener.send(told).await.map_err(|_| Unheard)
}

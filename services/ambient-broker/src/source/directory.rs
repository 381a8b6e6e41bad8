//! Pods and namespaces from a directory of ordinary manifests, as the kubelet takes static pods.
//!
//! Every `*.yaml`, `*.yml` and `*.json` file in the directory itself (not below, not hidden) holds Pods, Namespaces or
//! Lists of them. A pod whose namespace has no manifest is decided as if its namespace had no labels, unless there is a
//! file that was never valid: it may be the namespace's. All pods of the
//! directory count as this node's, whatever their `spec.nodeName`.
//!
//! A file that is renamed into place is read at once; one that is written in place when its writer closes it. A bad file
//! is reported and changes nothing: its last good objects stay until it is mended or removed.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc as wake};
use std::task::{Context, Poll};

use futures_util::future::BoxFuture;
use futures_util::stream::{BoxStream, Stream};
use tokio::sync::mpsc;

use super::scan::{Files, Scope};
use super::watch::{Wake, Watch};
use super::{Lookup, PodSource, SourceError, SourceEvent};

/// Events a slow reader may be behind; then the watching thread waits.
const QUEUE: usize = 256;

/// How changes are noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WatchMode {
    /// By inotify; where that is not to be had, by looking twice a second until it is.
    #[default]
    Auto,
    /// By looking twice a second, for file systems that announce nothing.
    Poll,
}

/// A directory of manifests.
#[derive(Debug, Clone)]
pub struct ManifestDirectory {
    files: Arc<Mutex<Files>>,
    mode: WatchMode,
}

impl ManifestDirectory {
    /// A directory that may not exist yet. Nothing is read before [`PodSource::events`] or [`PodSource::lookup`].
    pub fn new(path: impl Into<PathBuf>, mode: WatchMode) -> Self {
        Self {
            files: Arc::new(Mutex::new(Files::new(path.into()))),
            mode,
        }
    }
}

impl PodSource for ManifestDirectory {
    fn events(&self) -> BoxStream<'static, SourceEvent> {
        let (sender, receiver) = mpsc::channel(QUEUE);
        let (waker, wakes) = wake::channel();
        let watch = Watch::new(
            Arc::clone(&self.files),
            self.mode,
            sender.clone(),
            waker.clone(),
            wakes,
        );
        let spawned = std::thread::Builder::new()
            .name("manifests".into())
            .spawn(move || watch.run());
        if let Err(error) = spawned {
            let problem =
                lock(&self.files).directory_problem(format!("cannot be watched: no thread: {error}"));
            // The channel is new and has room.
            let _ = sender.try_send(SourceEvent::Problem(problem));
        }
        Box::pin(Events { receiver, waker })
    }

    fn lookup<'a>(&'a self, namespace: &'a str, name: &'a str) -> BoxFuture<'a, Result<Lookup, SourceError>> {
        let files = Arc::clone(&self.files);
        Box::pin(async move {
            let view = tokio::task::spawn_blocking(move || {
                let mut files = lock(&files);
                let scanned = files.scan(&Scope {
                    settle: true,
                    eager: true,
                    ..Scope::default()
                });
                let path = files.directory().display().to_string();
                scanned
                    .map(|()| {
                        let mut view = files.view();
                        view.undetermined |= files.is_being_written();
                        view
                    })
                    .map_err(|source| SourceError::Directory { path, source })
            });
            let view = view.await.map_err(|_| SourceError::Stopped)??;
            Ok(Lookup {
                pod: view.pod(namespace, name),
                namespace: view.namespace(namespace),
                undetermined: view.undetermined,
            })
        })
    }
}

/// The files, also after another thread panicked: a scan leaves them whole at every step.
pub(super) fn lock(files: &Mutex<Files>) -> MutexGuard<'_, Files> {
    files.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The reader's end. Ends the watching thread when dropped.
struct Events {
    receiver: mpsc::Receiver<SourceEvent>,
    waker: wake::Sender<Wake>,
}

impl Stream for Events {
    type Item = SourceEvent;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<SourceEvent>> {
        self.receiver.poll_recv(context)
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        // The thread may have ended before.
        let _ = self.waker.send(Wake::Stop);
    }
}

//! Tells when something may have changed on the node. It may tell too often; what it misses, the regular look sees.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use notify::event::{AccessKind, AccessMode, EventKind};
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::Notify;

use crate::files::is_temporary;

/// The regular look.
pub(crate) const LOOK: Duration = Duration::from_secs(2);

/// Watches directories.
#[derive(Debug)]
pub(crate) struct Watch {
    watcher: Option<RecommendedWatcher>,
    /// Which inode is watched under which path; a directory may be replaced by another.
    watched: HashMap<PathBuf, (u64, u64)>,
    wake: Arc<Notify>,
    poll: bool,
    complained: bool,
}

impl Watch {
    pub(crate) fn new(wake: Arc<Notify>, poll: bool) -> Self {
        Self {
            watcher: None,
            watched: HashMap::new(),
            wake,
            poll,
            complained: false,
        }
    }

    /// Watches exactly these directories from now on, as far as they exist. Gives why not all are watched.
    pub(crate) fn arm(&mut self, directories: &[PathBuf]) -> Option<String> {
        if self.poll {
            return None;
        }
        let problem = self.try_arm(directories).err().map(|error| error.to_string());
        if let Some(error) = &problem
            && !self.complained
        {
            let seconds = LOOK.as_secs();
            tracing::warn!(
                error,
                seconds,
                "cannot watch; looking regularly instead (fs.inotify limits may be exhausted)"
            );
        }
        self.complained = problem.is_some();
        problem
    }

    fn try_arm(&mut self, directories: &[PathBuf]) -> notify::Result<()> {
        let wake = self.wake.clone();
        let watcher = match &mut self.watcher {
            Some(watcher) => watcher,
            none => none.insert(notify::recommended_watcher(
                move |event: notify::Result<notify::Event>| {
                    if event.is_ok_and(|event| !matters(&event)) {
                        return;
                    }
                    wake.notify_one();
                },
            )?),
        };
        self.watched.retain(|path, _| {
            let wanted = directories.contains(path);
            if !wanted {
                let _ = watcher.unwatch(path);
            }
            wanted
        });
        for path in directories {
            let Some(identity) = identity(path) else {
                if self.watched.remove(path).is_some() {
                    let _ = watcher.unwatch(path);
                }
                continue;
            };
            if self.watched.get(path) == Some(&identity) {
                continue;
            }
            if self.watched.remove(path).is_some() {
                let _ = watcher.unwatch(path);
            }
            watcher.watch(path, RecursiveMode::NonRecursive)?;
            self.watched.insert(path.clone(), identity);
        }
        Ok(())
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

/// Reading changes nothing (we read, too), and what we are only about to publish matters once it is published.
fn matters(event: &notify::Event) -> bool {
    let reading = matches!(
        event.kind,
        EventKind::Access(
            AccessKind::Open(_)
                | AccessKind::Read
                | AccessKind::Close(AccessMode::Read | AccessMode::Execute)
        )
    );
    let ours = !event.paths.is_empty()
        && event
            .paths
            .iter()
            .all(|path| path.file_name().is_some_and(is_temporary));
    !reading && !ours
}

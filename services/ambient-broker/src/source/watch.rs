//! The thread that notices changes in the directory and tells them.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, mpsc as wake};
use std::time::{Duration, Instant};

use notify::event::{AccessKind, AccessMode, CreateKind, EventKind, ModifyKind, RenameMode};
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::mpsc;

use super::diff::View;
use super::directory::{WatchMode, lock};
use super::scan::{Files, Scope, is_manifest_name};
use super::{Problem, SourceEvent};

/// How often the directory is looked at without inotify. A change counts when it is seen twice.
const POLL: Duration = Duration::from_millis(500);

/// How often it is looked at with inotify, for what that does not tell: targets of links, network file systems.
const RESCAN: Duration = Duration::from_secs(5);

/// How often inotify is tried again.
const RETRY: Duration = Duration::from_secs(2);

/// A file that is being written is left alone until it is closed, or until nobody wrote to it for this long.
const WRITING: Duration = Duration::from_secs(1);

/// A file that appeared without a write is a link, which nobody closes, unless a write follows within this time.
const LINKED: Duration = Duration::from_millis(20);

/// Why the thread wakes up.
#[derive(Debug)]
pub(super) enum Wake {
    /// Something happened in the directory.
    Event(notify::Result<notify::Event>),
    /// Nobody listens any more.
    Stop,
}

/// Nobody listens any more.
struct Stopped;

/// The state of the thread.
pub(super) struct Watch {
    files: Arc<Mutex<Files>>,
    mode: WatchMode,
    sender: mpsc::Sender<SourceEvent>,
    waker: wake::Sender<Wake>,
    wakes: wake::Receiver<Wake>,
    /// Dropped, it stops watching.
    watcher: Option<RecommendedWatcher>,
    /// Device and inode of the directory that is watched.
    watched: Option<(u64, u64)>,
    /// When inotify is tried next, while there is none.
    retry_at: Instant,
    /// When the directory is looked at next, whatever happens.
    rescan_at: Instant,
    /// Why there is no inotify.
    degraded: Option<Problem>,
    /// Files that are being written, and when to stop believing it.
    busy: BTreeMap<OsString, Instant>,
    /// Files to read at the next scan.
    touched: BTreeSet<OsString>,
    /// Files that were removed or moved away. If another one is there at the next scan, its own events say when to read it.
    removed: BTreeSet<OsString>,
    /// What happened cannot be put down to single files: look at all.
    look_at_all: bool,
    told: View,
    synced: bool,
}

impl Watch {
    pub(super) fn new(
        files: Arc<Mutex<Files>>,
        mode: WatchMode,
        sender: mpsc::Sender<SourceEvent>,
        waker: wake::Sender<Wake>,
        wakes: wake::Receiver<Wake>,
    ) -> Self {
        let now = Instant::now();
        Self {
            files,
            mode,
            sender,
            waker,
            wakes,
            watcher: None,
            watched: None,
            retry_at: now,
            rescan_at: now,
            degraded: None,
            busy: BTreeMap::new(),
            touched: BTreeSet::new(),
            removed: BTreeSet::new(),
            look_at_all: true,
            told: View::default(),
            synced: false,
        }
    }

    /// Tells what exists, then what changes, until nobody listens.
    pub(super) fn run(mut self) {
        // The watch stands before the first look, so that nothing falls between the two.
        self.watch();
        if self.scan(false).is_err() {
            return;
        }
        while let Ok(full) = self.wait() {
            if self.watcher.is_none() && Instant::now() >= self.retry_at {
                self.watch();
            }
            // An event says that a file is whole; without one only its not changing does.
            if self.scan(full && self.synced).is_err() {
                return;
            }
        }
    }

    /// Waits until something is to be read. `true`: by the clock, not by an event.
    fn wait(&mut self) -> Result<bool, Stopped> {
        loop {
            let due = self
                .busy
                .values()
                .min()
                .map_or(self.rescan_at, |busy| self.rescan_at.min(*busy));
            let mut changed = match self
                .wakes
                .recv_timeout(due.saturating_duration_since(Instant::now()))
            {
                Ok(Wake::Event(event)) => self.note(event),
                Err(wake::RecvTimeoutError::Timeout) => false,
                Ok(Wake::Stop) | Err(wake::RecvTimeoutError::Disconnected) => return Err(Stopped),
            };
            while let Ok(wake) = self.wakes.try_recv() {
                match wake {
                    Wake::Event(event) => changed |= self.note(event),
                    Wake::Stop => return Err(Stopped),
                }
            }
            let now = Instant::now();
            let expired: Vec<OsString> = self
                .busy
                .iter()
                .filter(|(_, until)| **until <= now)
                .map(|(name, _)| name.clone())
                .collect();
            for name in expired {
                self.busy.remove(&name);
                self.touched.insert(name);
                changed = true;
            }
            if changed {
                return Ok(false);
            }
            if self.rescan_at <= now {
                self.check_directory();
                self.look_at_all = true;
                return Ok(true);
            }
        }
    }

    /// Takes an event in. `true`: something is to be read now.
    fn note(&mut self, event: notify::Result<notify::Event>) -> bool {
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                self.lose_watch(&error.to_string());
                return true;
            }
        };
        if event.need_rescan() {
            self.busy.clear();
            self.look_at_all = true;
            return true;
        }
        let directory = lock(&self.files).directory().to_owned();
        let mut changed = false;
        for path in &event.paths {
            if *path == directory {
                if matches!(
                    event.kind,
                    EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(_))
                ) {
                    self.lose_watch("it was moved or removed");
                    changed = true;
                }
            } else if let Some(name) = path.file_name() {
                let found = path.symlink_metadata().ok();
                changed |= self.note_file(name.to_owned(), event.kind, found.as_ref());
            }
        }
        changed
    }

    /// `found`: what is there by now, which may be more than the event is about.
    fn note_file(&mut self, name: OsString, kind: EventKind, found: Option<&Metadata>) -> bool {
        if !is_manifest_name(&name) {
            // A volume's files are links through a hidden directory link, which is what gets replaced.
            let replaced = matches!(
                kind,
                EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(RenameMode::To | RenameMode::Both))
            );
            let replaced = replaced && name.as_encoded_bytes().starts_with(b"..");
            self.look_at_all |= replaced;
            return replaced;
        }
        match kind {
            // A name that moved is told of on its own, with what it was moved from or to.
            EventKind::Create(CreateKind::Folder)
            | EventKind::Access(AccessKind::Open(_))
            | EventKind::Modify(ModifyKind::Name(RenameMode::Both)) => false,
            EventKind::Create(_) => {
                let empty = found.is_some_and(|found| found.is_file() && found.len() == 0);
                let patience = if empty { WRITING } else { LINKED };
                self.busy.insert(name, Instant::now() + patience);
                false
            }
            EventKind::Modify(ModifyKind::Data(_) | ModifyKind::Any) => {
                self.busy.insert(name, Instant::now() + WRITING);
                false
            }
            // Attributes change in the middle of a write as well.
            EventKind::Modify(ModifyKind::Metadata(_)) if self.busy.contains_key(&name) => false,
            EventKind::Modify(ModifyKind::Metadata(_)) => {
                self.touched.insert(name);
                true
            }
            EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(RenameMode::From)) => {
                self.busy.remove(&name);
                self.removed.insert(name);
                true
            }
            EventKind::Access(AccessKind::Close(AccessMode::Write))
            | EventKind::Modify(ModifyKind::Name(_)) => {
                self.busy.remove(&name);
                self.touched.insert(name);
                true
            }
            _ => false,
        }
    }

    /// Reads what is to be read and tells what came of it.
    fn scan(&mut self, settle: bool) -> Result<(), Stopped> {
        let touched = std::mem::take(&mut self.touched);
        let look_at_all = std::mem::take(&mut self.look_at_all);
        let (view, readable) = {
            let mut files = lock(&self.files);
            for name in std::mem::take(&mut self.removed) {
                files.forget_if_gone(&name);
            }
            files.set_busy(self.busy.keys().cloned().collect());
            let scanned = files.scan(&Scope {
                touched: Some(&touched),
                only_touched: !look_at_all,
                settle,
                eager: false,
            });
            let mut view = files.view();
            if let (Ok(()), Some(problem)) = (&scanned, &self.degraded) {
                view.report(problem.clone());
            }
            (view, scanned.is_ok())
        };
        if look_at_all {
            self.rescan_at = Instant::now() + if self.watcher.is_some() { RESCAN } else { POLL };
        }
        let mut events = self.told.changes(&view);
        self.told = view;
        // Before the directory could be read once, "nothing exists" would be a guess that takes pods out of the mesh.
        if readable && !self.synced {
            self.synced = true;
            events.push(SourceEvent::Synced);
        }
        events
            .into_iter()
            .try_for_each(|event| self.sender.blocking_send(event).map_err(|_| Stopped))
    }

    fn watch(&mut self) {
        self.retry_at = Instant::now() + RETRY;
        if self.mode == WatchMode::Poll {
            return;
        }
        let directory = lock(&self.files).directory().to_owned();
        let waker = self.waker.clone();
        let forward = move |event: notify::Result<notify::Event>| {
            let ours = |kind| {
                matches!(
                    kind,
                    EventKind::Access(AccessKind::Open(_) | AccessKind::Close(AccessMode::Read))
                )
            };
            // Our own reads are events too. The receiver is gone when the thread ends, which drops the watcher.
            if !event.as_ref().is_ok_and(|event| ours(event.kind)) {
                let _ = waker.send(Wake::Event(event));
            }
        };
        let watcher = RecommendedWatcher::new(forward, notify::Config::default()).and_then(|mut watcher| {
            watcher.watch(&directory, RecursiveMode::NonRecursive)?;
            Ok(watcher)
        });
        match watcher {
            Ok(watcher) => {
                self.watcher = Some(watcher);
                self.look_at_all = true;
                self.watched = identity(&directory);
                self.degraded = None;
            }
            Err(error) => self.lose_watch(&explain(&error)),
        }
    }

    fn lose_watch(&mut self, why: &str) {
        self.watcher = None;
        self.watched = None;
        self.look_at_all = true;
        // Nobody will tell when these are closed.
        self.busy.clear();
        let message = format!(
            "changes are not announced ({why}); looked at every {} ms instead",
            POLL.as_millis()
        );
        self.degraded = Some(lock(&self.files).directory_problem(message));
    }

    /// The path can come to mean another directory without any event: a link or a mount on the way to it.
    fn check_directory(&mut self) {
        let directory = lock(&self.files).directory().to_owned();
        if self.watcher.is_some() && identity(&directory) != self.watched {
            self.lose_watch("it was replaced");
            self.retry_at = Instant::now();
        }
    }
}

fn identity(directory: &Path) -> Option<(u64, u64)> {
    std::fs::metadata(directory)
        .ok()
        .map(|meta| (meta.dev(), meta.ino()))
}

fn explain(error: &notify::Error) -> String {
    match &error.kind {
        notify::ErrorKind::MaxFilesWatch => "the limit fs.inotify.max_user_watches is reached".into(),
        notify::ErrorKind::Io(io) if io.raw_os_error() == Some(nix::libc::EMFILE) => {
            "the limit fs.inotify.max_user_instances or of open files is reached".into()
        }
        notify::ErrorKind::Io(io) => io.to_string(),
        _ => error.to_string(),
    }
}

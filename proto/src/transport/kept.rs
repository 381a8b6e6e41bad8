//! A listener whose socket is found again by whoever connects by its path, after somebody has removed the file.
//!
//! An agent whose place was taken removes its sockets by their paths when it ends, and by then they are ours.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::uds::{BindError, bind_stream};

/// Between two looks whether the file is still there.
pub const LOOK: Duration = Duration::from_secs(1);

/// Whether nothing is at `path` any more. What else may be wrong with it is not known to be our loss.
pub fn is_gone(path: &Path) -> bool {
    path.symlink_metadata()
        .is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
}

/// A stream listener that is made again within [`LOOK`] if its file is removed. A file that replaces it is left alone: another process
/// has taken the place.
#[derive(Debug)]
pub struct KeptListener {
    path: PathBuf,
    mode: u32,
    listener: UnixListener,
    look: Interval,
    /// That it could not be made again has been told.
    told: bool,
}

impl KeptListener {
    /// Binds at `path` with `mode`. Call it inside a tokio runtime.
    pub fn bind(path: &Path, mode: u32) -> Result<Self, BindError> {
        let listener = bind_stream(path, mode, None)?;
        let mut look = interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Ok(Self {
            path: path.to_owned(),
            mode,
            listener,
            look,
            told: false,
        })
    }

    /// The next connection. Nothing is lost if the future is dropped.
    pub async fn accept(&mut self) -> std::io::Result<UnixStream> {
        loop {
            tokio::select! {
                accepted = self.listener.accept() => return accepted.map(|(stream, _)| stream),
                _ = self.look.tick() => self.look_after(),
            }
        }
    }

    fn look_after(&mut self) {
        if !is_gone(&self.path) {
            return;
        }
        let path = self.path.display();
        match bind_stream(&self.path, self.mode, None) {
            Ok(listener) => {
                self.listener = listener;
                self.told = false;
                tracing::warn!(%path, "a socket was removed; made it again");
            }
            Err(error) if !self.told => {
                self.told = true;
                tracing::warn!(%path, error = %error.source, "a socket was removed and cannot be made again; trying on");
            }
            Err(_) => {}
        }
    }
}

//! Traffic for tests and the demo: an application that tells which address it sees ([`server`]), requests and steady
//! load ([`client`]), one connection that is kept ([`connection`]), DNS ([`dns`]).

pub mod client;
pub mod connection;
pub mod dns;
pub mod server;

use std::io;
use std::thread::JoinHandle;

use tokio::sync::watch;

use crate::netns::{Netns, Place};

/// A single-threaded runtime on a thread inside a netns: every socket made on it belongs to that netns. The thread
/// keeps the netns alive until it is stopped.
#[derive(Debug)]
pub(crate) struct Worker<T> {
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<T>>,
}

impl<T: Send + 'static> Worker<T> {
    /// Starts `main`, which must end soon after the receiver turns true.
    pub(crate) fn start<F, R>(netns: &Netns, name: &str, main: F) -> io::Result<Self>
    where
        F: FnOnce(watch::Receiver<bool>) -> R + Send + 'static,
        R: Future<Output = T>,
    {
        let (stop, stopped) = watch::channel(false);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let thread = Place::from(netns).spawn(name, move || runtime.block_on(main(stopped)))?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }

    /// Stops it and gives what `main` returned; `None` if it panicked.
    pub(crate) fn stop(mut self) -> Option<T> {
        self.end()
    }
}

impl<T> Worker<T> {
    fn end(&mut self) -> Option<T> {
        self.stop.send_replace(true);
        self.thread.take()?.join().ok()
    }
}

impl<T> Drop for Worker<T> {
    fn drop(&mut self) {
        self.end();
    }
}

//! One thread that closes namespaces. The last close of a netfilter socket can wait for an RCU grace period
//! (11 to 45 ms) when deletions of its namespace have not been freed yet; nobody should wait for that.

use std::any::Any;
use std::sync::mpsc::{Sender, channel};

/// Takes things to drop.
#[derive(Debug, Clone)]
pub struct Reaper {
    queue: Sender<Box<dyn Any + Send>>,
}

impl Reaper {
    /// Starts the thread; it ends with the last clone.
    pub fn start() -> std::io::Result<Self> {
        let (queue, things) = channel::<Box<dyn Any + Send>>();
        std::thread::Builder::new()
            .name("reaper".into())
            .stack_size(64 * 1024)
            .spawn(move || things.into_iter().for_each(drop))?;
        Ok(Self { queue })
    }

    /// Drops `thing` soon, elsewhere.
    pub fn close(&self, thing: impl Any + Send) {
        // If the thread is gone, the thing comes back in the error and is dropped here.
        let _ = self.queue.send(Box::new(thing));
    }
}

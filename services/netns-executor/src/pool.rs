//! Blocking work off the reactor: netlink calls take up to half a millisecond, more when somebody else holds the
//! namespace's nftables lock. The runtime is built with [`THREADS`] of them.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use sluice_proto::code::ErrorCode;
use sluice_proto::sandbox::Failure;

/// Two calls at a time, and one that hangs; more only fight for the same cores.
pub const THREADS: usize = 3;
/// A call that takes longer than this makes the health probe fail.
pub const STUCK: Duration = Duration::from_secs(10);
/// Name of this process in failures.
pub const COMPONENT: &str = "netns-executor";

static RUNNING: AtomicUsize = AtomicUsize::new(0);
static FINISHED: AtomicU64 = AtomicU64::new(0);

/// Runs `work` on the pool. A panic in it becomes a failure of `stage`.
pub async fn run<T: Send + 'static>(
    stage: &'static str,
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    RUNNING.fetch_add(1, Ordering::Relaxed);
    let outcome = tokio::task::spawn_blocking(work).await;
    RUNNING.fetch_sub(1, Ordering::Relaxed);
    FINISHED.fetch_add(1, Ordering::Relaxed);
    outcome.unwrap_or_else(|error| {
        let cause = format!("bug: the work did not end: {error}");
        Err(Failure::new(ErrorCode::Unknown, COMPONENT, stage, cause))
    })
}

/// Notices that nothing on the pool has finished for a while although something runs.
#[derive(Debug)]
pub struct Watchdog {
    finished: u64,
    since: Instant,
}

impl Default for Watchdog {
    fn default() -> Self {
        Self {
            finished: 0,
            since: Instant::now(),
        }
    }
}

impl Watchdog {
    /// How long the pool has been busy without finishing anything, if longer than [`STUCK`].
    pub fn stuck(&mut self) -> Option<Duration> {
        let finished = FINISHED.load(Ordering::Relaxed);
        if finished != self.finished || RUNNING.load(Ordering::Relaxed) == 0 {
            self.finished = finished;
            self.since = Instant::now();
        }
        Some(self.since.elapsed()).filter(|busy| *busy > STUCK)
    }
}

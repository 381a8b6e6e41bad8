//! Blocking work off the reactor: netlink calls take up to half a millisecond, more when somebody else holds the
//! namespace's nftables lock. The runtime is built with [`THREADS`] of them.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sluice_proto::code::ErrorCode;
use sluice_proto::sandbox::Failure;

/// Two calls at a time, and one that hangs; more only fight for the same cores.
pub const THREADS: usize = 3;
/// Name of this process in failures.
pub const COMPONENT: &str = "netns-executor";

/// Calls that have not finished, by number: when they were asked for.
static RUNNING: Mutex<Running> = Mutex::new(Running {
    last: 0,
    since: BTreeMap::new(),
});

struct Running {
    last: u64,
    since: BTreeMap<u64, Instant>,
}

fn running() -> MutexGuard<'static, Running> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One call; finished when dropped.
struct Call(u64);

impl Call {
    fn begin() -> Self {
        let mut running = running();
        running.last += 1;
        let number = running.last;
        running.since.insert(number, Instant::now());
        Self(number)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        running().since.remove(&self.0);
    }
}

/// How long the oldest call that has not finished has been at work, or has waited for a thread. A caller that no longer
/// waits for it makes no difference: the call still holds a thread.
pub fn oldest_call() -> Option<Duration> {
    // Numbers grow with time.
    running().since.values().next().map(Instant::elapsed)
}

/// Runs `work` on the pool. A panic in it becomes a failure of `stage`.
pub async fn run<T: Send + 'static>(
    stage: &'static str,
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let call = Call::begin();
    let outcome = tokio::task::spawn_blocking(move || {
        let _call = call;
        work()
    })
    .await;
    outcome.unwrap_or_else(|error| {
        let cause = format!("bug: the work did not end: {error}");
        Err(Failure::new(ErrorCode::Unknown, COMPONENT, stage, cause))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_call_that_hangs_is_seen_although_others_finish_and_nobody_waits_for_it() {
        let (release, released) = std::sync::mpsc::channel::<()>();
        let hanging = tokio::spawn(run("hang", move || {
            let _ = released.recv();
            Ok(())
        }));
        let limit = Duration::from_millis(50);
        let is_stuck = || oldest_call().is_some_and(|age| age > limit);
        let deadline = Instant::now() + Duration::from_secs(10);
        while !is_stuck() {
            run("another", || Ok(())).await.unwrap();
            assert!(Instant::now() < deadline, "not seen");
        }
        hanging.abort();
        let _ = hanging.await;
        assert!(is_stuck(), "the thread is still held");
        drop(release);
        while is_stuck() {
            tokio::task::yield_now().await;
            assert!(Instant::now() < deadline, "still there");
        }
    }

    #[tokio::test]
    async fn a_panic_is_a_failure_of_its_stage() {
        let failed = run("a stage", || -> Result<(), Failure> { panic!("made to") }).await;
        let failure = failed.unwrap_err();
        assert_eq!(failure.stage, "a stage");
        assert!(failure.cause.contains("bug"), "{failure}");
    }
}

//! Waiting for a condition, with a deadline.

use std::time::{Duration, Instant};

/// The condition did not come true in time.
#[derive(Debug, thiserror::Error)]
#[error("{what}: not within {within:?}")]
pub struct TimedOut {
    what: String,
    within: Duration,
}

/// Polls `condition` until it gives a value; first at once, then every 0.2 ms, growing to 10 ms.
pub fn poll_until<T>(
    what: &str,
    within: Duration,
    condition: impl FnMut() -> Option<T>,
) -> Result<T, TimedOut> {
    poll_sparsely(what, within, Duration::from_millis(10), condition)
}

/// [`poll_until`], where each look takes something from what is looked at: the pause grows to `longest_pause`.
pub fn poll_sparsely<T>(
    what: &str,
    within: Duration,
    longest_pause: Duration,
    mut condition: impl FnMut() -> Option<T>,
) -> Result<T, TimedOut> {
    let deadline = Instant::now() + within;
    let mut pause = Duration::from_micros(200);
    loop {
        if let Some(value) = condition() {
            return Ok(value);
        }
        if Instant::now() >= deadline {
            return Err(TimedOut {
                what: what.to_owned(),
                within,
            });
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(longest_pause);
    }
}

/// [`poll_until`] for a plain yes or no.
pub fn poll_true(what: &str, within: Duration, mut condition: impl FnMut() -> bool) -> Result<(), TimedOut> {
    poll_until(what, within, || condition().then_some(()))
}

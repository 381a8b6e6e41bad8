//! Pauses between attempts: doubled each time, with jitter, so that a thousand nodes do not come back at once.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::Duration;

/// The pauses of one thing that is attempted again and again.
#[derive(Debug)]
pub(super) struct Pause {
    first: Duration,
    longest: Duration,
    attempts: u32,
}

impl Pause {
    pub(super) fn new((first, longest): (Duration, Duration)) -> Self {
        Self {
            first,
            longest,
            attempts: 0,
        }
    }

    /// It worked.
    pub(super) fn reset(&mut self) {
        self.attempts = 0;
    }

    /// It did not; how long to wait.
    pub(super) fn next(&mut self) -> Duration {
        let full = self
            .first
            .saturating_mul(1 << self.attempts.min(16))
            .min(self.longest);
        self.attempts = self.attempts.saturating_add(1);
        spread(full)
    }
}

/// Between half of `full` and all of it.
pub(super) fn spread(full: Duration) -> Duration {
    full / 2 + full / 2 * u32::try_from(random() % 1024).unwrap_or(0) / 1024
}

/// A number that is another one on every node. Each `RandomState` has other keys; nothing here needs better randomness.
pub(super) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_the_longest_and_begin_anew() {
        let (first, longest) = (Duration::from_millis(100), Duration::from_secs(1));
        let mut pause = Pause::new((first, longest));
        for factor in [1, 2, 4, 8, 10, 10] {
            let wait = pause.next();
            let full = first * factor;
            assert!(wait >= full / 2 && wait <= full, "{wait:?} of {full:?}");
        }
        pause.reset();
        assert!(pause.next() <= first);
    }
}

//! Growing pauses with jitter between attempts.

use std::time::{Duration, Instant};

/// A small generator for jitter (xorshift64*): spreads retries, protects nothing.
#[derive(Debug)]
pub(super) struct Jitter(u64);

impl Jitter {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// Between three quarters and five quarters of `pause`.
    pub(super) fn spread(&mut self, pause: Duration) -> Duration {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let thousandth = u32::try_from(self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 54).unwrap_or(0);
        pause * (768 + thousandth / 2) / 1024
    }
}

/// Attempts that failed in a row, and when the next may start.
#[derive(Debug, Clone, Default)]
pub(super) struct Backoff {
    attempts: u32,
    at: Option<Instant>,
}

impl Backoff {
    /// Counts a failure; the pause starts at `first` and doubles up to `longest`.
    pub(super) fn failed(&mut self, now: Instant, first: Duration, longest: Duration, jitter: &mut Jitter) {
        let pause = first.saturating_mul(1 << self.attempts.min(16)).min(longest);
        self.attempts = self.attempts.saturating_add(1);
        self.at = Some(now + jitter.spread(pause));
    }

    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }

    /// Stops waiting, without forgetting how often it failed.
    pub(super) fn hurry(&mut self) {
        self.at = None;
    }

    /// Whether the next attempt may start.
    pub(super) fn ready(&self, now: Instant) -> bool {
        self.at.is_none_or(|at| at <= now)
    }

    /// When the next attempt may start, if that is still to come.
    pub(super) fn wake(&self, now: Instant) -> Option<Instant> {
        self.at.filter(|at| *at > now)
    }

    pub(super) fn attempts(&self) -> u32 {
        self.attempts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_are_spread() {
        let start = Instant::now();
        let (first, longest) = (Duration::from_millis(5), Duration::from_secs(5));
        let mut jitter = Jitter::new(7);
        let mut backoff = Backoff::default();
        assert!(backoff.ready(start));
        let mut expected = first;
        for _ in 0..20 {
            backoff.failed(start, first, longest, &mut jitter);
            let pause = backoff.wake(start).unwrap() - start;
            assert!(
                pause >= expected * 3 / 4 && pause <= expected * 5 / 4,
                "{pause:?}"
            );
            expected = (expected * 2).min(longest);
        }
        assert!(!backoff.ready(start + Duration::from_millis(1)));
        assert!(backoff.ready(start + longest * 2));
    }
}

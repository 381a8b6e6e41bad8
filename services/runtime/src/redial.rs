//! How long to wait between attempts to reach another service of the same node.

use std::time::{Duration, Instant};

/// The pause between two attempts at first. Short, because pods wait for the services to find each other.
const FIRST: Duration = Duration::from_millis(5);
/// The services of a node are started together, in an order that nobody promises: so long each of them may be there at
/// any instant.
const TOGETHER: Duration = Duration::from_secs(1);

/// Pauses between attempts: short for a second, then each twice as long as the one before.
#[derive(Debug, Clone)]
pub struct Redial {
    longest: Duration,
    pause: Duration,
    since: Option<Instant>,
}

impl Redial {
    /// Pauses grow up to `longest`.
    pub fn new(longest: Duration) -> Self {
        Self {
            longest,
            pause: FIRST,
            since: None,
        }
    }

    /// How long to wait after an attempt that failed at `now`.
    pub fn failed(&mut self, now: Instant) -> Duration {
        let since = *self.since.get_or_insert(now);
        if now.saturating_duration_since(since) >= TOGETHER {
            self.pause = (self.pause * 2).min(self.longest);
        }
        self.pause
    }

    /// An attempt succeeded: what fails next is the first one again.
    pub fn reset(&mut self) {
        self.pause = FIRST;
        self.since = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_are_short_for_a_second_and_then_double_until_somebody_answers() {
        let longest = Duration::from_millis(100);
        let mut redial = Redial::new(longest);
        let mut now = Instant::now();
        let began = now;
        let mut pauses = Vec::new();
        for _ in 0..210 {
            let pause = redial.failed(now);
            pauses.push((now - began, pause));
            now += pause;
        }
        let (early, late): (Vec<_>, Vec<_>) = pauses.iter().partition(|(at, _)| *at < TOGETHER);
        assert_eq!(early.len(), 200);
        assert!(early.iter().all(|(_, pause)| *pause == FIRST), "{early:?}");
        let late: Vec<_> = late.iter().map(|(_, pause)| pause.as_millis()).collect();
        assert_eq!(late, [10, 20, 40, 80, 100, 100, 100, 100, 100, 100]);

        redial.reset();
        assert_eq!(redial.failed(now), FIRST);
    }
}

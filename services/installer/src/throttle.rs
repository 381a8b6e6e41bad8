//! How often the network configuration is written: five times at once, then once a second. A peer that undoes every
//! change at once is then told of instead of fought with.

use std::time::{Duration, Instant};

/// Writes that may follow each other at once.
const BURST: u32 = 5;
/// Then one in this time.
const PAUSE: Duration = Duration::from_secs(1);

/// A bucket of permissions.
#[derive(Debug)]
pub(crate) struct Throttle {
    left: u32,
    /// Since when the next permission is on its way.
    since: Instant,
    fought: bool,
}

impl Throttle {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            left: BURST,
            since: now,
            fought: false,
        }
    }

    /// Takes a permission, or says how long until there is one.
    pub(crate) fn take(&mut self, now: Instant) -> Result<(), Duration> {
        self.refill(now);
        if self.left == 0 {
            self.fought = true;
            return Err(PAUSE.saturating_sub(now.saturating_duration_since(self.since)));
        }
        if self.left == BURST {
            self.since = now;
        }
        self.left -= 1;
        Ok(())
    }

    /// Somebody undoes what is written: the permissions ran out and are not all back yet.
    pub(crate) fn fought(&mut self, now: Instant) -> bool {
        self.refill(now);
        self.fought &= self.left < BURST;
        self.fought
    }

    fn refill(&mut self, now: Instant) {
        while self.left < BURST && now.saturating_duration_since(self.since) >= PAUSE {
            self.left += 1;
            self.since += PAUSE;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fight_of_a_minute_costs_five_writes_and_one_a_second() {
        let start = Instant::now();
        let mut throttle = Throttle::new(start);
        let written = (0..3000)
            .filter(|step| throttle.take(start + Duration::from_millis(20) * *step).is_ok())
            .count();
        assert_eq!(written, 5 + 59);
        let end = start + Duration::from_mins(1);
        assert!(throttle.fought(end));
        assert!(throttle.fought(end + Duration::from_secs(3)));
        assert!(!throttle.fought(end + Duration::from_secs(6)));
    }

    #[test]
    fn five_repairs_now_and_then_are_no_fight() {
        let start = Instant::now();
        let mut throttle = Throttle::new(start);
        for step in 0..20 {
            let now = start + Duration::from_secs(2) * step;
            assert_eq!(throttle.take(now), Ok(()));
            assert!(!throttle.fought(now));
        }
    }

    #[test]
    fn the_wait_ends_when_a_permission_is_there() {
        let start = Instant::now();
        let mut throttle = Throttle::new(start);
        for _ in 0..5 {
            throttle.take(start).unwrap();
        }
        let wait = throttle.take(start + Duration::from_millis(300)).unwrap_err();
        assert_eq!(wait, Duration::from_millis(700));
        assert_eq!(throttle.take(start + Duration::from_secs(1)), Ok(()));
    }
}

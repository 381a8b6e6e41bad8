//! Samples and what is said of them.

use std::time::Duration;

/// Durations in milliseconds.
#[derive(Debug, Clone, Default)]
pub(super) struct Samples(Vec<f64>);

impl Samples {
    pub(super) fn push(&mut self, duration: Duration) {
        self.0.push(duration.as_secs_f64() * 1000.0);
    }

    /// The value that a share of all samples does not exceed (nearest rank).
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a rank between 0 and the number of samples"
    )]
    pub(super) fn percentile(&self, share: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let rank = (share * sorted.len() as f64).ceil() as usize;
        sorted.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
    }

    pub(super) fn median(&self) -> f64 {
        self.percentile(0.5)
    }
}

/// A count as a divisor.
pub(super) fn number(count: usize) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}

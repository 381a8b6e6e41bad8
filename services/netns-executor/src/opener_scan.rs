//! Looking through all processes, once for all who want it at the same time: on a node that Sluice comes to, the broker asks
//! for hundreds of pods at once.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Mutex;

/// The scans of one opener. Invariant: at most one runs, and nobody is served by one that began before they asked.
#[derive(Debug, Default)]
pub(crate) struct Scans {
    begun: AtomicU64,
    /// Number of the last one that ended well; held while one runs.
    ended: Mutex<u64>,
}

impl Scans {
    /// Returns after a scan that began after this call, its own or another's. A failure is only told to whose scan it was.
    pub(crate) async fn share<E, F: Future<Output = Result<(), E>>>(
        &self,
        scan: impl FnOnce() -> F,
    ) -> Result<(), E> {
        let before = self.begun.load(Ordering::SeqCst);
        let mut ended = self.ended.lock().await;
        if *ended > before {
            return Ok(());
        }
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        scan().await?;
        *ended = number;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[derive(Debug, Default)]
    struct Counted {
        made: AtomicU64,
        running: AtomicU64,
    }

    impl Counted {
        async fn scan(&self) -> Result<(), &'static str> {
            assert_eq!(self.running.fetch_add(1, Ordering::SeqCst), 0, "two at a time");
            self.made.fetch_add(1, Ordering::SeqCst);
            tokio::task::yield_now().await;
            self.running.fetch_sub(1, Ordering::SeqCst);
            Ok(())
        }
    }

    #[tokio::test]
    async fn hundreds_who_ask_at_once_share_one_and_who_asks_later_has_another() {
        let (scans, counted) = (Arc::new(Scans::default()), Arc::new(Counted::default()));
        let mut all = tokio::task::JoinSet::new();
        for _ in 0..250 {
            let (scans, counted) = (Arc::clone(&scans), Arc::clone(&counted));
            all.spawn(async move { scans.share(|| counted.scan()).await });
        }
        for asked in all.join_all().await {
            asked.unwrap();
        }
        let made = counted.made.load(Ordering::SeqCst);
        assert!(made <= 2, "{made} scans");
        scans.share(|| counted.scan()).await.unwrap();
        assert_eq!(counted.made.load(Ordering::SeqCst), made + 1);
    }

    #[tokio::test]
    async fn a_scan_that_failed_serves_nobody_else() {
        let (scans, counted) = (Scans::default(), Counted::default());
        let (first, second) = tokio::join!(
            scans.share(|| async {
                tokio::task::yield_now().await;
                Err("no opener")
            }),
            scans.share(|| counted.scan())
        );
        assert_eq!((first, second), (Err("no opener"), Ok(())));
        assert_eq!(counted.made.load(Ordering::SeqCst), 1);
    }
}

//! Alive: the reconcile loop turns. Ready: new pods can be decided and enrolled; old pods need not be through yet.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sluice_proto::pb::node::InstallerReport;

use crate::driver::Beat;
use crate::executor::Executor;
use crate::zds::{Phase, Zds};

/// A loop that has not turned for this long is stuck.
const STUCK: Duration = Duration::from_secs(10);
/// Between two looks for whoever waits for readiness.
const AGAIN: Duration = Duration::from_millis(5);

pub(crate) const NOT_SYNCED: &str = "the pod source has not told everything yet";
const NOT_CONNECTED: &str = "the executor is not connected";

/// Liveness and readiness. Clones share them.
#[derive(Debug, Clone)]
pub struct Health {
    beat: Beat,
    executor: Executor,
    zds: Zds,
    synced: Arc<AtomicBool>,
    listening: Arc<AtomicBool>,
    was_ready: Arc<AtomicBool>,
    installer: Arc<Mutex<Option<InstallerReport>>>,
    require_installer: bool,
    require_ztunnel: bool,
}

impl Health {
    /// Nothing is ready yet.
    pub fn new(beat: Beat, executor: Executor, zds: Zds) -> Self {
        Self {
            beat,
            executor,
            zds,
            synced: Arc::default(),
            listening: Arc::default(),
            was_ready: Arc::default(),
            installer: Arc::default(),
            require_installer: false,
            require_ztunnel: false,
        }
    }

    /// Not ready before an installer has said that it is; or without a ready ztunnel connection.
    #[must_use]
    pub fn requiring(self, installer: bool, ztunnel: bool) -> Self {
        Self {
            require_installer: installer,
            require_ztunnel: ztunnel,
            ..self
        }
    }

    /// The source has told everything.
    pub fn set_synced(&self) {
        self.synced.store(true, Ordering::Relaxed);
    }

    /// All sockets are there.
    pub fn set_listening(&self) {
        self.listening.store(true, Ordering::Relaxed);
    }

    /// What the installer says of itself.
    pub fn set_installer(&self, report: InstallerReport) {
        *self.installer.lock().unwrap_or_else(PoisonError::into_inner) = Some(report);
    }

    /// What the installer said last.
    pub fn installer(&self) -> Option<InstallerReport> {
        self.installer
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// What is missing before ADDs can be decided; empty: nothing. Less than readiness: once the chain entry is there,
    /// pods that cannot be enrolled must wait rather than start outside of the mesh.
    pub fn cannot_serve_because(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        if !self.synced.load(Ordering::Relaxed) {
            reasons.push(NOT_SYNCED.to_owned());
        }
        if !self.executor.is_connected() {
            reasons.push(NOT_CONNECTED.to_owned());
        }
        reasons
    }

    /// The plugin is given another selection than ours: it would take other namespaces for excluded ones.
    fn other_selection(&self) -> Option<String> {
        let (plugins, ours) = (self.installer()?.selection_hash, self.executor.config_hash());
        (!plugins.is_empty() && plugins != ours).then(|| {
            format!(
                "the plugin's chain entry has selection {plugins}, the broker {ours}: restart the agent's pod"
            )
        })
    }

    /// Why the process is stuck, if it is.
    pub fn stuck(&self) -> Option<String> {
        let age = self.beat.age();
        (age > STUCK).then(|| format!("the reconcile loop has not turned for {} s", age.as_secs()))
    }

    /// Returns once nothing has been missing for the first time in this life.
    pub async fn first_ready(&self) {
        wait_until(|| self.was_ready.load(Ordering::Relaxed) || self.not_ready_because().is_empty()).await;
        self.was_ready.store(true, Ordering::Relaxed);
    }

    /// Everything that is missing; empty: ready. Only a process that has never been ready is given `patience` for that.
    pub async fn not_ready_within(&self, patience: Duration) -> Vec<String> {
        let _ = tokio::time::timeout(patience, self.first_ready()).await;
        self.not_ready_because()
    }

    /// Everything that is missing; empty: ready.
    pub fn not_ready_because(&self) -> Vec<String> {
        let mut reasons: Vec<String> = self.stuck().into_iter().collect();
        if !self.listening.load(Ordering::Relaxed) {
            reasons.push("sockets are not listening yet".into());
        }
        if !self.synced.load(Ordering::Relaxed) {
            reasons.push(NOT_SYNCED.into());
        }
        if !self.executor.is_connected() {
            reasons.push(NOT_CONNECTED.into());
        } else if let Some(silence) = self.executor.silence() {
            let seconds = silence.as_secs();
            reasons.push(format!(
                "the executor's watch is silent for {seconds} s, its heartbeat comes every 5 s"
            ));
        }
        match self.executor.last_preflight() {
            None => reasons.push("preflight is not finished".into()),
            Some(Err(error)) => reasons.push(format!("preflight failed: {error}")),
            Some(Ok(features)) => {
                let missing = features
                    .iter()
                    .filter(|feature| feature.required && !feature.available);
                reasons.extend(missing.map(|feature| {
                    format!(
                        "kernel lacks {} ({}): {}",
                        feature.name, feature.family, feature.error
                    )
                }));
            }
        }
        match self.installer() {
            None if self.require_installer => reasons.push("the installer has not reported yet".into()),
            Some(report) if !report.ready => {
                reasons.push(format!("the installer is not ready: {}", report.problem));
            }
            None | Some(_) => {}
        }
        reasons.extend(self.other_selection());
        if self.require_ztunnel {
            let ready = self
                .zds
                .status()
                .connections
                .iter()
                .any(|c| c.phase == Phase::Ready);
            if !ready {
                reasons.push("no ready ztunnel connection".into());
            }
        }
        reasons
    }
}

/// Waits until `done`, for as long as it takes.
pub(crate) async fn wait_until(done: impl Fn() -> bool) {
    while !done() {
        tokio::time::sleep(AGAIN).await;
    }
}

#[cfg(test)]
mod tests {
    use sluice_proto::paths::RunDir;
    use sluice_selection::SelectionConfig;
    use tokio::sync::mpsc;

    use super::*;
    use crate::zds::Options;

    fn of(beat: Beat) -> Health {
        let run = RunDir::new("/nowhere");
        let zds = Zds::new(
            Options::new(run.zds_socket(), Vec::new()),
            mpsc::unbounded_channel().0,
        );
        Health::new(
            beat,
            Executor::new(run, &SelectionConfig::default(), String::new()),
            zds,
        )
    }

    #[test]
    fn a_loop_that_has_not_turned_for_long_is_neither_alive_nor_ready() {
        assert_eq!(of(Beat::default()).stuck(), None);
        let health = of(Beat::of_age(STUCK + Duration::from_secs(1)));
        let why = health.stuck().unwrap();
        assert_eq!(why, "the reconcile loop has not turned for 11 s");
        assert!(health.not_ready_because().contains(&why));
    }

    #[test]
    fn an_installer_that_has_said_nothing_is_missed_where_there_has_to_be_one() {
        let why = "the installer has not reported yet".to_owned();
        let health = of(Beat::default());
        assert!(!health.not_ready_because().contains(&why));
        let health = health.requiring(true, false);
        assert!(health.not_ready_because().contains(&why));
        health.set_installer(InstallerReport {
            ready: true,
            ..InstallerReport::default()
        });
        let reasons = health.not_ready_because();
        assert!(
            !reasons.iter().any(|reason| reason.contains("installer")),
            "{reasons:?}"
        );
    }
}

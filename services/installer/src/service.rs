//! The running installer: one loop that looks at the node whenever something may have changed, beside tasks that follow
//! the broker, take the plugin's log lines and answer probes.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use sluice_proto::pb::node::{InstallerReport, Lifecycle};
use sluice_proto::transport::uds::BindError;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::broker::{self, View};
use crate::health::{self, Health};
use crate::installer::{Installer, RemovalError, Standing, Wishes};
use crate::istio_log;
use crate::kubeconfig::Credentials;
use crate::log_socket::{self, Dropped};
use crate::observe;
use crate::watch::{LOOK, Watch};

/// Looks that follow changes are at least so far apart, so that a busy neighbour does not make us busy.
const APART: Duration = Duration::from_millis(100);
/// How long a broker that is not connected may take to appear at the end.
const RECONNECT: Duration = Duration::from_secs(5);

/// The service ended badly.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServiceError {
    #[error(transparent)]
    Bind(#[from] BindError),
    #[error("a look at the node failed")]
    Look(#[source] tokio::task::JoinError),
    #[error(transparent)]
    Removal(#[from] RemovalError),
}

/// Runs until `stop`, then removes what was installed if the broker says so.
pub(crate) async fn run(installer: Installer, stop: CancellationToken) -> Result<(), ServiceError> {
    let flags = installer.flags().clone();
    let run = flags.run();
    let (view_sender, view) = watch::channel(View::default());
    let beginning = "it has not looked at the node yet";
    let (reports, report) = watch::channel(InstallerReport {
        problem: beginning.to_owned(),
        mode: flags.mode.as_str().to_owned(),
        ..InstallerReport::default()
    });
    let (health_sender, health) = watch::channel(Health {
        problem: beginning.to_owned(),
        ..Health::default()
    });
    let dropped = Dropped::default();
    tokio::spawn(health::serve(&run, health)?);
    tokio::spawn(log_socket::serve(&run.plugin_log_socket(), dropped.clone())?);
    if let Some(directory) = &flags.istio_run_dir {
        match istio_log::serve(directory) {
            Ok(endpoint) => drop(tokio::spawn(endpoint)),
            // Logs of another agent's plugin are not worth a node without ours.
            Err(error) => {
                let error = sluice_runtime::telemetry::chain(&error);
                tracing::warn!(error, "no log endpoint for a plugin of istio-cni");
            }
        }
    }
    let agent = flags.pod_name.clone();
    tokio::spawn(broker::follow(run.node_socket(), agent, view_sender, report));
    let wake = Arc::new(Notify::new());
    let mut node = Node {
        watch: Watch::new(wake.clone(), flags.poll),
        view: view.clone(),
        reports,
        health: health_sender,
        dropped,
        last: Standing::default(),
    };
    let installer = node.keep(installer, &wake, &stop).await?;
    node.end(installer).await
}

struct Node {
    watch: Watch,
    view: watch::Receiver<View>,
    reports: watch::Sender<InstallerReport>,
    health: watch::Sender<Health>,
    dropped: Dropped,
    last: Standing,
}

impl Node {
    async fn keep(
        &mut self,
        mut installer: Installer,
        wake: &Notify,
        stop: &CancellationToken,
    ) -> Result<Installer, ServiceError> {
        loop {
            let watching = self.watch.arm(&directories(&installer)).is_none() && !installer.flags().poll;
            let wishes = self.wishes();
            let (back, standing) = tokio::task::spawn_blocking(move || {
                let standing = installer.pass(&wishes);
                (installer, standing)
            })
            .await
            .map_err(ServiceError::Look)?;
            installer = back;
            let looked = Instant::now();
            let next = looked + standing.again.unwrap_or(LOOK).min(LOOK);
            self.tell(standing, watching);
            tokio::select! {
                () = stop.cancelled() => return Ok(installer),
                () = wake.notified() => {
                    tokio::select! {
                        () = stop.cancelled() => return Ok(installer),
                        () = sleep_until(looked + APART) => {}
                    }
                }
                _ = self.view.changed() => {}
                () = sleep_until(next) => {}
            }
        }
    }

    fn wishes(&mut self) -> Wishes {
        let view = self.view.borrow_and_update();
        Wishes {
            not_serving: (!view.could_serve).then(|| view.why_not.clone()),
            credentials: view.credentials.clone(),
        }
    }

    fn tell(&mut self, standing: Standing, watching: bool) {
        let report = &standing.report;
        let before = &self.last.report;
        if report.ready != before.ready || report.problem != before.problem {
            let (problem, effective) = (&report.problem, &report.effective_file);
            if report.ready {
                tracing::info!(effective, mode = report.mode, "everything is in place");
            } else {
                tracing::warn!(
                    problem,
                    effective,
                    mode = report.mode,
                    "not everything is in place"
                );
            }
        }
        for note in standing
            .notes
            .iter()
            .filter(|note| !self.last.notes.contains(note))
        {
            tracing::warn!(note, "noticed");
        }
        self.reports.send_if_modified(|told| {
            let new = told != report;
            told.clone_from(report);
            new
        });
        self.health.send_replace(Health {
            ready: report.ready,
            problem: report.problem.clone(),
            mode: report.mode.clone(),
            effective_file: report.effective_file.clone(),
            primary_file: report.primary_file.clone(),
            repairs: report.repairs,
            notes: standing.notes.clone(),
            watching,
            credentials_expire_unix: self
                .view
                .borrow()
                .credentials
                .as_ref()
                .map(Credentials::expires_unix),
            plugin_log_dropped: self.dropped.load(Ordering::Relaxed),
        });
        self.last = standing;
    }

    /// Asked to stop: upgrade, restart and reboot leave everything; only the broker's word that the node is to be left
    /// removes it.
    async fn end(mut self, mut installer: Installer) -> Result<(), ServiceError> {
        self.health.send_modify(|health| {
            health.ready = false;
            "stopping".clone_into(&mut health.problem);
        });
        let (lifecycle, reason) = self.last_word(installer.flags().shutdown()).await;
        if lifecycle != Lifecycle::Remove {
            tracing::info!(
                lifecycle = lifecycle.as_str_name(),
                reason,
                "stopping; everything stays in place"
            );
            installer.remove_sockets();
            return Ok(());
        }
        tracing::info!(reason, "stopping; removing what was installed");
        tokio::task::spawn_blocking(move || installer.remove())
            .await
            .map_err(ServiceError::Look)??;
        Ok(())
    }

    /// What the broker said last; it has `within` to say that this is final. One that went away without that word is
    /// taken at the word before, and one that cannot be reached says nothing. Where the next agent's broker serves already,
    /// ours has gone.
    async fn last_word(&mut self, within: Duration) -> (Lifecycle, String) {
        let end = Instant::now() + within;
        let reconnect = end.min(Instant::now() + RECONNECT);
        let mut was_connected = self.view.borrow().connected;
        loop {
            let limit = {
                let view = self.view.borrow_and_update();
                if view.last_word || view.of_another_agent || (was_connected && !view.connected) {
                    break;
                }
                was_connected |= view.connected;
                if view.connected { end } else { reconnect }
            };
            match timeout_at(limit, self.view.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) | Err(_) => break,
            }
        }
        let view = self.view.borrow();
        (view.lifecycle, view.lifecycle_reason.clone())
    }
}

/// What to watch: besides the directories of our files those of drop-ins, and where a directory is missing, its parent.
fn directories(installer: &Installer) -> Vec<PathBuf> {
    let flags = installer.flags();
    let mut directories = vec![flags.cni_net_dir.clone()];
    if flags.cni_net_dir.is_dir() {
        directories.extend(observe::directories_in(&flags.cni_net_dir));
    } else {
        directories.extend(flags.cni_net_dir.parent().map(PathBuf::from));
    }
    directories.extend(flags.cni_bin_dir.iter().cloned());
    directories.extend(flags.kubeconfig().parent().map(PathBuf::from));
    directories
}

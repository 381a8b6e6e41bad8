//! One look at the node and what it leads to, over and over. Blocking: it runs apart from everything that must answer.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sluice_proto::pb::node::{InstallerReport, Installs};
use sluice_selection::SelectionConfig;

use crate::apply::{apply, describe};
use crate::config::{Flags, Mode, STAND_ALONE_FILE};
use crate::entry::{Entry, PLUGIN};
use crate::files;
use crate::health;
use crate::istio_log;
use crate::kubeconfig::Credentials;
use crate::node::{BinDir, Kubeconfig, NetDir};
use crate::notes;
use crate::observe::{self, BinDirs};
use crate::plan::{Plan, Situation, Step, plan_install, plan_removal};
use crate::runtime_config::{self, RuntimeDirs};
use crate::throttle::Throttle;

/// Looks in a row at most, until nothing is left to do.
const LOOKS: usize = 3;
/// Pauses after failures double between these.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// What the broker says, as far as it matters here.
#[derive(Debug, Clone, Default)]
pub(crate) struct Wishes {
    /// Why pods cannot be served; `None`: they can, or could once since we started.
    pub(crate) not_serving: Option<String>,
    pub(crate) credentials: Option<Credentials>,
}

/// How it stands after a look.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Standing {
    pub(crate) report: InstallerReport,
    pub(crate) notes: Vec<String>,
    /// Look again after this, although nobody told of a change.
    pub(crate) again: Option<Duration>,
}

/// Keeps the node as it should be.
#[derive(Debug)]
pub(crate) struct Installer {
    flags: Flags,
    entry: Entry,
    bins: BinDirs,
    throttle: Throttle,
    primary_gone: Option<Instant>,
    failure: Option<Failure>,
    is_ready: bool,
    was_ready: bool,
    repairs: u64,
    installs: Installs,
}

#[derive(Debug)]
struct Failure {
    text: String,
    pause: Duration,
    until: Instant,
}

/// Everything that was seen in one look.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) net: NetDir,
    pub(crate) bins: Vec<BinDir>,
    pub(crate) runtimes: Vec<Result<RuntimeDirs, String>>,
    pub(crate) kubeconfig: Kubeconfig,
}

impl Installer {
    pub(crate) fn new(flags: Flags, entry: Entry) -> Self {
        Self {
            flags,
            entry,
            bins: BinDirs::default(),
            throttle: Throttle::new(Instant::now()),
            primary_gone: None,
            failure: None,
            is_ready: false,
            was_ready: false,
            repairs: 0,
            installs: Installs::default(),
        }
    }

    /// Removes what a killed process left under temporary names.
    pub(crate) fn sweep(&self) {
        let kubeconfig = self.flags.kubeconfig();
        let mut directories: Vec<&Path> = self.flags.cni_bin_dir.iter().map(PathBuf::as_path).collect();
        directories.push(&self.flags.cni_net_dir);
        directories.extend(kubeconfig.parent());
        let nested = observe::directories_in(&self.flags.cni_net_dir);
        directories.extend(nested.iter().map(PathBuf::as_path));
        for (path, error) in directories.into_iter().flat_map(files::sweep) {
            tracing::warn!(path = %path.display(), %error, "cannot remove what an earlier process left");
        }
    }

    pub(crate) fn flags(&self) -> &Flags {
        &self.flags
    }

    pub(crate) fn look(&mut self) -> Seen {
        let source = self.flags.source_dir.join(PLUGIN);
        let hosts = &self.flags.host_cni_bin_dir;
        let bins = self.flags.cni_bin_dir.iter().enumerate().map(|(index, path)| {
            let host = hosts.get(index).unwrap_or(path);
            self.bins.look(path, host, &source)
        });
        Seen {
            bins: bins.collect(),
            runtimes: self
                .flags
                .runtime_config
                .iter()
                .filter_map(|path| runtime_config::read(path))
                .collect(),
            net: observe::net_dir(&self.flags.cni_net_dir),
            kubeconfig: observe::kubeconfig(&self.flags.kubeconfig()),
        }
    }

    /// What an installation would do now.
    pub(crate) fn plan(&mut self, seen: &Seen, wishes: &Wishes) -> Plan {
        let kubeconfig = wishes.credentials.as_ref().map(Credentials::render);
        let plan = plan_install(&Situation {
            flags: &self.flags,
            entry: &self.entry,
            net: &seen.net,
            bins: &seen.bins,
            runtimes: &seen.runtimes,
            kubeconfig: &seen.kubeconfig,
            credentials: kubeconfig.as_deref(),
            not_serving: wishes.not_serving.as_deref(),
            primary_gone: self.primary_gone.map_or(Duration::ZERO, |since| since.elapsed()),
        });
        let gone = plan.primary_gone;
        self.primary_gone = gone.then(|| self.primary_gone.unwrap_or_else(Instant::now));
        plan
    }

    /// Looks, does what is needed, and looks again until nothing is.
    pub(crate) fn pass(&mut self, wishes: &Wishes) -> Standing {
        let kubeconfig = wishes.credentials.as_ref().map(Credentials::render);
        let mut plan = Plan::default();
        let mut waiting = None;
        for _ in 0..LOOKS {
            let seen = self.look();
            plan = self.plan(&seen, wishes);
            if plan.steps.is_empty() {
                break;
            }
            match self.carry_out(&plan.steps, kubeconfig.as_deref()) {
                Ok(()) => {}
                Err(pause) => {
                    waiting = Some(pause);
                    break;
                }
            }
        }
        if plan.steps.is_empty() {
            self.failure = None;
        }
        self.stand(plan, waiting)
    }

    /// Does the steps in their order. On a failure, or when it is not yet time, says when to try again.
    fn carry_out(&mut self, steps: &[Step], kubeconfig: Option<&[u8]>) -> Result<(), Duration> {
        let now = Instant::now();
        if let Some(failure) = &self.failure
            && now < failure.until
        {
            return Err(failure.until - now);
        }
        if steps.iter().any(Step::is_config) {
            self.throttle.take(now)?;
        }
        for step in steps {
            match apply(step, &self.flags, kubeconfig) {
                Ok(()) if self.was_ready && *step != Step::WriteKubeconfig => self.repairs += 1,
                Ok(()) => {}
                // The next look sees what it is now.
                Err(files::FileError::Changed { .. }) => return Ok(()),
                Err(error) => {
                    *failures_of(step, &mut self.installs) += 1;
                    let text = sluice_runtime::telemetry::chain(&error);
                    let last = self
                        .failure
                        .take()
                        .map_or(Duration::ZERO, |failure| failure.pause);
                    let pause = (last * 2).clamp(BACKOFF.0, BACKOFF.1);
                    tracing::warn!(
                        error = text,
                        retry_ms = pause.as_millis(),
                        "cannot put the node right"
                    );
                    self.failure = Some(Failure {
                        text,
                        pause,
                        until: now + pause,
                    });
                    return Err(pause);
                }
            }
        }
        Ok(())
    }

    fn stand(&mut self, plan: Plan, waiting: Option<Duration>) -> Standing {
        let mut problems: Vec<String> = plan.problems.iter().map(ToString::to_string).collect();
        if let Some(failure) = &self.failure {
            problems.insert(0, failure.text.clone());
        }
        if self.throttle.fought(Instant::now()) {
            problems.insert(0, self.conflict(&plan));
        } else if problems.is_empty() && !plan.steps.is_empty() {
            let (action, path) = describe(&plan.steps[0], &self.flags);
            problems.push(format!("still to do: {action} {}", path.display()));
        }
        let ready = problems.is_empty();
        self.installs.succeeded += u64::from(ready && !self.is_ready);
        self.is_ready = ready;
        self.was_ready |= ready;
        let host = |name: Option<String>| {
            name.map(|name| self.flags.host_cni_net_dir.join(name).display().to_string())
        };
        let grace = self.primary_gone.map(|since| {
            (self.flags.primary_grace().saturating_sub(since.elapsed())).max(Duration::from_millis(10))
        });
        Standing {
            report: InstallerReport {
                ready,
                problem: problems.join("; "),
                mode: self.flags.mode.as_str().to_owned(),
                effective_file: host(plan.effective).unwrap_or_default(),
                primary_file: host(plan.primary).unwrap_or_default(),
                repairs: self.repairs,
                selection_hash: self
                    .entry
                    .selection
                    .as_ref()
                    .map_or_else(String::new, SelectionConfig::hash),
                installs: Some(self.installs),
            },
            notes: self.notes(plan.notes),
            again: waiting.or(grace).or((!ready).then_some(Duration::from_secs(1))),
        }
    }

    fn notes(&self, mut notes: Vec<String>) -> Vec<String> {
        if let (Some(path), Some(in_force)) = (&self.flags.selection, &self.entry.selection) {
            notes.extend(notes::pending_restart(path, in_force));
        }
        notes.extend(notes::unprotected(&self.flags.run()));
        notes
    }

    fn conflict(&self, plan: &Plan) -> String {
        let file = match self.flags.mode {
            Mode::Owned => self.flags.owned_name(),
            Mode::StandAlone => STAND_ALONE_FILE,
            Mode::Chained => plan.primary.as_deref().unwrap_or("the primary network's file"),
        };
        let hint = if file.contains("cilium")
            || plan
                .primary
                .as_deref()
                .is_some_and(|name| name.contains("cilium"))
        {
            " (Cilium does that unless its value cni.exclusive is false)"
        } else {
            ""
        };
        format!("conflict: {file} is changed by somebody else as soon as it is written{hint}")
    }

    /// Empties our part of the run directory, sockets included; the directory itself is the node's until it reboots.
    fn clear_run_dir(&self) {
        let run = self.flags.run();
        let records = std::fs::read_dir(run.unprotected())
            .into_iter()
            .flatten()
            .flatten();
        let istio = self.flags.istio_run_dir.iter();
        let records = records.map(|entry| entry.path());
        for path in records.chain(istio.map(|directory| directory.join(istio_log::SOCKET))) {
            clear(&path);
        }
        self.remove_sockets();
        let _ = std::fs::remove_dir(run.unprotected());
    }

    /// Removes the sockets that nobody but us has a right to, since we still hold the lease.
    pub(crate) fn remove_sockets(&self) {
        let run = self.flags.run();
        for socket in [run.plugin_log_socket(), health::socket(&run)] {
            clear(&socket);
        }
    }

    /// Removes everything but the stand-in for the plugin. Goes on after failures and tells them all.
    pub(crate) fn remove(&mut self) -> Result<(), RemovalError> {
        self.sweep();
        let mut failures = Vec::new();
        for _ in 0..LOOKS {
            failures.clear();
            let seen = self.look();
            let plan = plan_removal(&seen.net, &seen.bins, &seen.kubeconfig);
            failures.extend(plan.problems.iter().map(ToString::to_string));
            let mut named = !plan.problems.is_empty();
            for step in &plan.steps {
                // A chain that names a missing plugin can neither start nor end a pod.
                if named && matches!(step, Step::RetireBinary(_)) {
                    continue;
                }
                if let Err(error) = apply(step, &self.flags, None) {
                    named |= step.is_config();
                    failures.push(sluice_runtime::telemetry::chain(&error));
                }
            }
            if failures.is_empty() {
                self.clear_run_dir();
                return Ok(());
            }
        }
        Err(RemovalError(failures.join("; ")))
    }
}

/// Removes a file of the run directory.
fn clear(path: &Path) {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "cannot remove a file of the run directory");
    }
}

/// Where failures of a step are counted.
fn failures_of<'a>(step: &Step, installs: &'a mut Installs) -> &'a mut u64 {
    match step {
        Step::InstallBinary(_) | Step::RetireBinary(_) => &mut installs.plugin_failed,
        Step::WriteKubeconfig | Step::DeleteKubeconfig => &mut installs.kubeconfig_failed,
        Step::Write { .. } | Step::Delete { .. } => &mut installs.configuration_failed,
    }
}

/// Something of ours is still on the node.
#[derive(Debug, thiserror::Error)]
#[error("not everything could be removed: {0}")]
pub(crate) struct RemovalError(String);

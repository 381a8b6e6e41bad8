//! Carries out the steps of a plan.

use std::path::{Path, PathBuf};

use crate::config::Flags;
use crate::entry::PLUGIN;
use crate::files::{self, FileError};
use crate::observe::PLUGIN_MODE;
use crate::plan::{FileMode, Step};

/// The stand-in that answers DEL after a removal.
pub(crate) const STAND_IN: &str = "sluice-cni-removed";

/// Carries out one step. `kubeconfig` is what a written one holds.
pub(crate) fn apply(step: &Step, flags: &Flags, kubeconfig: Option<&[u8]>) -> Result<(), FileError> {
    let result = perform(step, flags, kubeconfig);
    let (action, path) = describe(step, flags);
    let path = path.display();
    match &result {
        Ok(()) => tracing::info!(target: "audit", action, %path, "changed the node"),
        Err(error) => {
            let error = sluice_runtime::telemetry::chain(error);
            tracing::debug!(action, %path, error, "cannot change the node");
        }
    }
    result
}

fn perform(step: &Step, flags: &Flags, kubeconfig: Option<&[u8]>) -> Result<(), FileError> {
    let (_, path) = describe(step, flags);
    match step {
        Step::InstallBinary(_) => files::copy(&flags.source_dir.join(PLUGIN), &path, PLUGIN_MODE),
        Step::RetireBinary(_) => {
            let stand_in = flags.source_dir.join(STAND_IN);
            // Without it the plugin itself stays: it answers DEL as well.
            if stand_in.exists() {
                files::copy(&stand_in, &path, PLUGIN_MODE)
            } else {
                Ok(())
            }
        }
        Step::WriteKubeconfig => kubeconfig.map_or(Ok(()), |content| {
            files::write(&path, content, FileMode::Exactly(0o600), None)
        }),
        Step::DeleteKubeconfig => files::delete(&path, None),
        Step::Write {
            content,
            mode,
            expect,
            ..
        } => files::write(&path, content, *mode, expect.as_deref()),
        Step::Delete { expect, .. } => files::delete(&path, expect.as_deref()),
    }
}

/// What the step does, and to which file, as this process sees it.
pub(crate) fn describe(step: &Step, flags: &Flags) -> (&'static str, PathBuf) {
    let plugin = |index: &usize| {
        let directory = flags
            .cni_bin_dir
            .get(*index)
            .map_or(Path::new(""), PathBuf::as_path);
        directory.join(PLUGIN)
    };
    match step {
        Step::InstallBinary(index) => ("install the plugin", plugin(index)),
        Step::RetireBinary(index) => ("replace the plugin by its stand-in", plugin(index)),
        Step::WriteKubeconfig => ("write the plugin's credentials", flags.kubeconfig()),
        Step::DeleteKubeconfig => ("remove the plugin's credentials", flags.kubeconfig()),
        Step::Write { name, .. } => ("write a network configuration", flags.cni_net_dir.join(name)),
        Step::Delete { name, .. } => ("remove a network configuration", flags.cni_net_dir.join(name)),
    }
}

impl Step {
    /// Whether it touches the directory that is shared with others.
    pub(crate) fn is_config(&self) -> bool {
        matches!(self, Self::Write { .. } | Self::Delete { .. })
    }
}

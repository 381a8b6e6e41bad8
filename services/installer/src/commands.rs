//! The commands that look or act once.

use std::io::{self, Write};
use std::path::Path;

use similar::TextDiff;

use crate::apply::{STAND_IN, describe};
use crate::broker;
use crate::config::Flags;
use crate::files;
use crate::health;
use crate::installer::{Installer, Wishes};
use crate::kubeconfig::Credentials;
use crate::plan::Step;

/// Prints what an installation would change. Changes nothing.
pub(crate) async fn plan(installer: &mut Installer, out: &mut impl Write) -> io::Result<()> {
    let flags = installer.flags().clone();
    let wishes = match broker::ask_once(&flags.run().node_socket()).await {
        Ok(view) => Wishes {
            not_serving: (!view.can_serve).then_some(view.why_not),
            credentials: view.credentials,
        },
        Err(error) => {
            let error = sluice_runtime::telemetry::chain(&error);
            writeln!(
                out,
                "# {error}: shown is what would be done once pods can be served"
            )?;
            Wishes::default()
        }
    };
    let seen = installer.look();
    let plan = installer.plan(&seen, &wishes);
    for problem in &plan.problems {
        writeln!(out, "# {problem}")?;
    }
    for note in &plan.notes {
        writeln!(out, "# {note}")?;
    }
    if plan.steps.is_empty() {
        writeln!(out, "# nothing to do")?;
    }
    for step in &plan.steps {
        show(step, &flags, &wishes, out)?;
    }
    Ok(())
}

fn show(step: &Step, flags: &Flags, wishes: &Wishes, out: &mut impl Write) -> io::Result<()> {
    let (action, path) = describe(step, flags);
    let before = || files::read(&path).map(|(bytes, _)| bytes).unwrap_or_default();
    match step {
        Step::Write { content, .. } => diff(&path, &before(), content, out),
        Step::Delete { .. } => diff(&path, &before(), &[], out),
        Step::WriteKubeconfig => {
            let new = wishes
                .credentials
                .as_ref()
                .map(Credentials::render_redacted)
                .unwrap_or_default();
            diff(&path, &[], &new, out)
        }
        Step::InstallBinary(_) | Step::RetireBinary(_) | Step::DeleteKubeconfig => {
            writeln!(out, "# {action}: {}", path.display())
        }
    }
}

fn diff(path: &Path, before: &[u8], after: &[u8], out: &mut impl Write) -> io::Result<()> {
    let (before, after) = (String::from_utf8_lossy(before), String::from_utf8_lossy(after));
    let name = path.display().to_string();
    let side = |text: &str| {
        if text.is_empty() {
            "/dev/null".to_owned()
        } else {
            name.clone()
        }
    };
    let diff = TextDiff::from_lines(before.as_ref(), after.as_ref());
    let (old, new) = (side(&before), side(&after));
    write!(
        out,
        "{}",
        diff.unified_diff().context_radius(3).header(&old, &new)
    )
}

/// A running installer would put back at once what is removed.
#[derive(Debug, thiserror::Error)]
#[error(
    "an installer runs on this node and would put everything back: take its DaemonSet off the node first"
)]
pub(crate) struct StillRunning;

/// Removes everything but the stand-in for the plugin.
pub(crate) fn uninstall(flags: &Flags) -> anyhow::Result<()> {
    if health::ask(&flags.run()).is_ok() {
        return Err(StillRunning.into());
    }
    warn_without_stand_in(flags);
    Installer::new(flags.clone(), flags.entry()?).remove()?;
    Ok(())
}

/// Whether the image brought what `uninstall` leaves behind.
pub(crate) fn warn_without_stand_in(flags: &Flags) {
    let path = flags.source_dir.join(STAND_IN);
    if !path.exists() {
        let path = path.display();
        tracing::warn!(%path, "there is no stand-in for the plugin: the plugin itself will answer DEL after a removal");
    }
}

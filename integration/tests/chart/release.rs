//! The release on the cluster of `make cluster`, installed by helm from this repository's chart.

use std::process::Command;
use std::sync::LazyLock;

use serde_json::Value;

use crate::helm::{NAMESPACE, chart, helm};

/// Installs, or finds installed, and waits until every container is ready.
static INSTALLED: LazyLock<()> = LazyLock::new(|| {
    let chart = chart().display().to_string();
    let image = "image.repository=localhost/sluice,image.tag=dev,image.pullPolicy=IfNotPresent";
    let output = helm(&[
        "upgrade",
        "--install",
        "sluice",
        &chart,
        "--namespace",
        NAMESPACE,
        "--create-namespace",
        "--set",
        image,
    ]);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    // helm's own --wait is content with a DaemonSet that has no pod yet.
    kubectl(&["rollout", "status", "daemonset/sluice-node", "--timeout=120s"]);
});

/// Makes sure that the chart is on the cluster.
pub(crate) fn installed() {
    LazyLock::force(&INSTALLED);
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new("kubectl");
    command.args(["--namespace", NAMESPACE]).args(args);
    command
}

/// Runs kubectl in the release's namespace; gives stdout.
pub(crate) fn kubectl(args: &[&str]) -> String {
    let output = command(args)
        .output()
        .expect("kubectl: eval \"$(integration/cluster/env.sh)\" after `make cluster`");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "kubectl {args:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// What kubectl says to a request that is refused.
pub(crate) fn kubectl_refused(args: &[&str]) -> String {
    let output = command(args).output().unwrap();
    assert!(!output.status.success(), "kubectl {args:?} was let through");
    String::from_utf8(output.stderr).unwrap()
}

/// Runs `kubectl get` with these arguments.
pub(crate) fn get(args: &[&str]) -> Value {
    let mut all = vec!["get", "--output", "json"];
    all.extend(args);
    serde_json::from_str(&kubectl(&all)).unwrap()
}

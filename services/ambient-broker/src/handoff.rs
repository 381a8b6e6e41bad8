//! Tells the executor which mesh pods no proxy has, for the runtime's CHECK: the executor itself cannot know.

use std::time::Duration;

use sluice_proto::code::ErrorCode;
use sluice_proto::sandbox::Failure;
use tokio_util::sync::CancellationToken;

use crate::executor::Executor;
use crate::reconcile::COMPONENT;
use crate::reconcile::report::PodReport;
use crate::registry::Registry;

/// An executor that has restarted is told again within this time.
const AGAIN: Duration = Duration::from_secs(5);

/// Runs until `stop` is cancelled. Changes that come while a call is under way are told together.
pub(crate) async fn tell(registry: Registry, executor: Executor, stop: CancellationToken) {
    let mut told = None;
    loop {
        let missing = registry.missing_handoffs();
        if told.as_ref() != Some(&missing) {
            let sent = executor.sync_handoffs(&missing).await;
            told = sent.is_ok().then_some(missing);
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = registry.handoffs_changed() => {}
            () = tokio::time::sleep(AGAIN) => told = None,
        }
    }
}

/// Why no proxy has a mesh pod; `None`: one has it, or it is on its way.
pub(crate) fn not_handed_over(report: &PodReport) -> Option<Failure> {
    match report.reason {
        "no-proxy" => Some(Failure::new(
            ErrorCode::NoProxy,
            COMPONENT,
            "hand over",
            "no ready ztunnel connection",
        )),
        "proxy-nack" | "proxy-timeout" | "proxy-connection" => report.last_error.clone().or_else(|| {
            Some(Failure::new(
                ErrorCode::ProxyNack,
                COMPONENT,
                "hand over",
                report.reason,
            ))
        }),
        _ => None,
    }
}

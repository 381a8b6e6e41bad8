//! One token that is cancelled when the process is asked to end.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Returns a token that SIGTERM or SIGINT cancels. Call it inside a tokio runtime.
///
/// A process that is PID 1 of its container ignores SIGTERM unless it installs a handler; this is it.
pub fn signalled() -> std::io::Result<CancellationToken> {
    let token = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let cancelled = token.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => tracing::info!(signal = "SIGTERM", "asked to stop"),
            _ = interrupt.recv() => tracing::info!(signal = "SIGINT", "asked to stop"),
        }
        cancelled.cancel();
    });
    Ok(token)
}

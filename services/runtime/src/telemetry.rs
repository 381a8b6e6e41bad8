//! Logs as JSON lines on stderr, and error chains in one form.
//!
//! Target `audit`: one line for each privileged act (who asked, what, result); never filtered.

use std::error::Error;
use std::fmt::Write;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::FmtSpan;

/// Installs the subscriber of this process. `RUST_LOG` filters; the default is `info`. Audit lines always pass.
///
/// A second call does nothing.
pub fn init(service: &'static str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let filter = match "audit=info".parse() {
        Ok(audit) => filter.add_directive(audit),
        Err(_) => filter,
    };
    let installed = tracing_subscriber::fmt()
        .json()
        .flatten_event(true)
        .with_span_events(FmtSpan::NONE)
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .try_init();
    if installed.is_ok() {
        tracing::debug!(service, version = env!("CARGO_PKG_VERSION"), "telemetry started");
    }
}

/// An error and its causes, joined by `: `, each once; error numbers by name, which is what people search for.
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = describe(error);
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = describe(cause);
        // Some libraries repeat the cause in their own text.
        if !text.ends_with(&cause_text) {
            let _ = write!(text, ": {cause_text}");
        }
        source = cause.source();
    }
    text
}

fn describe(error: &(dyn Error + 'static)) -> String {
    let number = error
        .downcast_ref::<std::io::Error>()
        .and_then(std::io::Error::raw_os_error);
    number.map_or_else(
        || error.to_string(),
        |number| nix::errno::Errno::from_raw(number).to_string(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn causes_follow_each_other() {
        let error = Outer(std::io::Error::from_raw_os_error(libc::ENOENT));
        assert_eq!(chain(&error), "outer: ENOENT: No such file or directory");
    }
}

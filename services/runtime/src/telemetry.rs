//! Logs as JSON lines on stderr, and error chains in one form.
//!
//! Target `audit`: one line for each privileged act (who asked, what, result); never filtered.

use std::error::Error;
use std::fmt::Write;

use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::FmtSpan;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Installs the subscriber of this process. `RUST_LOG` filters; the default is `info`. Audit lines always pass.
///
/// A second call does nothing.
pub fn init(service: &'static str) {
    let wanted = std::env::var("RUST_LOG").unwrap_or_default();
    let installed = tracing_subscriber::fmt()
        .json()
        .flatten_event(true)
        .with_span_events(FmtSpan::NONE)
        .with_max_level(LevelFilter::TRACE)
        .with_writer(std::io::stderr)
        .finish()
        .with(filter(&wanted))
        .try_init();
    if installed.is_ok() {
        tracing::debug!(service, version = env!("CARGO_PKG_VERSION"), "telemetry started");
    }
}

/// `RUST_LOG` as levels and targets, for instance `info,sluice_netns_executor=debug`. Spans and fields are not
/// understood: a filter with regular expressions would be a third of the smallest binary.
fn filter(wanted: &str) -> Targets {
    let default = || Targets::new().with_default(LevelFilter::INFO);
    let filter = match wanted.trim() {
        "" => default(),
        wanted => wanted.parse().unwrap_or_else(|_| default()),
    };
    filter.with_target("audit", LevelFilter::INFO)
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

    #[test]
    fn audit_lines_always_pass_and_nonsense_is_the_default() {
        use tracing::Level;
        for (wanted, debug) in [
            ("", false),
            ("error", false),
            ("debug", true),
            ("not=a=filter", false),
        ] {
            let filter = filter(wanted);
            assert!(filter.would_enable("audit", &Level::INFO), "{wanted}");
            assert_eq!(filter.would_enable("sluice", &Level::DEBUG), debug, "{wanted}");
        }
        let one = filter("warn,sluice_proto=debug");
        assert!(one.would_enable("sluice_proto::id", &Level::DEBUG) && !one.would_enable("h2", &Level::INFO));
    }

    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn causes_follow_each_other() {
        let error = Outer(std::io::Error::from_raw_os_error(libc::ENOENT));
        assert_eq!(chain(&error), "outer: ENOENT: No such file or directory");
    }
}

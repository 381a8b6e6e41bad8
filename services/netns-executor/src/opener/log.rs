//! Log lines in the form of the other services (JSON on stderr, target `audit` never filtered), from a subscriber of
//! a few lines: the usual one alone would be larger than the rest of this program, and each of its two processes maps it.

use std::fmt::{Debug, Write as _};
use std::io::Write as _;
use std::time::SystemTime;

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Logs from now on, as `RUST_LOG` says: a level, `info` if it says anything else. A second call does nothing.
pub fn init() {
    let wanted = std::env::var("RUST_LOG").ok();
    let wanted = wanted.and_then(|level| level.trim().parse().ok());
    let lines = Lines(wanted.unwrap_or(LevelFilter::INFO));
    // Refused only where somebody listens already.
    let _ = tracing::subscriber::set_global_default(lines);
}

/// Writes events and ignores spans, which this program has none of.
#[derive(Debug)]
struct Lines(LevelFilter);

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.0 || (metadata.target() == "audit" && *metadata.level() <= Level::INFO)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.0.max(LevelFilter::INFO))
    }

    fn event(&self, event: &Event<'_>) {
        // A closed or full stderr is no error.
        let _ = std::io::stderr().write_all(line(event).as_bytes());
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

fn line(event: &Event<'_>) -> String {
    let metadata = event.metadata();
    let now = humantime::format_rfc3339_micros(SystemTime::now());
    let mut line = format!(r#"{{"timestamp":"{now}","level":"{}""#, metadata.level());
    event.record(&mut Fields(&mut line));
    let _ = writeln!(line, r#","target":"{}"}}"#, metadata.target());
    line
}

/// Appends fields to a JSON object that has some already.
struct Fields<'a>(&'a mut String);

impl Fields<'_> {
    fn plain(&mut self, field: &Field, value: impl std::fmt::Display) {
        let _ = write!(self.0, r#","{}":{value}"#, field.name());
    }

    fn text(&mut self, field: &Field, text: &str) {
        let _ = write!(self.0, r#","{}":""#, field.name());
        for character in text.chars() {
            let _ = match character {
                '"' | '\\' => write!(self.0, "\\{character}"),
                // RFC 8259, section 7.
                '\0'..='\x1f' => write!(self.0, "\\u{:04x}", u32::from(character)),
                other => self.0.write_char(other),
            };
        }
        self.0.push('"');
    }
}

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.text(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.text(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.plain(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.plain(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.plain(field, value);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// Keeps lines instead of writing them.
    #[derive(Debug, Clone)]
    struct Recording(Arc<Mutex<Vec<String>>>, Arc<Lines>);

    impl Subscriber for Recording {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            self.1.enabled(metadata)
        }

        fn event(&self, event: &Event<'_>) {
            self.0.lock().unwrap().push(line(event));
        }

        fn new_span(&self, span: &Attributes<'_>) -> Id {
            self.1.new_span(span)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    fn lines(wanted: LevelFilter, log: impl FnOnce()) -> Vec<serde_json::Value> {
        let recording = Recording(Arc::default(), Arc::new(Lines(wanted)));
        tracing::subscriber::with_default(recording.clone(), log);
        let lines = recording.0.lock().unwrap();
        lines
            .iter()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    #[test]
    fn a_line_is_one_json_object_whatever_the_fields_hold() {
        let hostile = "a \"quoted\\ \n\u{1}\u{7f} ü\"";
        let lines = lines(LevelFilter::INFO, || {
            tracing::warn!(target: "audit", error = hostile, what = ?[hostile], shown = %hostile, errno = -3, scanned = 7_u32, ready = true, "said");
        });
        let [line] = &lines[..] else {
            panic!("{lines:?}");
        };
        assert_eq!(line["message"], "said");
        assert_eq!(
            (&line["level"], &line["target"]),
            (&"WARN".into(), &"audit".into())
        );
        assert_eq!(
            (&line["error"], &line["shown"]),
            (&hostile.into(), &hostile.into())
        );
        assert_eq!(line["what"], format!("{:?}", [hostile]));
        assert_eq!(
            (&line["errno"], &line["scanned"], &line["ready"]),
            (&(-3).into(), &7.into(), &true.into())
        );
        let timestamp = line["timestamp"].as_str().unwrap();
        assert_eq!(
            (timestamp.len(), &timestamp[10..11], &timestamp[26..]),
            (27, "T", "Z")
        );
    }

    #[test]
    fn audit_lines_always_pass() {
        for (wanted, expected) in [
            (LevelFilter::ERROR, 2),
            (LevelFilter::INFO, 3),
            (LevelFilter::DEBUG, 4),
        ] {
            let lines = lines(wanted, || {
                tracing::error!("error");
                tracing::info!(target: "audit", "audit");
                tracing::info!("info");
                tracing::debug!("debug");
            });
            assert_eq!(lines.len(), expected, "{wanted}");
        }
    }
}

//! JSON lines on stderr, warnings and worse unless the configuration asks for more. A subscriber of `tracing`
//! would cost more start-up time than everything else the plugin does, and nothing may ever reach stdout.

use std::io::Write;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// How much is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub(crate) enum Level {
    Off,
    Error,
    Warn,
    Info,
    Debug,
}

static LEVEL: AtomicU8 = AtomicU8::new(Level::Warn as u8);

/// Logs up to and including `level` from now on.
pub(crate) fn set_level(level: Level) {
    LEVEL.store(level as u8, Ordering::Relaxed);
}

/// Milliseconds since the Unix epoch.
pub(crate) fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Writes one line: a constant `message`, the variables in `fields`. A closed or full stderr is no error.
pub(crate) fn line(level: Level, message: &str, fields: &[(&str, &str)]) {
    if level as u8 > LEVEL.load(Ordering::Relaxed) {
        return;
    }
    let mut object = serde_json::Map::new();
    object.insert("unix_ms".into(), unix_ms().into());
    object.insert("level".into(), serde_json::to_value(level).unwrap_or_default());
    object.insert("service".into(), "sluice-cni".into());
    object.insert("message".into(), message.into());
    for (key, value) in fields {
        object.insert((*key).into(), (*value).into());
    }
    let mut text = serde_json::Value::Object(object).to_string();
    text.push('\n');
    let _ = std::io::stderr().write_all(text.as_bytes());
}

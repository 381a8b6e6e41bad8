//! stdout: exactly one JSON document or nothing, whatever happens (CNI spec section 5).

use std::io::Write;
use std::panic::PanicHookInfo;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use crate::config::SpecVersion;
use crate::error::{PluginError, Subject};

/// Set before the first byte goes out; whoever finds it set stays silent.
static PRINTED: AtomicBool = AtomicBool::new(false);
static VERSION: AtomicU8 = AtomicU8::new(SpecVersion::LATEST as u8);

/// The version that the error of a panic is printed in.
pub(crate) fn set_version(version: SpecVersion) {
    VERSION.store(version as u8, Ordering::Relaxed);
}

/// Prints the one document. Returns the exit status: `status`, or 1 if the document could not be written or
/// another one already was.
pub(crate) fn emit(document: &[u8], status: i32) -> i32 {
    if PRINTED.swap(true, Ordering::SeqCst) {
        return 1;
    }
    let mut line = Vec::with_capacity(document.len() + 1);
    line.extend_from_slice(document);
    line.push(b'\n');
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(&line).and_then(|()| stdout.flush()) {
        Ok(()) => status,
        Err(_) => 1,
    }
}

/// Turns a panic on any thread into a CNI error and ends the process with 1.
pub fn install_panic_hook() {
    std::panic::set_hook(Box::new(|panic| {
        let error = PluginError::Panic(describe(panic));
        let subject = Subject {
            version: SpecVersion::from_u8(VERSION.load(Ordering::Relaxed)),
            ..Subject::default()
        };
        emit(error.to_json(&subject).as_bytes(), 1);
        std::process::exit(1);
    }));
}

fn describe(panic: &PanicHookInfo<'_>) -> String {
    let payload = panic.payload();
    let what = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    match panic.location() {
        Some(location) => format!("{what} ({}:{})", location.file(), location.line()),
        None => what.to_owned(),
    }
}

/// Lets a test see what a panic at `stage` looks like from outside. Not in release builds.
#[cfg(debug_assertions)]
pub(crate) fn panic_if_asked(stage: &str) {
    assert!(
        std::env::var_os("SLUICE_CNI_TEST_PANIC").is_none_or(|asked| asked != *stage),
        "asked to panic at {stage}"
    );
}

//! What stands in the plugin's place after Sluice was removed from a node, until it is purged. Runtimes may have kept
//! the chain of a pod that was added before; its DEL (and an ADD that was under way) must find a plugin that succeeds and
//! does nothing.

use std::io::{Read, Write};
use std::process::ExitCode;

use serde::Deserialize;
use serde_json::value::RawValue;

/// Longest input that is read, in bytes.
const LONGEST: u64 = 16 * 1024 * 1024;

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase")]
struct Config<'a> {
    cni_version: Option<String>,
    #[serde(borrow)]
    prev_result: Option<&'a RawValue>,
}

fn main() -> ExitCode {
    let command = std::env::var("CNI_COMMAND").unwrap_or_default();
    let mut input = String::new();
    let _ = std::io::stdin().take(LONGEST).read_to_string(&mut input);
    // Whatever it is, nothing of it is ours any more.
    let config: Config<'_> = serde_json::from_str(&input).unwrap_or_default();
    let version = config.cni_version.as_deref().unwrap_or("1.1.0");
    let version = serde_json::to_string(version).unwrap_or_else(|_| "\"1.1.0\"".to_owned());
    let answer = match command.as_str() {
        "ADD" => config.prev_result.map_or_else(
            || format!("{{\"cniVersion\":{version}}}"),
            |result| result.get().to_owned(),
        ),
        "VERSION" => format!(
            "{{\"cniVersion\":{version},\"supportedVersions\":[\"0.1.0\",\"0.2.0\",\"0.3.0\",\"0.3.1\",\"0.4.0\",\"1.0.0\",\"1.1.0\"]}}"
        ),
        _ => String::new(),
    };
    match std::io::stdout().write_all(answer.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

//! Programs that run, answer and end: the independent tools that tests ask (`ip`, `nft`, `ss`), and CNI plugins.

use std::io::{self, Write};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use anyhow::Context;

use crate::netns::Place;

/// Runs a short-lived program at `place` and gives its exit status and output; for `ip`, `nft`, `ss` and the like.
pub fn output(place: &Place, program: &str, args: &[&str], stdin: &[u8]) -> anyhow::Result<Output> {
    let run = || -> io::Result<Output> {
        let mut command = Command::new(program);
        command
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn()?;
        if let Some(mut pipe) = child.stdin.take() {
            // A program may end without reading its input.
            match pipe.write_all(stdin) {
                Err(error) if error.kind() != io::ErrorKind::BrokenPipe => return Err(error),
                _ => {}
            }
        }
        child.wait_with_output()
    };
    place
        .run(run)
        .with_context(|| format!("running {program} {}", args.join(" ")))
}

/// As [`output`], but an exit status other than 0 is an error, and stdout is text.
pub fn text(place: &Place, program: &str, args: &[&str], stdin: &[u8]) -> anyhow::Result<String> {
    let output = output(place, program, args, stdin)?;
    anyhow::ensure!(
        output.status.success(),
        "{program} {}: {}: {}",
        args.join(" "),
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// As [`text`], parsed: for `ip -j`, `nft -j`.
pub fn json(place: &Place, program: &str, args: &[&str]) -> anyhow::Result<serde_json::Value> {
    let text = text(place, program, args, b"")?;
    serde_json::from_str(if text.trim().is_empty() { "[]" } else { &text })
        .with_context(|| format!("output of {program} {}", args.join(" ")))
}

/// Starts `program` from the calling thread, in its namespaces, without a fork of this process's memory
/// (posix_spawn), with exactly `env`. For the CNI runner.
pub(crate) fn start_captured(
    program: &Path,
    args: &[String],
    env: &[(String, String)],
    stdin: &[u8],
) -> io::Result<Child> {
    let mut command = Command::new(program);
    command
        .args(args)
        .env_clear()
        .envs(env.iter().map(|(k, v)| (k, v)));
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn()?;
    if let Some(mut pipe) = child.stdin.take() {
        // A plugin may end without reading its input.
        let _ = pipe.write_all(stdin);
    }
    Ok(child)
}

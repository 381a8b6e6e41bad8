//! One execution of one plugin.

use std::io;
use std::path::Path;
use std::process::ExitStatus;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::netns::Place;
use crate::process::start_captured;

/// A plugin that has not ended after this is killed.
pub const PLUGIN_DEADLINE: Duration = Duration::from_secs(30);

/// What one execution of a plugin gave.
#[derive(Debug, Clone)]
pub struct Execution {
    /// `type` of the plugin.
    pub plugin: String,
    /// Exit status.
    pub status: ExitStatus,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// From before exec until the exit was seen.
    pub elapsed: Duration,
}

impl Execution {
    /// Standard output as JSON.
    pub fn json(&self) -> anyhow::Result<Value> {
        serde_json::from_str(&self.stdout).with_context(|| {
            format!(
                "stdout of {}: {:?} (stderr: {})",
                self.plugin, self.stdout, self.stderr
            )
        })
    }
}

/// A plugin that was started.
#[derive(Debug)]
pub struct RunningPlugin {
    plugin: String,
    pid: u32,
    done: mpsc::Receiver<io::Result<Execution>>,
}

/// Starts any program as a plugin, with exactly this environment and stdin.
pub fn start_plugin(
    place: &Place,
    name: &str,
    program: &Path,
    env: Vec<(String, String)>,
    stdin: Vec<u8>,
) -> anyhow::Result<RunningPlugin> {
    start_program(place, name, program, Vec::new(), env, stdin)
}

/// As [`start_plugin`], with arguments: for what a plugin is compared with.
pub fn start_program(
    place: &Place,
    name: &str,
    program: &Path,
    args: Vec<String>,
    env: Vec<(String, String)>,
    stdin: Vec<u8>,
) -> anyhow::Result<RunningPlugin> {
    let (done_sender, done) = mpsc::channel();
    let (pid_sender, pid) = mpsc::channel();
    let (plugin, program) = (name.to_owned(), program.to_owned());
    place.spawn("plugin", move || {
        let started = Instant::now();
        let execution = start_captured(&program, &args, &env, &stdin).and_then(|child| {
            let _ = pid_sender.send(child.id());
            let output = child.wait_with_output()?;
            Ok(Execution {
                plugin,
                status: output.status,
                stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
                stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
                elapsed: started.elapsed(),
            })
        });
        let _ = done_sender.send(execution);
    })?;
    let Ok(pid) = pid.recv() else {
        return Err(done
            .recv()?
            .map_or_else(anyhow::Error::from, |_| anyhow::anyhow!("no pid")))
        .with_context(|| format!("starting plugin {name}"));
    };
    Ok(RunningPlugin {
        plugin: name.to_owned(),
        pid,
        done,
    })
}

impl RunningPlugin {
    /// Process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// SIGKILL; follow with [`RunningPlugin::wait`].
    pub fn kill(&self) {
        if let Ok(pid) = i32::try_from(self.pid) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }

    /// Waits for the end; after [`PLUGIN_DEADLINE`] the plugin is killed and this fails.
    pub fn wait(self) -> anyhow::Result<Execution> {
        if let Ok(done) = self.done.recv_timeout(PLUGIN_DEADLINE) {
            return done.with_context(|| format!("plugin {}", self.plugin));
        }
        self.kill();
        anyhow::bail!(
            "plugin {} did not end within {PLUGIN_DEADLINE:?} and was killed",
            self.plugin
        )
    }
}

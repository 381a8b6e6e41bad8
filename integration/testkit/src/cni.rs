//! Runs a CNI conflist as libcni does: ADD in order, each plugin gets the result before it; DEL in reverse order with
//! the last result; CHECK, STATUS, GC and VERSION (CNI spec 1.1, sections 2 to 4).

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::netns::Place;
use crate::pod::Pod;
use crate::process::start_captured;

/// A plugin that has not ended after this is killed.
pub const PLUGIN_DEADLINE: Duration = Duration::from_secs(30);

/// The attachment a command is about.
#[derive(Debug, Clone)]
pub struct Attachment {
    /// `CNI_CONTAINERID`.
    pub container_id: String,
    /// `CNI_NETNS`; empty: the variable is set but empty, as runtimes do on DEL of a lost sandbox.
    pub netns: String,
    /// `CNI_IFNAME`.
    pub ifname: String,
    /// `CNI_ARGS`.
    pub args: String,
}

impl From<&Pod> for Attachment {
    fn from(pod: &Pod) -> Self {
        Self {
            container_id: pod.container_id().to_owned(),
            netns: pod.netns_path().to_string_lossy().into_owned(),
            ifname: "eth0".to_owned(),
            args: format!(
                "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={};K8S_POD_INFRA_CONTAINER_ID={};K8S_POD_UID={}",
                pod.namespace(),
                pod.name(),
                pod.container_id(),
                pod.uid()
            ),
        }
    }
}

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

/// What a command through the whole chain gave.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Each execution, in order; the last one may have failed.
    pub executions: Vec<Execution>,
    /// ADD: the last result.
    pub result: Option<Value>,
}

impl Outcome {
    /// Whether every plugin exited with 0.
    pub fn succeeded(&self) -> bool {
        self.executions.iter().all(|execution| execution.status.success())
    }

    /// The last execution.
    ///
    /// # Panics
    /// If the chain is empty.
    pub fn last(&self) -> &Execution {
        let Some(last) = self.executions.last() else {
            panic!("the chain has no plugin")
        };
        last
    }

    /// Turns a failed plugin into an error that shows what it printed.
    pub fn ok(self) -> anyhow::Result<Self> {
        if let Some(failed) = self
            .executions
            .iter()
            .find(|execution| !execution.status.success())
        {
            anyhow::bail!(
                "{} {}: {} {}",
                failed.plugin,
                failed.status,
                failed.stdout,
                failed.stderr
            );
        }
        Ok(self)
    }
}

/// A conflist, where its plugins are, and where they run.
#[derive(Debug, Clone)]
pub struct Chain {
    /// Network name.
    pub name: String,
    /// `cniVersion` of the list.
    pub cni_version: String,
    /// Plugin configurations; each has a `type`.
    pub plugins: Vec<Value>,
    /// `CNI_PATH`: searched in order.
    pub bin_dirs: Vec<PathBuf>,
    /// The namespaces that plugins are executed in: the node's.
    pub place: Place,
    /// Further environment variables.
    pub env: Vec<(String, String)>,
}

impl Chain {
    /// A chain of one or more plugin configurations.
    pub fn new(place: &Place, name: &str, cni_version: &str, plugins: Vec<Value>) -> Self {
        Self {
            name: name.to_owned(),
            cni_version: cni_version.to_owned(),
            plugins,
            bin_dirs: vec!["/usr/lib/cni".into(), "/opt/cni/bin".into()],
            place: place.clone(),
            env: Vec::new(),
        }
    }

    /// Also looks for plugins in `dir`, first.
    #[must_use]
    pub fn bin_dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.bin_dirs.insert(0, dir.into());
        self
    }

    /// The configuration of the real `bridge` plugin with `host-local` addresses, leases below `data_dir`.
    pub fn bridge_plugin(bridge: &str, subnet: &str, data_dir: &Path) -> Value {
        json!({
            "type": "bridge", "bridge": bridge, "isGateway": true,
            "ipam": { "type": "host-local", "dataDir": data_dir, "ranges": [[{ "subnet": subnet }]],
                      "routes": [{ "dst": "0.0.0.0/0" }] },
        })
    }

    /// ADD. `first` is the result given to the first plugin: what a primary plugin outside of this chain would have
    /// printed.
    pub fn add(&self, attachment: &Attachment, first: Option<&Value>) -> anyhow::Result<Outcome> {
        let mut executions = Vec::new();
        let mut result = first.cloned();
        for plugin in &self.plugins {
            let execution = self.execute(plugin, "ADD", Some(attachment), result.as_ref())?;
            let succeeded = execution.status.success();
            if succeeded {
                result = Some(execution.json()?);
            }
            executions.push(execution);
            if !succeeded {
                return Ok(Outcome {
                    executions,
                    result: None,
                });
            }
        }
        Ok(Outcome { executions, result })
    }

    /// DEL in reverse order. `result` is what ADD gave.
    pub fn del(&self, attachment: &Attachment, result: Option<&Value>) -> anyhow::Result<Outcome> {
        self.each(self.plugins.iter().rev(), "DEL", Some(attachment), result)
    }

    /// CHECK in order. `result` is what ADD gave.
    pub fn check(&self, attachment: &Attachment, result: Option<&Value>) -> anyhow::Result<Outcome> {
        self.each(self.plugins.iter(), "CHECK", Some(attachment), result)
    }

    /// STATUS of every plugin.
    pub fn status(&self) -> anyhow::Result<Outcome> {
        self.each(self.plugins.iter(), "STATUS", None, None)
    }

    /// VERSION of every plugin.
    pub fn version(&self) -> anyhow::Result<Outcome> {
        self.each(self.plugins.iter(), "VERSION", None, None)
    }

    /// GC: `valid` are the attachments that still exist.
    pub fn gc(&self, valid: &[Attachment]) -> anyhow::Result<Outcome> {
        let valid: Vec<Value> = valid
            .iter()
            .map(|a| json!({ "containerID": a.container_id, "ifname": a.ifname }))
            .collect();
        let plugins: Vec<Value> = self
            .plugins
            .iter()
            .map(|plugin| {
                let mut plugin = plugin.clone();
                plugin["cni.dev/valid-attachments"] = json!(valid);
                plugin
            })
            .collect();
        self.each(plugins.iter(), "GC", None, None)
    }

    fn each<'a>(
        &self,
        plugins: impl Iterator<Item = &'a Value>,
        command: &str,
        attachment: Option<&Attachment>,
        result: Option<&Value>,
    ) -> anyhow::Result<Outcome> {
        let mut executions = Vec::new();
        for plugin in plugins {
            let execution = self.execute(plugin, command, attachment, result)?;
            let succeeded = execution.status.success();
            executions.push(execution);
            if !succeeded {
                break;
            }
        }
        Ok(Outcome {
            executions,
            result: None,
        })
    }

    /// Executes one plugin of the chain once and waits for it.
    pub fn execute(
        &self,
        plugin: &Value,
        command: &str,
        attachment: Option<&Attachment>,
        prev_result: Option<&Value>,
    ) -> anyhow::Result<Execution> {
        self.start(plugin, command, attachment, prev_result)?.wait()
    }

    /// The configuration a plugin reads from its stdin.
    pub fn stdin_of(&self, plugin: &Value, prev_result: Option<&Value>) -> Value {
        let mut config = plugin.clone();
        config["name"] = json!(self.name);
        config["cniVersion"] = json!(self.cni_version);
        if let Some(prev) = prev_result {
            config["prevResult"] = prev.clone();
        }
        config
    }

    /// The environment a plugin gets.
    pub fn env_of(&self, command: &str, attachment: Option<&Attachment>) -> Vec<(String, String)> {
        let path = self
            .bin_dirs
            .iter()
            .map(|dir| dir.to_string_lossy())
            .collect::<Vec<_>>()
            .join(":");
        let mut env = vec![
            ("CNI_COMMAND".to_owned(), command.to_owned()),
            ("CNI_PATH".to_owned(), path),
        ];
        if let Some(a) = attachment {
            for (key, value) in [
                ("CNI_CONTAINERID", &a.container_id),
                ("CNI_NETNS", &a.netns),
                ("CNI_IFNAME", &a.ifname),
                ("CNI_ARGS", &a.args),
            ] {
                env.push((key.to_owned(), value.clone()));
            }
        }
        // Some plugins execute iptables or sysctl.
        env.push(("PATH".to_owned(), "/usr/sbin:/usr/bin:/sbin:/bin".to_owned()));
        env.extend(self.env.iter().cloned());
        env
    }

    /// Starts one plugin of the chain.
    pub fn start(
        &self,
        plugin: &Value,
        command: &str,
        attachment: Option<&Attachment>,
        prev_result: Option<&Value>,
    ) -> anyhow::Result<RunningPlugin> {
        let kind = plugin["type"]
            .as_str()
            .context("a plugin configuration without \"type\"")?;
        let program = self
            .bin_dirs
            .iter()
            .map(|dir| dir.join(kind))
            .find(|path| path.is_file());
        let program = program.with_context(|| format!("no plugin {kind} in {:?}", self.bin_dirs))?;
        let stdin = self.stdin_of(plugin, prev_result).to_string().into_bytes();
        start_plugin(
            &self.place,
            kind,
            &program,
            self.env_of(command, attachment),
            stdin,
        )
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
    let (done_sender, done) = mpsc::channel();
    let (pid_sender, pid) = mpsc::channel();
    let (plugin, program) = (name.to_owned(), program.to_owned());
    place.spawn("plugin", move || {
        let started = Instant::now();
        let execution = start_captured(&program, &env, &stdin).and_then(|captured| {
            let _ = pid_sender.send(captured.child.id());
            let output = captured.child.wait_with_output()?;
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

//! Runs a CNI conflist as libcni does: ADD in order, each plugin gets the result before it; DEL in reverse order with
//! the last result; CHECK, STATUS, GC and VERSION (CNI spec 1.1, sections 2 to 4).

mod running;

use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::{Value, json};

pub use self::running::{Execution, PLUGIN_DEADLINE, RunningPlugin, start_plugin, start_program};
use crate::netns::Place;
use crate::pod::Pod;

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

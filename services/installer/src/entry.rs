//! Our entry in a network configuration list. Its keys are the plugin's; what has the plugin's default is left out.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde::Serialize;
use serde_json::ser::{PrettyFormatter, Serializer};
use sluice_proto::id::InterfaceName;
use sluice_selection::SelectionConfig;

/// Name of the plugin's binary, which is what `type` means (CNI spec section 1).
pub const PLUGIN: &str = "sluice-cni";
/// The name as it stands in a configuration.
pub(crate) const QUOTED: &str = "\"sluice-cni\"";

/// How much the plugin logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// Nothing.
    Off,
    /// What a person must act on.
    Error,
    /// What is degraded.
    Warn,
    /// What changed.
    Info,
    /// What a decision was made of.
    Debug,
}

/// Whether static pods may start undecided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum StaticPods {
    /// They may: a control plane may be made of them.
    Pass,
    /// They may not.
    Refuse,
}

/// What the plugin is told.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Where the sockets are.
    pub run_dir: PathBuf,
    /// How much it logs.
    pub log_level: LogLevel,
    /// Which pods are exempt.
    pub selection: Option<SelectionConfig>,
    /// Whether STATUS may fail.
    pub gate_node: bool,
    /// Static pods.
    pub static_pods: StaticPods,
    /// The redirected interface.
    pub ifname: Option<InterfaceName>,
    /// Where its credentials are, if not at the default place.
    pub kubeconfig: Option<PathBuf>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Json<'a> {
    r#type: &'static str,
    run_dir: &'a Path,
    log_level: LogLevel,
    #[serde(skip_serializing_if = "Option::is_none")]
    kubeconfig: Option<&'a Path>,
    #[serde(skip_serializing_if = "Option::is_none")]
    static_pods: Option<StaticPods>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ifname: Option<&'a InterfaceName>,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<Status>,
    #[serde(skip_serializing_if = "Option::is_none")]
    selection: Option<&'a SelectionConfig>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    gate_node: bool,
}

/// White space of the document around the entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Layout {
    /// All on one line.
    Compact,
    /// One member a line.
    Lines {
        /// Before every line but the first.
        prefix: String,
        /// One step of indentation.
        step: String,
    },
}

impl Entry {
    /// The entry as JSON.
    pub fn render(&self, layout: &Layout) -> Result<String, serde_json::Error> {
        let json = Json {
            r#type: PLUGIN,
            run_dir: &self.run_dir,
            log_level: self.log_level,
            kubeconfig: self.kubeconfig.as_deref(),
            static_pods: (self.static_pods != StaticPods::Pass).then_some(self.static_pods),
            ifname: self.ifname.as_ref(),
            status: self.gate_node.then_some(Status { gate_node: true }),
            selection: self.selection.as_ref(),
        };
        match layout {
            Layout::Compact => serde_json::to_string(&json),
            Layout::Lines { prefix, step } => {
                let mut bytes = Vec::new();
                let formatter = PrettyFormatter::with_indent(step.as_bytes());
                json.serialize(&mut Serializer::with_formatter(&mut bytes, formatter))?;
                // A line break inside a JSON string is written as \n, so each one here is layout.
                Ok(String::from_utf8_lossy(&bytes).replace('\n', &format!("\n{prefix}")))
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn plain() -> Entry {
        Entry {
            run_dir: "/run/sluice".into(),
            log_level: LogLevel::Warn,
            selection: None,
            gate_node: false,
            static_pods: StaticPods::Pass,
            ifname: None,
            kubeconfig: None,
        }
    }

    #[test]
    fn what_has_the_plugins_default_is_left_out() {
        assert_eq!(
            plain().render(&Layout::Compact).unwrap(),
            r#"{"type":"sluice-cni","runDir":"/run/sluice","logLevel":"warn"}"#
        );
    }

    #[test]
    fn lines_are_indented_as_their_neighbours() {
        let layout = Layout::Lines {
            prefix: "    ".into(),
            step: "  ".into(),
        };
        let entry = Entry {
            gate_node: true,
            static_pods: StaticPods::Refuse,
            kubeconfig: Some("/var/lib/sluice/kubeconfig".into()),
            ..plain()
        };
        let expected = r#"{
      "type": "sluice-cni",
      "runDir": "/run/sluice",
      "logLevel": "warn",
      "kubeconfig": "/var/lib/sluice/kubeconfig",
      "staticPods": "refuse",
      "status": {
        "gateNode": true
      }
    }"#;
        assert_eq!(entry.render(&layout).unwrap(), expected);
    }
}

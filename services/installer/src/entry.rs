//! Our entry in a network configuration list, or our network of its own. The keys are the plugin's; what has the plugin's default
//! is left out.

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
    /// It is a whole network configuration, called beside the primary network.
    pub stand_alone: bool,
}

/// The oldest version that has CHECK: whoever calls a network of its own may be older than the container runtime.
const STAND_ALONE_VERSION: &str = "0.4.0";

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Json<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    cni_version: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'static str>,
    r#type: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    stand_alone: Option<bool>,
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
            cni_version: self.stand_alone.then_some(STAND_ALONE_VERSION),
            // The name of the NetworkAttachmentDefinition, too.
            name: self.stand_alone.then_some(PLUGIN),
            r#type: PLUGIN,
            stand_alone: self.stand_alone.then_some(true),
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
            stand_alone: false,
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
    fn a_network_of_its_own_has_a_name_and_a_version() {
        let entry = Entry {
            stand_alone: true,
            ..plain()
        };
        assert_eq!(
            entry.render(&Layout::Compact).unwrap(),
            r#"{"cniVersion":"0.4.0","name":"sluice-cni","type":"sluice-cni","standAlone":true,"runDir":"/run/sluice","logLevel":"warn"}"#
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

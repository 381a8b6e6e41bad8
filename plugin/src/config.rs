//! The network configuration on stdin: what CNI says of it (CNI spec section 1), and our own keys.
//!
//! Reading has two steps, so that a mistake in our keys does not keep DEL from letting go of a pod.

use std::fmt;
use std::path::PathBuf;

use serde::Deserialize;
use serde::de::{Error as _, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;
use sluice_proto::id::{InterfaceName, InvalidId, NetworkName};
use sluice_proto::paths::RunDir;
use sluice_selection::SelectionConfig;

use crate::invocation::Command;
use crate::log::Level;

/// The runtime's list of attachments that still exist (CNI spec section 2, GC).
const VALID_ATTACHMENTS: &str = "cni.dev/valid-attachments";

/// Keys of CNI itself and of the programs that call plugins; they mean nothing to us.
const WELL_KNOWN: &[&str] = &[
    "args",
    "capabilities",
    "deviceID",
    "dns",
    "ipMasq",
    "ipam",
    "pciBusID",
    "runtimeConfig",
    "type",
];

const OUR_KEYS: &str = "ifname, kubeconfig, logLevel, runDir, selection, standAlone, staticPods, status";

/// The network configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    #[error("the network configuration is not JSON")]
    Syntax(#[source] serde_json::Error),
    #[error("the network configuration is malformed")]
    Shape(#[source] serde_json::Error),
    #[error("cniVersion {given:?} is not supported{}; supported are {}", for_command(*command), SpecVersion::list())]
    Version { given: String, command: Option<Command> },
    #[error("name")]
    Name(#[source] InvalidId),
    #[error("unknown key {key:?}; ours are {OUR_KEYS}")]
    UnknownKey { key: String },
    #[error("{path}: {problem}")]
    Value { path: &'static str, problem: String },
    #[error("{VALID_ATTACHMENTS} is missing: without it nothing can be told to be garbage")]
    NoValidAttachments,
    #[error("prevResult is missing: {0} needs the result of ADD")]
    NoPrevResult(&'static str),
}

fn for_command(command: Option<Command>) -> String {
    command.map_or_else(String::new, |command| format!(" for {}", command.as_str()))
}

/// A version of the CNI specification that the plugin speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
#[repr(u8)]
pub(crate) enum SpecVersion {
    V0_3_1,
    V0_4_0,
    V1_0_0,
    #[default]
    V1_1_0,
}

impl SpecVersion {
    pub(crate) const ALL: [Self; 4] = [Self::V0_3_1, Self::V0_4_0, Self::V1_0_0, Self::V1_1_0];
    pub(crate) const LATEST: Self = Self::V1_1_0;

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::V0_3_1 => "0.3.1",
            Self::V0_4_0 => "0.4.0",
            Self::V1_0_0 => "1.0.0",
            Self::V1_1_0 => "1.1.0",
        }
    }

    pub(crate) fn from_u8(number: u8) -> Self {
        Self::ALL
            .into_iter()
            .find(|version| *version as u8 == number)
            .unwrap_or_default()
    }

    fn list() -> String {
        Self::ALL.map(Self::as_str).join(", ")
    }
}

/// `cniVersion` as the configuration has it; `None`: it has none, or is not JSON.
#[derive(Debug, Default)]
pub(crate) struct GivenVersion(Option<String>);

impl GivenVersion {
    pub(crate) fn supported(&self) -> Option<SpecVersion> {
        let given = self.0.as_deref()?;
        SpecVersion::ALL
            .into_iter()
            .find(|version| version.as_str() == given)
    }

    /// The version, if the plugin speaks it and it has the command. A configuration without a version is of
    /// version 0.1.0; one that is not JSON is left to [`NetworkConfig::parse`].
    pub(crate) fn require(&self, command: Command) -> Result<SpecVersion, ConfigError> {
        let since = match command {
            Command::Add | Command::Del | Command::Version => SpecVersion::V0_3_1,
            Command::Check => SpecVersion::V0_4_0,
            Command::Gc | Command::Status => SpecVersion::V1_1_0,
        };
        match self.supported() {
            Some(version) if version >= since => Ok(version),
            supported => Err(ConfigError::Version {
                given: self.0.clone().unwrap_or_else(|| "0.1.0".into()),
                command: supported.map(|_| command),
            }),
        }
    }

    pub(crate) fn text(&self) -> &str {
        self.0.as_deref().unwrap_or(SpecVersion::LATEST.as_str())
    }
}

/// Reads nothing but `cniVersion`.
pub(crate) fn peek_version(input: &[u8]) -> Result<GivenVersion, ConfigError> {
    #[derive(Deserialize)]
    struct Peek {
        #[serde(rename = "cniVersion")]
        cni_version: Option<String>,
    }
    serde_json::from_slice::<Peek>(input)
        .map(|peek| GivenVersion(peek.cni_version))
        .map_err(from_json)
}

fn from_json(error: serde_json::Error) -> ConfigError {
    if error.is_data() {
        ConfigError::Shape(error)
    } else {
        ConfigError::Syntax(error)
    }
}

/// The configuration of one run.
#[derive(Debug)]
pub(crate) struct NetworkConfig<'a> {
    /// Name of the configuration list.
    pub(crate) name: NetworkName,
    /// The result of the plugins before us, as it came: byte for byte.
    pub(crate) prev_result: Option<&'a str>,
    valid_attachments: Option<Vec<ValidAttachment>>,
    ours: OurKeys<'a>,
}

/// An attachment that the runtime still knows.
#[derive(Debug, Deserialize)]
pub(crate) struct ValidAttachment {
    #[serde(rename = "containerID")]
    pub(crate) container_id: String,
    pub(crate) ifname: String,
}

#[derive(Debug, Default)]
struct OurKeys<'a> {
    ifname: Option<&'a RawValue>,
    kubeconfig: Option<&'a RawValue>,
    log_level: Option<&'a RawValue>,
    run_dir: Option<&'a RawValue>,
    selection: Option<&'a RawValue>,
    stand_alone: Option<&'a RawValue>,
    static_pods: Option<&'a RawValue>,
    status: Option<&'a RawValue>,
    unknown: Option<String>,
}

/// Our own settings.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// Where the sockets are. Key `runDir`.
    pub(crate) run_dir: RunDir,
    /// Which pods are exempt, and what the executor compares. Key `selection`; `None`: the conflist has none.
    pub(crate) selection: Option<SelectionConfig>,
    /// The interface that is redirected; any other of the sandbox passes. Key `ifname`.
    pub(crate) ifname: InterfaceName,
    kubeconfig: Option<PathBuf>,
    /// Whether the configuration is a network of its own and not the end of the primary's chain. Key `standAlone`.
    pub(crate) stand_alone: bool,
    /// What becomes of a static pod that nobody can place. Key `staticPods`.
    pub(crate) static_pods: StaticPods,
    /// Key `logLevel`.
    pub(crate) log_level: Level,
    /// Whether STATUS may fail. Key `status.gateNode`.
    pub(crate) gate_node: bool,
}

impl<'a> NetworkConfig<'a> {
    /// Reads the configuration; our own keys are only taken down.
    pub(crate) fn parse(input: &'a [u8]) -> Result<Self, ConfigError> {
        let raw: RawConfig<'a> = serde_json::from_slice(input).map_err(from_json)?;
        Ok(Self {
            name: NetworkName::parse(raw.name).map_err(ConfigError::Name)?,
            prev_result: raw.prev_result.map(RawValue::get).filter(|text| *text != "null"),
            valid_attachments: raw.valid_attachments,
            ours: raw.ours,
        })
    }

    /// GC's list.
    pub(crate) fn valid_attachments(&self) -> Result<&[ValidAttachment], ConfigError> {
        self.valid_attachments
            .as_deref()
            .ok_or(ConfigError::NoValidAttachments)
    }

    /// Reads our own keys.
    pub(crate) fn settings(&self) -> Result<Settings, ConfigError> {
        let ours = &self.ours;
        if let Some(key) = &ours.unknown {
            return Err(ConfigError::UnknownKey { key: key.clone() });
        }
        let default = Settings::default();
        Ok(Settings {
            run_dir: read_path("runDir", ours.run_dir)?.map_or(default.run_dir, RunDir::new),
            kubeconfig: read_path("kubeconfig", ours.kubeconfig)?,
            static_pods: read("staticPods", ours.static_pods)?.unwrap_or(default.static_pods),
            selection: read("selection", ours.selection)?,
            ifname: read("ifname", ours.ifname)?.unwrap_or(default.ifname),
            stand_alone: read("standAlone", ours.stand_alone)?.unwrap_or(default.stand_alone),
            log_level: read("logLevel", ours.log_level)?.unwrap_or(default.log_level),
            gate_node: read::<StatusSettings>("status", ours.status)?.is_some_and(|status| status.gate_node),
        })
    }
}

impl Settings {
    /// What an installation without any settings of its own has.
    pub(crate) fn default() -> Self {
        Self {
            run_dir: RunDir::default(),
            selection: None,
            ifname: InterfaceName::default(),
            kubeconfig: None,
            stand_alone: false,
            static_pods: StaticPods::Pass,
            log_level: Level::Warn,
            gate_node: false,
        }
    }

    /// The interface that a call for `called` is about. A network of its own makes none: whatever its interface would be
    /// called, it is about the pod's first.
    pub(crate) fn subject<'a>(&'a self, called: &'a InterfaceName) -> &'a InterfaceName {
        if self.stand_alone { &self.ifname } else { called }
    }

    /// With what the API server is asked when the agent is away. Key `kubeconfig`.
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.kubeconfig
            .clone()
            .unwrap_or_else(|| self.run_dir.kubeconfig())
    }
}

/// What becomes of a static pod while neither agent nor API server can say whether it is in the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum StaticPods {
    /// It starts unprotected: the control plane itself may be made of such pods.
    Pass,
    /// It waits, as any other.
    Refuse,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct StatusSettings {
    #[serde(default)]
    gate_node: bool,
}

fn read_path(key: &'static str, raw: Option<&RawValue>) -> Result<Option<PathBuf>, ConfigError> {
    match read::<String>(key, raw)? {
        Some(path) if !path.starts_with('/') => Err(ConfigError::Value {
            path: key,
            problem: format!("{path:?} is not valid: an absolute path"),
        }),
        path => Ok(path.map(PathBuf::from)),
    }
}

fn read<'a, T: Deserialize<'a>>(
    path: &'static str,
    raw: Option<&'a RawValue>,
) -> Result<Option<T>, ConfigError> {
    let Some(raw) = raw else { return Ok(None) };
    serde_json::from_str(raw.get()).map(Some).map_err(|error| {
        // The place within the fragment would be taken for a place in the file.
        let text = error.to_string();
        let end = text.rfind(" at line ").unwrap_or(text.len());
        ConfigError::Value {
            path,
            problem: text[..end].to_owned(),
        }
    })
}

#[derive(Debug, Default)]
struct RawConfig<'a> {
    name: String,
    prev_result: Option<&'a RawValue>,
    valid_attachments: Option<Vec<ValidAttachment>>,
    ours: OurKeys<'a>,
}

// By hand, because serde can refuse unknown keys only all or none, and `cni.dev/*` is the runtime's.
impl<'de> Deserialize<'de> for RawConfig<'de> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ConfigVisitor)
    }
}

struct ConfigVisitor;

impl<'de> Visitor<'de> for ConfigVisitor {
    type Value = RawConfig<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a network configuration (a JSON object)")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawConfig<'de>, A::Error> {
        let mut config = RawConfig::default();
        let mut name = None;
        while let Some(key) = map.next_key::<std::borrow::Cow<'de, str>>()? {
            match &*key {
                "name" => name = Some(map.next_value()?),
                "prevResult" => config.prev_result = Some(map.next_value()?),
                // Go writes an empty list as null.
                VALID_ATTACHMENTS => {
                    config.valid_attachments = Some(map.next_value::<Option<_>>()?.unwrap_or_default());
                }
                "ifname" => config.ours.ifname = Some(map.next_value()?),
                "kubeconfig" => config.ours.kubeconfig = Some(map.next_value()?),
                "logLevel" => config.ours.log_level = Some(map.next_value()?),
                "runDir" => config.ours.run_dir = Some(map.next_value()?),
                "selection" => config.ours.selection = Some(map.next_value()?),
                "standAlone" => config.ours.stand_alone = Some(map.next_value()?),
                "staticPods" => config.ours.static_pods = Some(map.next_value()?),
                "status" => config.ours.status = Some(map.next_value()?),
                "cniVersion" => {
                    let _: IgnoredAny = map.next_value()?;
                }
                known if WELL_KNOWN.contains(&known) || known.starts_with("cni.dev/") => {
                    let _: IgnoredAny = map.next_value()?;
                }
                unknown => {
                    config
                        .ours
                        .unknown
                        .get_or_insert(unknown.chars().take(64).collect());
                    let _: IgnoredAny = map.next_value()?;
                }
            }
        }
        config.name = name.ok_or_else(|| A::Error::missing_field("name"))?;
        Ok(config)
    }
}

//! What a pod may ask for itself: annotations parsed into typed values, and a warning for each that is not valid.
//!
//! Annotations are untrusted text. Nothing of them reaches a rule except as a boolean or as a value that the
//! caller's type has accepted.

use std::fmt;
use std::str::FromStr;

use crate::Labels;

/// `true`: inbound plaintext is not redirected.
pub const BYPASS_INBOUND_CAPTURE: &str = "ambient.istio.io/bypass-inbound-capture";

/// Overrides the node's DNS setting in either direction.
pub const DNS_CAPTURE: &str = "ambient.istio.io/dns-capture";

/// Comma-separated names of interfaces whose arriving TCP counts as outbound.
pub const REROUTE_VIRTUAL_INTERFACES: &str = "istio.io/reroute-virtual-interfaces";

/// How many virtual interfaces a pod may name; the rest is ignored with a warning.
pub const MAX_VIRTUAL_INTERFACES: usize = 16;

/// A pod's own settings. `I` is the type of an interface name, which checks what may be one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overrides<I> {
    /// Leave inbound plaintext alone.
    pub bypass_inbound_capture: bool,
    /// Redirect DNS or not; `None`: as the node is set.
    pub dns_capture: Option<bool>,
    /// TCP arriving on these counts as outbound; in the order given, each once.
    pub virtual_interfaces: Vec<I>,
    /// What was ignored.
    pub warnings: Vec<OverrideWarning>,
}

/// An annotation, or one item of it, that is ignored because it is not valid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverrideWarning {
    /// The annotation's key.
    pub annotation: &'static str,
    /// The offending value, cut to 64 characters.
    pub value: String,
    /// What is allowed.
    pub allowed: String,
}

impl fmt::Display for OverrideWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "annotation {}: {:?} is ignored: {}",
            self.annotation, self.value, self.allowed
        )
    }
}

impl<I> Overrides<I>
where
    I: FromStr + PartialEq,
    I::Err: fmt::Display,
{
    /// Reads a pod's annotations. Never fails: what is not valid counts as absent and is reported.
    pub fn parse(annotations: &Labels) -> Self {
        let mut warnings = Vec::new();
        let mut boolean = |key| parse_boolean(annotations, key, &mut warnings);
        let bypass_inbound_capture = boolean(BYPASS_INBOUND_CAPTURE).unwrap_or(false);
        let dns_capture = boolean(DNS_CAPTURE);
        let virtual_interfaces = parse_interfaces(annotations, &mut warnings);
        Self {
            bypass_inbound_capture,
            dns_capture,
            virtual_interfaces,
            warnings,
        }
    }
}

/// Exactly what Go's `strconv.ParseBool` takes.
fn parse_boolean(
    annotations: &Labels,
    key: &'static str,
    warnings: &mut Vec<OverrideWarning>,
) -> Option<bool> {
    let value = annotations.get(key)?;
    match value.as_str() {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Some(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Some(false),
        _ => {
            warnings.push(warning(
                key,
                value,
                "true or false (also 1, t, T, TRUE, True, 0, f, F, FALSE, False)",
            ));
            None
        }
    }
}

fn parse_interfaces<I>(annotations: &Labels, warnings: &mut Vec<OverrideWarning>) -> Vec<I>
where
    I: FromStr + PartialEq,
    I::Err: fmt::Display,
{
    const KEY: &str = REROUTE_VIRTUAL_INTERFACES;
    let mut interfaces = Vec::new();
    let list = annotations.get(KEY).map_or("", String::as_str);
    for item in list.split(',').map(str::trim).filter(|item| !item.is_empty()) {
        match item.parse::<I>() {
            Ok(interface) if interfaces.contains(&interface) => {}
            Ok(_) if interfaces.len() == MAX_VIRTUAL_INTERFACES => {
                let allowed = format!("at most {MAX_VIRTUAL_INTERFACES} interfaces");
                warnings.push(warning(KEY, item, allowed));
                break;
            }
            Ok(interface) => interfaces.push(interface),
            // One warning is enough to find the annotation; a hostile one must not fill the log.
            Err(_) if warnings.len() >= MAX_VIRTUAL_INTERFACES => break,
            Err(error) => warnings.push(warning(KEY, item, error.to_string())),
        }
    }
    interfaces
}

fn warning(annotation: &'static str, value: &str, allowed: impl Into<String>) -> OverrideWarning {
    OverrideWarning {
        annotation,
        value: value.chars().take(64).collect(),
        allowed: allowed.into(),
    }
}

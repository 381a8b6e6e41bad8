//! Kubernetes label selectors: parsing with validation, matching, and saying why one did or did not match.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Labels;

/// A value in the configuration that cannot mean anything.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {value:?} is not valid: {allowed}")]
pub struct InvalidConfig {
    /// Where in the configuration, e.g. `enablementSelectors[1].podSelector.matchExpressions[0].operator`.
    pub path: String,
    /// What stands there.
    pub value: String,
    /// What is allowed there.
    pub allowed: &'static str,
}

/// How a requirement compares a label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operator {
    /// The label is present and its value is one of the listed.
    In,
    /// The label is absent, or its value is none of the listed.
    NotIn,
    /// The label is present.
    Exists,
    /// The label is absent.
    DoesNotExist,
}

impl Operator {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "In" => Some(Self::In),
            "NotIn" => Some(Self::NotIn),
            "Exists" => Some(Self::Exists),
            "DoesNotExist" => Some(Self::DoesNotExist),
            _ => None,
        }
    }

    /// As Kubernetes writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::In => "In",
            Self::NotIn => "NotIn",
            Self::Exists => "Exists",
            Self::DoesNotExist => "DoesNotExist",
        }
    }
}

/// One condition on one label. Displays as Kubernetes prints selectors: `a=b`, `a in (b,c)`, `a notin (b)`, `a`, `!a`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Requirement {
    /// The label's key.
    pub key: String,
    /// How it is compared.
    pub operator: Operator,
    /// With what; empty for `Exists` and `DoesNotExist`.
    pub values: Vec<String>,
}

impl Requirement {
    /// Whether the labels meet this requirement.
    pub fn matches(&self, labels: &Labels) -> bool {
        let value = labels.get(&self.key);
        match self.operator {
            Operator::In => value.is_some_and(|v| self.values.contains(v)),
            Operator::NotIn => !value.is_some_and(|v| self.values.contains(v)),
            Operator::Exists => value.is_some(),
            Operator::DoesNotExist => value.is_none(),
        }
    }

    /// The label as it stands on the object, in words: `label a=b` or `no label a`.
    pub(crate) fn observed(&self, whose: &str, labels: &Labels) -> String {
        match labels.get(&self.key) {
            Some(value) => format!("{whose} label {}={value}", self.key),
            None => format!("no {whose} label {}", self.key),
        }
    }
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = &self.key;
        match (self.operator, self.values.as_slice()) {
            (Operator::In, [one]) => write!(f, "{key}={one}"),
            (Operator::In, values) => write!(f, "{key} in ({})", values.join(",")),
            (Operator::NotIn, values) => write!(f, "{key} notin ({})", values.join(",")),
            (Operator::Exists, _) => f.write_str(key),
            (Operator::DoesNotExist, _) => write!(f, "!{key}"),
        }
    }
}

/// A Kubernetes `LabelSelector`: every requirement must be met, and one without any matches everything.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Deserialize)]
#[serde(try_from = "RawSelector")]
pub struct LabelSelector {
    requirements: Vec<Requirement>,
}

impl LabelSelector {
    /// Whether the labels meet every requirement.
    pub fn matches(&self, labels: &Labels) -> bool {
        self.first_unmet(labels).is_none()
    }

    /// The first requirement that the labels do not meet.
    pub fn first_unmet(&self, labels: &Labels) -> Option<&Requirement> {
        self.requirements
            .iter()
            .find(|requirement| !requirement.matches(labels))
    }

    /// No requirement at all: matches everything.
    pub fn is_empty(&self) -> bool {
        self.requirements.is_empty()
    }

    /// All requirements, `matchLabels` first in the order of their keys.
    pub fn requirements(&self) -> &[Requirement] {
        &self.requirements
    }

    /// A selector that needs one label to have one value.
    pub(crate) fn label(key: &str, value: &str) -> Self {
        Self::one(key, Operator::In, value)
    }

    pub(crate) fn one(key: &str, operator: Operator, value: &str) -> Self {
        Self {
            requirements: vec![Requirement {
                key: key.into(),
                operator,
                values: vec![value.into()],
            }],
        }
    }

    /// Checks what was read, as Kubernetes does, and names the place of what is wrong.
    pub(crate) fn compile(raw: RawSelector, path: &str) -> Result<Self, InvalidConfig> {
        let mut requirements = Vec::new();
        for (key, value) in raw.match_labels.unwrap_or_default() {
            let path = format!("{path}matchLabels.{key}");
            check_key(&path, &key)?;
            check_value(&path, &value)?;
            requirements.push(Requirement {
                key,
                operator: Operator::In,
                values: vec![value],
            });
        }
        for (index, raw) in raw.match_expressions.unwrap_or_default().into_iter().enumerate() {
            requirements.push(compile_requirement(
                raw,
                &format!("{path}matchExpressions[{index}]"),
            )?);
        }
        Ok(Self { requirements })
    }
}

impl Serialize for LabelSelector {
    /// As `matchExpressions`, which can say everything.
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let expressions = self.requirements.iter().map(|requirement| RawRequirement {
            key: requirement.key.clone(),
            operator: requirement.operator.as_str().into(),
            values: Some(requirement.values.clone()),
        });
        RawSelector {
            match_labels: None,
            match_expressions: Some(expressions.collect()),
        }
        .serialize(serializer)
    }
}

impl TryFrom<RawSelector> for LabelSelector {
    type Error = InvalidConfig;
    fn try_from(raw: RawSelector) -> Result<Self, InvalidConfig> {
        Self::compile(raw, "")
    }
}

/// The selector as written.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct RawSelector {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    match_labels: Option<Labels>,
    #[serde(default)]
    match_expressions: Option<Vec<RawRequirement>>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRequirement {
    key: String,
    operator: String,
    #[serde(default)]
    values: Option<Vec<String>>,
}

fn compile_requirement(raw: RawRequirement, path: &str) -> Result<Requirement, InvalidConfig> {
    check_key(&format!("{path}.key"), &raw.key)?;
    let operator = Operator::parse(&raw.operator).ok_or_else(|| InvalidConfig {
        path: format!("{path}.operator"),
        value: raw.operator.clone(),
        allowed: "one of In, NotIn, Exists, DoesNotExist",
    })?;
    let values = raw.values.unwrap_or_default();
    let allowed = match operator {
        Operator::In | Operator::NotIn if values.is_empty() => Some("at least one value with In and NotIn"),
        Operator::Exists | Operator::DoesNotExist if !values.is_empty() => {
            Some("no values with Exists and DoesNotExist")
        }
        _ => None,
    };
    if let Some(allowed) = allowed {
        return Err(InvalidConfig {
            path: format!("{path}.values"),
            value: values.join(","),
            allowed,
        });
    }
    for (index, value) in values.iter().enumerate() {
        check_value(&format!("{path}.values[{index}]"), value)?;
    }
    Ok(Requirement {
        key: raw.key,
        operator,
        values,
    })
}

/// A label's key: an optional DNS subdomain and '/', then a name (Kubernetes `validation.IsQualifiedName`).
fn check_key(path: &str, key: &str) -> Result<(), InvalidConfig> {
    let (prefix, name) = key
        .split_once('/')
        .map_or((None, key), |(prefix, name)| (Some(prefix), name));
    if is_name(name) && prefix.is_none_or(is_dns_subdomain) {
        return Ok(());
    }
    Err(InvalidConfig {
        path: path.into(),
        value: key.chars().take(128).collect(),
        allowed: "a label key: [DNS subdomain '/'] and 1 to 63 letters, digits, '-', '_', '.', \
                  beginning and ending with a letter or digit",
    })
}

/// A label's value (Kubernetes `validation.IsValidLabelValue`).
fn check_value(path: &str, value: &str) -> Result<(), InvalidConfig> {
    if value.is_empty() || is_name(value) {
        return Ok(());
    }
    Err(InvalidConfig {
        path: path.into(),
        value: value.chars().take(128).collect(),
        allowed: "a label value: empty, or 1 to 63 letters, digits, '-', '_', '.', \
                  beginning and ending with a letter or digit",
    })
}

fn is_name(name: &str) -> bool {
    let alphanumeric = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = name.as_bytes();
    bytes.len() <= 63
        && alphanumeric(bytes.first())
        && alphanumeric(bytes.last())
        && bytes
            .iter()
            .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(b))
}

/// RFC 1123 labels joined by '.'.
pub(crate) fn is_dns_subdomain(name: &str) -> bool {
    name.len() <= 253 && name.split('.').all(is_dns_label)
}

/// RFC 1123 label, its length apart.
pub(crate) fn is_dns_label(label: &str) -> bool {
    !label.is_empty()
        && !label.starts_with('-')
        && !label.ends_with('-')
        && label
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

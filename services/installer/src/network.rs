//! A network configuration as runtimes read it (CNI spec section 1; libcni decides what is valid), with the places of
//! its parts in the text, so that an edit can leave everything else as it is.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// Versions of the CNI specification that our plugin speaks, oldest first.
pub(crate) const SUPPORTED_VERSIONS: [&str; 4] = ["0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// A runtime would not load the file, and why.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Invalid {
    #[error("it is not UTF-8 text")]
    Text,
    #[error("it is not one JSON object")]
    Json(#[source] serde_json::Error),
    #[error("{key} is missing")]
    Missing { key: &'static str },
    #[error("{key} is not {allowed}")]
    Shape {
        key: &'static str,
        allowed: &'static str,
    },
    #[error("plugin {index}: {key} is not {allowed}")]
    Plugin {
        index: usize,
        key: &'static str,
        allowed: &'static str,
    },
    #[error("its plugins would come from files, and {problem}")]
    DropIns { problem: String },
}

/// Members of a JSON object in their order, values unread.
#[derive(Debug)]
pub(crate) struct Object<'a>(pub(crate) Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'a> Object<'a> {
    pub(crate) fn parse(text: &'a str) -> Result<Self, Invalid> {
        serde_json::from_str(text).map_err(Invalid::Json)
    }

    /// The value of `key`; of several the last one, as every reader has it.
    pub(crate) fn get(&self, key: &str) -> Option<&'a RawValue> {
        let found = self.0.iter().rev().find(|(name, _)| name == key);
        found.map(|(_, value)| *value)
    }

    fn read<T: Deserialize<'a>>(
        &self,
        key: &'static str,
        allowed: &'static str,
    ) -> Result<Option<T>, Invalid> {
        self.get(key)
            .map(|raw| serde_json::from_str(raw.get()).map_err(|_| Invalid::Shape { key, allowed }))
            .transpose()
    }
}

impl<'de> Deserialize<'de> for Object<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = Object<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object<'de>, A::Error> {
                let mut members = Vec::new();
                while let Some(key) = map.next_key::<Cow<'de, str>>()? {
                    members.push((key, map.next_value()?));
                }
                Ok(Object(members))
            }
        }
        deserializer.deserialize_map(Members)
    }
}

/// One plugin of a list.
#[derive(Debug, Clone)]
pub(crate) struct Plugin<'a> {
    /// Name of its binary.
    pub(crate) kind: String,
    /// Its configuration as it stands in the file.
    pub(crate) raw: &'a str,
}

/// A list of plugins (`.conflist`).
#[derive(Debug)]
pub(crate) struct List<'a> {
    pub(crate) object: Object<'a>,
    pub(crate) name: String,
    /// `None`: it has none inline.
    pub(crate) plugins: Option<Vec<Plugin<'a>>>,
    /// Plugins are not appended from files.
    pub(crate) only_inlined: bool,
    /// Whether our plugin speaks a version that the runtime may choose.
    pub(crate) version: Versions,
}

/// `cniVersion` and `cniVersions` of a configuration.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Versions {
    pub(crate) one: Option<String>,
    pub(crate) many: Vec<String>,
}

impl Versions {
    /// Runtimes before 1.1.0 know only `cniVersion`; later ones take the highest of both.
    pub(crate) fn supported(&self) -> bool {
        let mut all = self.one.iter().chain(&self.many);
        all.any(|version| SUPPORTED_VERSIONS.contains(&version.as_str()))
    }

    /// For messages.
    pub(crate) fn text(&self) -> String {
        let all: Vec<&str> = self.one.iter().chain(&self.many).map(String::as_str).collect();
        if all.is_empty() {
            "no version".to_owned()
        } else {
            all.join(", ")
        }
    }
}

/// A single plugin (`.conf`, `.json`).
#[derive(Debug)]
pub(crate) struct Single {
    pub(crate) kind: String,
    pub(crate) name: Option<String>,
    pub(crate) version: Option<String>,
}

/// A configuration of either form.
#[derive(Debug)]
pub(crate) enum Network<'a> {
    List(List<'a>),
    Single(Single),
}

/// Text of a file.
pub(crate) fn text(bytes: &[u8]) -> Result<&str, Invalid> {
    std::str::from_utf8(bytes).map_err(|_| Invalid::Text)
}

impl<'a> Network<'a> {
    /// Reads a file as runtimes do, which go by its name.
    pub(crate) fn parse(file_name: &str, bytes: &'a [u8]) -> Result<Self, Invalid> {
        let text = text(bytes)?;
        if has_extension(file_name, "conflist") {
            List::parse(text).map(Self::List)
        } else {
            Single::parse(text).map(Self::Single)
        }
    }
}

impl<'a> List<'a> {
    pub(crate) fn parse(text: &'a str) -> Result<Self, Invalid> {
        let object = Object::parse(text)?;
        let name: String = object
            .read("name", "a string")?
            .ok_or(Invalid::Missing { key: "name" })?;
        let version = Versions {
            one: object.read("cniVersion", "a string")?,
            many: object
                .read::<Vec<String>>("cniVersions", "a list of versions")?
                .unwrap_or_default(),
        };
        if version.many.iter().any(|version| !is_version(version)) {
            return Err(Invalid::Shape {
                key: "cniVersions",
                allowed: "a list of versions",
            });
        }
        for key in ["disableCheck", "disableGC"] {
            flag(&object, key)?;
        }
        let only_inlined = flag(&object, "loadOnlyInlinedPlugins")?;
        let plugins = object.get("plugins").map(plugins).transpose()?;
        if plugins.is_none() && only_inlined {
            return Err(Invalid::Missing { key: "plugins" });
        }
        Ok(Self {
            object,
            name,
            plugins,
            only_inlined,
            version,
        })
    }
}

impl Single {
    pub(crate) fn parse(text: &str) -> Result<Self, Invalid> {
        let object = Object::parse(text)?;
        let kind = plugin_type(&object, 0).map_err(|_| Invalid::Missing { key: "type" })?;
        Ok(Self {
            kind,
            name: object.read("name", "a string")?,
            version: object.read("cniVersion", "a string")?,
        })
    }
}

fn plugins(raw: &RawValue) -> Result<Vec<Plugin<'_>>, Invalid> {
    let shape = Invalid::Shape {
        key: "plugins",
        allowed: "a list of at least one plugin",
    };
    let Ok(elements) = serde_json::from_str::<Vec<&RawValue>>(raw.get()) else {
        return Err(shape);
    };
    if elements.is_empty() {
        return Err(shape);
    }
    elements
        .into_iter()
        .enumerate()
        .map(|(index, raw)| {
            let not_object = Invalid::Plugin {
                index,
                key: "it",
                allowed: "an object",
            };
            let object = Object::parse(raw.get()).map_err(|_| not_object)?;
            Ok(Plugin {
                kind: plugin_type(&object, index)?,
                raw: raw.get(),
            })
        })
        .collect()
}

/// `type` of a plugin whose well-known members have the types that libcni decodes them into.
fn plugin_type(object: &Object<'_>, index: usize) -> Result<String, Invalid> {
    let invalid = |key, allowed| Invalid::Plugin { index, key, allowed };
    let is = |key, allowed, valid: fn(&str) -> bool| match object.get(key) {
        Some(raw) if raw.get() != "null" && !valid(raw.get()) => Err(invalid(key, allowed)),
        _ => Ok(()),
    };
    is("capabilities", "an object of booleans", |raw| {
        serde_json::from_str::<BTreeMap<String, bool>>(raw).is_ok()
    })?;
    is("ipam", "an object", |raw| Object::parse(raw).is_ok())?;
    is("dns", "an object", |raw| Object::parse(raw).is_ok())?;
    let kind: Option<String> = object
        .get("type")
        .and_then(|raw| serde_json::from_str(raw.get()).ok());
    kind.filter(|kind| !kind.is_empty())
        .ok_or_else(|| invalid("type", "a string that is not empty"))
}

/// A boolean, or as libcni allows the word in any letter case.
fn flag(object: &Object<'_>, key: &'static str) -> Result<bool, Invalid> {
    let Some(raw) = object.get(key) else {
        return Ok(false);
    };
    if let Ok(value) = serde_json::from_str::<bool>(raw.get()) {
        return Ok(value);
    }
    let word = serde_json::from_str::<String>(raw.get()).unwrap_or_default();
    match word.to_ascii_lowercase().as_str() {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(Invalid::Shape {
            key,
            allowed: "true or false",
        }),
    }
}

/// Numbers joined by dots, at most three, as libcni parses them.
fn is_version(text: &str) -> bool {
    let parts: Vec<&str> = text.split('.').collect();
    parts.len() <= 3 && parts.iter().all(|part| part.parse::<u32>().is_ok())
}

/// Whether `name` ends in `.extension`, letter case included.
pub(crate) fn has_extension(name: &str, extension: &str) -> bool {
    name.rsplit_once('.').is_some_and(|(_, found)| found == extension)
}

/// Where `part`, a piece of `text`, stands in it.
pub(crate) fn span(text: &str, part: &str) -> Range<usize> {
    let start = (part.as_ptr() as usize).saturating_sub(text.as_ptr() as usize);
    start..start + part.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(name: &str, text: &str) -> Option<String> {
        Network::parse(name, text.as_bytes())
            .err()
            .map(|error| error.to_string())
    }

    #[test]
    fn a_list_is_valid_exactly_if_libcni_loads_it() {
        for good in [
            r#"{"name":"n","plugins":[{"type":"ptp"}]}"#,
            r#"{"name":"n","cniVersion":"1.0.0","cniVersions":["9.9.9"],"plugins":[{"type":"ptp","ipam":null}]}"#,
            r#"{"name":"n","disableCheck":"TRUE","disableGC":false,"plugins":[{"type":"ptp"}]}"#,
            r#"{"name":"n"}"#,
        ] {
            assert_eq!(problem("a.conflist", good), None, "{good}");
        }
        for (bad, says) in [
            ("", "it is not one JSON object"),
            ("not json", "it is not one JSON object"),
            ("[]", "it is not one JSON object"),
            (
                r#"{"name":"n","plugins":[{"type":"ptp"}]} x"#,
                "it is not one JSON object",
            ),
            (r#"{"plugins":[{"type":"ptp"}]}"#, "name is missing"),
            (r#"{"name":5,"plugins":[{"type":"ptp"}]}"#, "name is not a string"),
            (
                r#"{"name":"n","plugins":[]}"#,
                "plugins is not a list of at least one plugin",
            ),
            (
                r#"{"name":"n","plugins":{}}"#,
                "plugins is not a list of at least one plugin",
            ),
            (r#"{"name":"n","plugins":[5]}"#, "plugin 0: it is not an object"),
            (
                r#"{"name":"n","plugins":[{"type":""}]}"#,
                "plugin 0: type is not a string that is not empty",
            ),
            (
                r#"{"name":"n","plugins":[{"type":"a"},{}]}"#,
                "plugin 1: type is not a string that is not empty",
            ),
            (
                r#"{"name":"n","plugins":[{"type":"a","ipam":"x"}]}"#,
                "plugin 0: ipam is not an object",
            ),
            (
                r#"{"name":"n","plugins":[{"type":"a","capabilities":{"x":1}}]}"#,
                "plugin 0: capabilities is not an object of booleans",
            ),
            (
                r#"{"name":"n","disableCheck":"yes","plugins":[{"type":"a"}]}"#,
                "disableCheck is not true or false",
            ),
            (
                r#"{"name":"n","cniVersions":["x"],"plugins":[{"type":"a"}]}"#,
                "cniVersions is not a list of versions",
            ),
            (
                r#"{"name":"n","loadOnlyInlinedPlugins":true}"#,
                "plugins is missing",
            ),
        ] {
            assert_eq!(problem("a.conflist", bad).as_deref(), Some(says), "{bad}");
        }
    }

    #[test]
    fn a_single_plugin_needs_a_type() {
        assert_eq!(problem("a.conf", r#"{"type":"macvlan"}"#), None);
        assert_eq!(
            problem("a.conf", r#"{"cniVersion":"1.0.0"}"#).as_deref(),
            Some("type is missing")
        );
        let list = r#"{"name":"n","plugins":[{"type":"ptp"}]}"#;
        assert_eq!(problem("a.conf", list).as_deref(), Some("type is missing"));
    }

    #[test]
    fn of_equal_keys_the_last_counts() {
        let text = r#"{"name":"a","name":"b","plugins":[],"plugins":[{"type":"ptp"}]}"#;
        let list = List::parse(text).unwrap();
        assert_eq!(list.name, "b");
        assert_eq!(list.plugins.unwrap().len(), 1);
    }
}

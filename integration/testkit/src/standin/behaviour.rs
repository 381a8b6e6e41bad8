//! What the stand-in shall do wrong.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// Misbehaviour by message. A key names messages, the most specific wins: `<kind>:<uid>`, `<uid>`, `<kind>`, `*`, with
/// kinds `add`, `keep`, `del`, `snapshot_sent`. For ADDs a pod's `namespace/name` serves as its UID does.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Behaviour {
    /// Answer with this error. As with ztunnel, the netns of a refused ADD is kept until a DEL.
    pub nack: BTreeMap<String, String>,
    /// Wait so many milliseconds before the answer.
    pub delay_ms: BTreeMap<String, u64>,
    /// Stop reading and answering at this message, until the behaviour changes or the peer closes.
    pub silent: BTreeSet<String>,
    /// Answer with bytes that are not a message.
    pub garbage: BTreeSet<String>,
    /// Answer twice.
    pub twice: BTreeSet<String>,
    /// Close the connection instead of answering.
    pub close: BTreeSet<String>,
    /// Do not connect (again) to the ZDS socket.
    pub stay_away: bool,
}

impl Behaviour {
    /// Parses the JSON form.
    pub fn parse(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }

    /// Refuses one message kind or pod with an error text.
    #[must_use]
    pub fn nack(mut self, key: &str, error: &str) -> Self {
        self.nack.insert(key.to_owned(), error.to_owned());
        self
    }

    /// Delays an answer.
    #[must_use]
    pub fn delay_ms(mut self, key: &str, milliseconds: u64) -> Self {
        self.delay_ms.insert(key.to_owned(), milliseconds);
        self
    }

    /// Stops answering at a message.
    #[must_use]
    pub fn silent(mut self, key: &str) -> Self {
        self.silent.insert(key.to_owned());
        self
    }

    /// Answers a message with garbage.
    #[must_use]
    pub fn garbage(mut self, key: &str) -> Self {
        self.garbage.insert(key.to_owned());
        self
    }

    /// Answers a message twice.
    #[must_use]
    pub fn twice(mut self, key: &str) -> Self {
        self.twice.insert(key.to_owned());
        self
    }

    /// Closes the connection at a message.
    #[must_use]
    pub fn close(mut self, key: &str) -> Self {
        self.close.insert(key.to_owned());
        self
    }
}

/// The keys under which a message is looked up, most specific first.
#[derive(Debug)]
pub(super) struct Keys(Vec<String>);

impl Keys {
    pub(super) fn new(kind: &str, uid: &str, pod: Option<&str>) -> Self {
        let mut keys = Vec::with_capacity(6);
        for name in [Some(uid), pod]
            .into_iter()
            .flatten()
            .filter(|name| !name.is_empty())
        {
            keys.push(format!("{kind}:{name}"));
            keys.push(name.to_owned());
        }
        keys.push(kind.to_owned());
        keys.push("*".to_owned());
        Self(keys)
    }

    pub(super) fn find<'a, T>(&self, map: &'a BTreeMap<String, T>) -> Option<&'a T> {
        self.0.iter().find_map(|key| map.get(key))
    }

    pub(super) fn any(&self, set: &BTreeSet<String>) -> bool {
        self.0.iter().any(|key| set.contains(key))
    }
}

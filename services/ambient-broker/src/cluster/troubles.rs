//! What is wrong with the API server right now, by what was asked of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::watch;

use super::failure::ApiError;
use crate::source::Problem;

/// Standing troubles. Clones share them.
#[derive(Debug, Clone)]
pub(super) struct Troubles(Arc<watch::Sender<BTreeMap<&'static str, String>>>);

impl Default for Troubles {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::default()))
    }
}

impl Troubles {
    /// `place` does not work.
    pub(super) fn stand(&self, place: &'static str, error: &ApiError) {
        self.say(place, error.with_advice());
    }

    /// `place` does not work, in words.
    pub(super) fn say(&self, place: &'static str, text: String) {
        self.0.send_if_modified(|troubles| {
            let news = troubles.get(place) != Some(&text);
            troubles.insert(place, text);
            news
        });
    }

    /// `place` works.
    pub(super) fn over(&self, place: &'static str) {
        self.0
            .send_if_modified(|troubles| troubles.remove(place).is_some());
    }

    /// The troubles as they are, and a way to hear of changes.
    pub(super) fn watch(&self) -> watch::Receiver<BTreeMap<&'static str, String>> {
        let mut receiver = self.0.subscribe();
        receiver.mark_changed();
        receiver
    }
}

/// A trouble as the source tells it.
pub(super) fn problem(place: &str, message: &str) -> Problem {
    Problem {
        place: self::place(place),
        line: None,
        field: None,
        message: message.to_owned(),
    }
}

/// How a place is called in problems.
pub(super) fn place(place: &str) -> String {
    format!("Kubernetes API ({place})")
}

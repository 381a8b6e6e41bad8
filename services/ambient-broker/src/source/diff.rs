//! What all files together say, and how that differs from what was told before.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::manifest::Object;
use super::{Namespace, Pod, Problem, SourceEvent};

/// Every object that exists, and everything that is wrong, at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct View {
    pods: BTreeMap<(String, String), Arc<Pod>>,
    namespaces: BTreeMap<String, Arc<Namespace>>,
    problems: BTreeMap<String, Vec<Problem>>,
    /// A file was never valid: it may define anything.
    pub(super) undetermined: bool,
}

impl View {
    /// Adds a file's objects. Files come in the order of their names; of two objects of one name the first stays, and
    /// the second is a problem of its file.
    pub(super) fn add(&mut self, place: &str, objects: &[Object]) {
        for object in objects {
            let (kind, name, taken) = match object {
                Object::Pod(pod) => {
                    let key = (pod.id.namespace.to_string(), pod.id.name.to_string());
                    let taken = self.pods.contains_key(&key);
                    if !taken {
                        self.pods.insert(key, Arc::clone(pod));
                    }
                    ("pod", pod.id.to_string(), taken)
                }
                Object::Namespace(namespace) => {
                    let name = namespace.name.to_string();
                    let taken = self.namespaces.contains_key(&name);
                    if !taken {
                        self.namespaces.insert(name.clone(), Arc::clone(namespace));
                    }
                    ("namespace", name, taken)
                }
            };
            if taken {
                self.report(Problem {
                    place: place.into(),
                    line: None,
                    field: Some("metadata.name".into()),
                    message: format!(
                        "{kind} {name} is defined before, in this file or one sorted before it; ignored here"
                    ),
                });
            }
        }
    }

    /// Adds a problem.
    pub(super) fn report(&mut self, problem: Problem) {
        self.problems
            .entry(problem.place.clone())
            .or_default()
            .push(problem);
    }

    pub(super) fn pod(&self, namespace: &str, name: &str) -> Option<Arc<Pod>> {
        self.pods.get(&(namespace.to_owned(), name.to_owned())).cloned()
    }

    pub(super) fn namespace(&self, name: &str) -> Option<Arc<Namespace>> {
        self.namespaces.get(name).cloned()
    }

    /// The events that lead from `self` to `new`. Namespaces are there before their pods and go after them; whether
    /// unknown ones may exist is told so that no absence is believed in between.
    pub(super) fn changes(&self, new: &Self) -> Vec<SourceEvent> {
        let mut events = Vec::new();
        if new.undetermined && !self.undetermined {
            events.push(SourceEvent::Undetermined(true));
        }
        let applied = new
            .namespaces
            .iter()
            .filter(|(key, value)| self.namespaces.get(*key) != Some(value));
        events.extend(applied.map(|(_, namespace)| SourceEvent::NamespaceApplied(Arc::clone(namespace))));
        let replaced = |old: &Arc<Pod>, key| new.pods.get(key).is_none_or(|pod| pod.id.uid != old.id.uid);
        let deleted = self.pods.iter().filter(|(key, old)| replaced(old, *key));
        events.extend(deleted.map(|(_, pod)| SourceEvent::PodDeleted(Arc::clone(pod))));
        let applied = new
            .pods
            .iter()
            .filter(|(key, value)| self.pods.get(*key) != Some(value));
        events.extend(applied.map(|(_, pod)| SourceEvent::PodApplied(Arc::clone(pod))));
        let deleted = self
            .namespaces
            .iter()
            .filter(|(key, _)| !new.namespaces.contains_key(*key));
        events.extend(deleted.map(|(_, namespace)| SourceEvent::NamespaceDeleted(Arc::clone(namespace))));
        if self.undetermined && !new.undetermined {
            events.push(SourceEvent::Undetermined(false));
        }
        for place in self.problems.keys() {
            if self.problems.get(place) != new.problems.get(place) {
                events.push(SourceEvent::ProblemCleared { place: place.clone() });
            }
        }
        for (place, problems) in &new.problems {
            if self.problems.get(place) != Some(problems) {
                events.extend(problems.iter().cloned().map(SourceEvent::Problem));
            }
        }
        events
    }
}
